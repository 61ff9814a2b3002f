"""The checker's rules on room: what the residencies of a plan take at each op, as its allocation model counts it."""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict

from tieroff.core.check.rules import Rule, refuse
from tieroff.core.plan import AllocationKind, Plan, Residency
from tieroff.core.tensor import Tier
from tieroff.core.trace import Trace
from tieroff.units import format_bytes


def check_bytes(plan: Plan, ring: Trace, granule_bytes: int) -> None:
    """Rules address, budget and peak. Budgets below the device hold room in whole granules, peaks are bytes."""
    n = len(ring.ops)
    sizes = [ring.tensors[r.tensor].part_bytes(r.first_byte, r.stop_byte) for r in plan.residencies]
    used = {tier: _sum_per_op(plan, tier, sizes, n) for tier in Tier}
    room = dict(used)
    if granule_bytes > 1:
        padded = [-(-size // granule_bytes) * granule_bytes for size in sizes]
        room.update({tier: _sum_per_op(plan, tier, padded, n) for tier in (Tier.HOST, Tier.NVME)})
    if plan.allocation.kind is AllocationKind.ADDRESSES:
        used[Tier.DEVICE] = _highest_ends(plan, sizes, n)
    transient = [op.transient_bytes for op in ring.ops]
    for repeat in plan.repeats:
        transient[repeat.at] = max(transient[repeat.at], ring.ops[repeat.op].transient_bytes)
    room[Tier.DEVICE] = used[Tier.DEVICE] = [a + b for a, b in zip(used[Tier.DEVICE], transient, strict=True)]
    for tier in Tier:
        most = max(room[tier], default=0)
        limit = plan.budget_bytes.get(tier, 0)
        if most > limit:
            op = room[tier].index(most)
            refuse(
                Rule.BUDGET,
                f"{tier.value} holds {format_bytes(most)} at op {op} ({ring.ops[op].name}), "
                f"over its budget of {format_bytes(limit)}",
            )
        peak = max(used[tier], default=0)
        if plan.peak_bytes.get(tier, 0) != peak:
            found = plan.peak_bytes.get(tier, 0)
            refuse(Rule.PEAK, f"expected peak_bytes of {tier.value} to be {peak}, got {found}")


def check_allocation(plan: Plan) -> None:
    """Returns when the allocation model has the addresses it needs and no others; rule address."""
    allocation = plan.allocation
    expected = len(plan.residencies) if allocation.kind is AllocationKind.ADDRESSES else 0
    if len(allocation.addresses) != expected:
        refuse(Rule.ADDRESS, f"expected {expected} addresses for {allocation.kind.value}, got {len(allocation.addresses)}")
    for r, address in zip(plan.residencies, allocation.addresses, strict=False):
        if (address != -1) if r.tier is not Tier.DEVICE else address < 0:
            refuse(Rule.ADDRESS, f"expected an address of 0 or more on the device and -1 elsewhere, got {address} for {r}")


def _sum_per_op(plan: Plan, tier: Tier, sizes: list[int], op_count: int) -> list[int]:
    change = [0] * (2 * op_count + 1)
    for r, size in zip(plan.residencies, sizes, strict=True):
        if r.tier is tier:
            change[r.start] += size
            change[r.stop] -= size
    line = list(itertools.accumulate(change))
    return [line[op] + line[op + op_count] for op in range(op_count)]


def _highest_ends(plan: Plan, sizes: list[int], op_count: int) -> list[int]:
    """Returns the highest end of what is held at each op; what is held is kept sorted by address, free of overlaps."""
    begins: dict[int, list[tuple[int, int, Residency]]] = defaultdict(list)
    ends: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for r, size, address in zip(plan.residencies, sizes, plan.allocation.addresses, strict=True):
        if r.tier is not Tier.DEVICE:
            continue
        begins[r.start].append((address, address + size, r))
        ends[min(r.stop, op_count)].append((address, address + size))
        if r.stop > op_count:
            begins[0].append((address, address + size, r))
            ends[r.stop - op_count].append((address, address + size))
    held: list[tuple[int, int]] = []
    highest: list[int] = []
    for op in range(op_count):
        for span in ends[op]:
            del held[bisect.bisect_left(held, span)]
        for start, stop, r in begins[op]:
            position = bisect.bisect_left(held, (start, stop))
            for other in held[max(position - 1, 0) : position + 1]:
                if other[0] < stop and start < other[1]:
                    refuse(
                        Rule.ADDRESS,
                        f"addresses {start} to {stop} and {other[0]} to {other[1]} are held at once at op {op}, one by {r}",
                    )
            held.insert(position, (start, stop))
        highest.append(held[-1][1] if held else 0)
    return highest
