"""Planned addresses for what a plan holds: on the device, and in the files and pools of the tiers below.

[Note: addresses on a trace]
A residency that wraps round the step's end must lie at one address on both sides of it, so the packer works on the trace
itself: what overlaps there in time never overlaps in space. The transient bytes of an op are free room above all
that is held at it. Hence the room taken at an op is the highest end held there plus its transient bytes, and the
footprint is a peak that is proven by the addresses: never less than the sum of what is held, and more where room is
left between.

Parts of one tensor are residencies of their own and need not lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tieroff.core.plan import Allocation, AllocationKind, Plan, Residency
from tieroff.core.tensor import Tier
from tieroff.core.trace import Trace
from tieroff.errors import InfeasiblePlanError
from tieroff.planner.layout import QUICK, Budget, Layout, pack_ring, padded
from tieroff.units import format_bytes

DEVICE_ALIGNMENT_BYTES = 512  # what CUDA's own allocators give at least
_ROUNDS_MAX = 8

_NOWHERE = -1


def with_addresses(plan: Plan, trace: Trace, alignment_bytes: int = DEVICE_ALIGNMENT_BYTES, budget: Budget = QUICK) -> Plan:
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
    layout = pack_ring(buffers, above, plan.budget_bytes[Tier.DEVICE], alignment_bytes, budget)
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


def plan_with_addresses(
    make: Callable[[int], Plan],
    trace: Trace,
    device_bytes: int,
    alignment_bytes: int = DEVICE_ALIGNMENT_BYTES,
    budget: Budget = QUICK,
) -> Plan:
    """Returns a plan whose addresses fit in `device_bytes`.

    Plans for less by the overshoot until one fits, as AutoTM does with its allocator's.

    Args:
        make: returns a plan for a device budget in bytes.
        trace: what it plans.
        device_bytes: the room that there is.
        alignment_bytes, budget: as for `with_addresses`.

    Raises:
        InfeasiblePlanError: `make` found no plan for a budget that was low enough for the addresses to fit.
    """
    limit_bytes = device_bytes
    for _ in range(_ROUNDS_MAX):
        try:
            plan = make(limit_bytes)
        except InfeasiblePlanError as error:
            if limit_bytes == device_bytes:
                raise
            raise _no_room(device_bytes, limit_bytes, error) from error
        plan = replace(plan, budget_bytes={**plan.budget_bytes, Tier.DEVICE: device_bytes})
        plan = with_addresses(plan, trace, alignment_bytes, budget)
        if not overshoot_bytes(plan):
            return plan
        limit_bytes = max(0, limit_bytes - overshoot_bytes(plan))
    raise _no_room(device_bytes, limit_bytes, None)


def file_layout(plan: Plan, trace: Trace, tier: Tier, granule_bytes: int, budget: Budget = QUICK) -> Layout:
    """Returns the offset of each residency of a lower tier in its pool or file; -1 for residencies elsewhere.

    Extents start at multiples of `granule_bytes` and take whole ones. At a tick residencies end before loads are
    awaited, so an extent is kept one op longer when a load from it is awaited at its end.

    Raises:
        ConfigError: a granule below 1.
    """
    op_count = len(trace.ops)
    awaited = {
        (t.tensor, t.first_byte, t.stop_byte, t.ready_by % op_count)
        for t in plan.transfers
        if t.source is tier and t.target is Tier.DEVICE
    }
    held: list[int] = []
    buffers: list[tuple[int, int, int]] = []
    for index, r in enumerate(plan.residencies):
        if r.tier is not tier:
            continue
        is_read_last = (r.tensor, r.first_byte, r.stop_byte, r.stop % op_count) in awaited
        held.append(index)
        stop = min(r.stop + is_read_last, r.start + op_count)
        buffers.append((r.start, stop, padded(_size_bytes(trace, r), granule_bytes)))
    layout = pack_ring(buffers, [0] * op_count, None, granule_bytes, budget)
    offsets = [_NOWHERE] * len(plan.residencies)
    for index, offset in zip(held, layout.offsets, strict=True):
        offsets[index] = offset
    return replace(layout, offsets=tuple(offsets))


def _size_bytes(trace: Trace, residency: Residency) -> int:
    return trace.tensors[residency.tensor].part_bytes(residency.first_byte, residency.stop_byte)


def _no_room(device_bytes: int, limit_bytes: int, error: InfeasiblePlanError | None) -> InfeasiblePlanError:
    reserve_bytes = device_bytes - limit_bytes
    why = str(error) if error else f"the addresses still did not fit after {_ROUNDS_MAX} plans"
    return InfeasiblePlanError(
        f"expected addresses within {format_bytes(device_bytes)} of device memory; with {format_bytes(reserve_bytes)} "
        f"of them left for room between addresses: {why}. Raise the device's budget",
        op=error.op if error else "",
        needed_bytes=(error.needed_bytes if error else limit_bytes) + reserve_bytes,
        available_bytes=device_bytes,
    )
