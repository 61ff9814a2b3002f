"""Planned addresses on the device for what a plan holds.

[Note: addresses on a ring]
A residency that wraps round the step's end must lie at one address on both sides of it, so the packer works on the ring
itself: what overlaps there in time never overlaps in space. The transient bytes of an op are free room above all that is
held at it. So the room taken at an op is the highest end held there plus its transient bytes. The footprint is a peak that
the addresses prove: never less than the sum of what is held, and more where room is left between.

Parts of one tensor are residencies of their own and need not lie side by side.
"""

from __future__ import annotations

from dataclasses import replace

from tieroff.core.plan import Allocation, AllocationKind, Plan, Residency
from tieroff.core.tensor import Tier
from tieroff.core.trace import Trace
from tieroff.planner.layout import pack_ring

DEVICE_ALIGNMENT_BYTES = 512  # what CUDA's own allocators give at least
_NOWHERE = -1


def with_addresses(plan: Plan, trace: Trace, alignment_bytes: int = DEVICE_ALIGNMENT_BYTES) -> Plan:
    """Returns the plan with an address for each device residency, and the device's peak as these addresses prove it.

    The peak may be above the device's budget: see `overshoot_bytes`.

    Raises:
        ConfigError: an alignment below 1.
    """
    above = [op.transient_bytes for op in trace.ops]
    for repeat in plan.repeats:
        above[repeat.at] = max(above[repeat.at], trace.ops[repeat.op].transient_bytes)
    held = [index for index, r in enumerate(plan.residencies) if r.tier is Tier.DEVICE]
    buffers = [(r.start, r.stop, _size_bytes(trace, r)) for r in (plan.residencies[index] for index in held)]
    layout = pack_ring(buffers, above, plan.budget_bytes[Tier.DEVICE], alignment_bytes)
    highest = list(above)
    for (start, stop, size), offset in zip(buffers, layout.offsets, strict=True):
        for op in range(start, stop):
            op %= len(above)
            highest[op] = max(highest[op], offset + size + above[op])
    addresses = [_NOWHERE] * len(plan.residencies)
    for index, offset in zip(held, layout.offsets, strict=True):
        addresses[index] = offset
    return replace(
        plan,
        peak_bytes={**plan.peak_bytes, Tier.DEVICE: max(highest, default=0)},
        allocation=Allocation(AllocationKind.ADDRESSES, addresses=tuple(addresses)),
    )


def overshoot_bytes(plan: Plan) -> int:
    """Returns by how much the plan's device peak is above its budget, or 0."""
    return max(0, plan.peak_bytes[Tier.DEVICE] - plan.budget_bytes[Tier.DEVICE])


def _size_bytes(trace: Trace, residency: Residency) -> int:
    return trace.tensors[residency.tensor].part_bytes(residency.first_byte, residency.stop_byte)
