"""What policies that pick single gaps share: the slots that leave with a pick, and copies out that begin with the gap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace

import numpy as np

from tieroff.core.plan import Plan, Transfer
from tieroff.core.tensor import Tier
from tieroff.planner.problem.assemble import Move, peak_bytes
from tieroff.planner.problem.problem import Bytes, Problem, Slot, Unit
from tieroff.planner.simulate.options import rerank


def with_companions(problem: Problem, unit: Unit, chosen: Collection[Slot]) -> tuple[Slot, ...]:
    """Returns the slots of a unit that leave when the chosen ones do, in the unit's order; none if no op is idle in them.

    Where nothing may cross the step's end, a persistent tensor that moves at all is away at its boundary; of tensors
    that move together every one leaves at least once: in all of its slots where none with an idle op is among them.
    """
    op_count = problem.op_count
    if not any(slot.pieces(op_count) for slot in chosen):
        return ()
    is_bound = not problem.capabilities.wraps and len(unit.slots) > 1
    bound = {slot for slot in unit.slots if slot in chosen or (slot.is_boundary and is_bound)}
    left = {slot.tensor for slot in bound if slot.pieces(op_count)}
    return tuple(slot for slot in unit.slots if slot in bound or slot.tensor not in left)


def take_away(problem: Problem, usage: Bytes, slots: Iterable[Slot]) -> None:
    """Subtracts from the bytes per op what is away in these slots."""
    for slot in slots:
        for start, stop in slot.pieces(problem.op_count):
            usage[start:stop] -= problem.size_bytes(slot.tensor)


def none_empty(moves: list[Move]) -> list[Move]:
    """Returns the moves; a tensor's only one, where it is empty, gets its whole slot: who moves at all has to leave."""
    counts = Counter(move.slot.tensor for move in moves)
    return [
        Move(m.slot, m.slot.start, m.slot.stop) if m.release_at == m.load_at and counts[m.slot.tensor] == 1 else m
        for m in moves
    ]


def double_starts_ns(problem: Problem) -> Bytes:
    """Returns the start of each tick of two steps in a row, and the end of the second: 2 n + 1 values."""
    starts = problem.starts_ns
    return np.concatenate((starts[:-1], starts + starts[-1]))


def with_copies_at_gaps(problem: Problem, plan: Plan) -> Plan:
    """Returns the plan with every copy out issued at the start of its gap: after the last use, not after the last write.

    That is what published systems do. `plan` comes from `build_plan`.
    """
    op_count = problem.op_count
    begun: dict[int, int] = {}
    transfers: list[Transfer] = []
    for transfer in plan.transfers:
        if transfer.source is Tier.DEVICE:
            transfer = _at_gap(problem, transfer)
            begun.setdefault(transfer.tensor, op_count)
            begun[transfer.tensor] = min(begun[transfer.tensor], transfer.issue_at)
        transfers.append(transfer)
    residencies = [
        replace(r, start=begun[r.tensor])
        if r.tier is not Tier.DEVICE and not problem.trace.tensors[r.tensor].is_persistent
        else r
        for r in plan.residencies
    ]
    return replace(
        plan, residencies=tuple(residencies), transfers=rerank(transfers), peak_bytes=peak_bytes(problem, residencies)
    )


def _at_gap(problem: Problem, transfer: Transfer) -> Transfer:
    op_count = problem.op_count
    shifts = (0, op_count) if problem.trace.tensors[transfer.tensor].is_persistent else (0,)
    stops = [stop + shift for _, stop in problem.trace.lifetimes[transfer.tensor].required for shift in shifts]
    issue = max([stop for stop in stops if stop <= transfer.ready_by] + [transfer.issue_at])
    back = op_count if issue > op_count or (issue == op_count and transfer.ready_by > op_count) else 0
    return replace(transfer, issue_at=issue - back, ready_by=transfer.ready_by - back)
