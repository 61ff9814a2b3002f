"""What moves of whole tensors take, in columns: as the plan of `build_plan` would, without making it.

Most choices are soon beaten by others, and their plans, thousands of objects each, would be made in vain.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tieroff.core.tensor import Tier
from tieroff.planner.problem.assemble import Move
from tieroff.planner.problem.pieces import LOWER
from tieroff.planner.problem.problem import Bytes, Problem, Slot, ring_sum
from tieroff.planner.simulate.simulator import Totals, simulate_rows

NO_WRITE = np.iinfo(np.int64).min
_DEVICE = 0


def slot_columns(slots: Sequence[Slot]) -> Bytes:
    """Returns tensor, start, stop, is_boundary and is_last of slots, a row each."""
    return np.array([(s.tensor, s.start, s.stop, s.is_boundary, s.is_last) for s in slots], np.int64).reshape(-1, 5).T


def dirty_writes(problem: Problem, tensor: Bytes, start: Bytes, stop: Bytes) -> Bytes:
    """Returns what `last_dirty_writes` does for the moved slots of many tensors, in order of tensor and start.

    NO_WRITE stands for its None.
    """
    if not len(tensor):
        return tensor
    op_count = problem.op_count
    write = problem.writes_before(tensor, start)
    is_first = np.append(True, tensor[1:] != tensor[:-1])[: len(tensor)]
    last = np.append(np.flatnonzero(is_first)[1:], len(tensor)) - 1
    before = np.append(0, stop[:-1])[: len(tensor)]
    before[is_first] = np.where(problem.is_persistent[tensor[is_first]], stop[last] - op_count, 0)
    return np.where(write >= before, write, NO_WRITE)


def _shift(start: Bytes, stop: Bytes, op_count: int) -> Bytes:
    """Returns what brings each `start` into [0, n), where a synchronous event at the step's end stays there."""
    is_past = (start > op_count) | ((start == op_count) & (stop > start))
    return np.where(start < 0, op_count, np.where(is_past, -op_count, 0))


def _transfers(problem: Problem, columns: Bytes, tier: Bytes) -> Bytes:
    """Returns the transfers of moves, in order, unranked: a row each as `simulate_rows` takes them, with the move's number.

    Args:
        problem: the problem.
        columns: of the moves' slots, then their release and load; in order of tensor and start.
        tier: of each move the number of its lower tier, from 1.
    """
    op_count = problem.op_count
    tensor, start, stop, is_boundary, is_last, release, load = columns
    write = dirty_writes(problem, tensor, start, stop)
    out = np.flatnonzero(write != NO_WRITE)
    issue = np.minimum(write[out] + 1, release[out])
    if not problem.capabilities.wraps:
        issue = np.maximum(issue, 0)
    shift = _shift(issue, release[out], op_count)
    none = np.zeros_like(out)
    leaving = np.stack([none + _DEVICE, tier[out], issue + shift, release[out] + shift, none, out])
    back = np.flatnonzero(is_last == 0)
    shift = _shift(load[back], stop[back], op_count)
    shift[(is_boundary[back] == 1) & (load[back] == op_count)] = -op_count
    none = np.zeros_like(back)
    coming = np.stack([tier[back], none + _DEVICE, load[back] + shift, stop[back] + shift, none, back])
    rows = np.concatenate([leaving, coming], axis=1)
    return rows[:, np.argsort(2 * rows[5] + (rows[0] != _DEVICE))]


def _rank(rows: Bytes) -> None:
    """Ranks transfers per link: by tick of issue, then by deadline, which has synchronous copies first; see `build_plan`."""
    source, target, issue, ready = rows[:4]
    link = source * (len(LOWER) + 1) + target
    order = np.lexsort((ready, issue, link))  # stable: transfers come in order of tensor
    ranked = link[order]
    rows[4, order] = np.arange(len(order)) - np.searchsorted(ranked, ranked)


def _fits(problem: Problem, columns: Bytes, tier: Bytes, rows: Bytes) -> bool:
    """Returns whether every tier has room for the plan of the moves."""
    tensor, release, load = columns[0], columns[5], columns[6]
    size_bytes, op_count = problem.sizes[tensor], problem.op_count
    away = ring_sum(op_count, release, load, size_bytes)
    if int((problem.live - away).max(initial=0)) > problem.device_bytes:
        return False
    first = np.unique(tensor, return_index=True)[1]  # of each tensor its first move, and its first transfer
    begin = rows[2, np.unique(tensor[rows[5]], return_index=True)[1]]
    own = tensor[first]
    is_persistent = problem.is_persistent[own]
    deaths = np.array([problem.trace.lifetimes[t].death for t in own.tolist()], np.int64)
    begin, end = np.where(is_persistent, 0, begin), np.where(is_persistent, op_count, deaths)
    for number, lower in enumerate(LOWER, start=1):
        mine = tier[first] == number
        held = ring_sum(op_count, begin[mine], end[mine], problem.sizes[own[mine]])
        if int(held.max(initial=0)) > problem.budget[lower]:
            return False
    return True


def totals_of_moves(problem: Problem, moves: list[Move], tier_of: dict[int, Tier]) -> Totals | None:
    """Returns what `simulate_totals` does for the plan that `build_plan` makes of moves, None where a tier has no room."""
    slots = slot_columns([move.slot for move in moves])
    times = np.array([(move.release_at, move.load_at) for move in moves], np.int64).reshape(-1, 2).T
    columns = np.concatenate([slots, times])
    columns = columns[:, np.lexsort((columns[2], columns[1], columns[0]))]
    number = {tier: i for i, tier in enumerate(LOWER, start=1)}
    tier = np.array([number[tier_of[t]] for t in columns[0].tolist()], np.int64)
    rows = _transfers(problem, columns, tier)
    if not _fits(problem, columns, tier, rows):
        return None
    _rank(rows)
    rows[5] = problem.sizes[columns[0][rows[5]]]
    return simulate_rows(np.ascontiguousarray(rows.T), (), problem.trace, problem.machine)
