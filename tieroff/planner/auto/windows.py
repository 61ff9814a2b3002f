"""From chosen slots to windows: when each tensor is released and when its load is issued.

[Note: sweep]
The ops are walked in order with a clock that runs as the links are expected to run (one transfer at a time, in order
of issue). Committed bytes per op are known for the whole step at every moment: what is required, what was not chosen,
and the windows fixed so far. Nothing is committed that takes an op over the budget, so every window fits.
* A copy out is queued right after the last write. When the gap begins, the tensor stays until its copy is expected to
  be done; if a later op needs the room before, up to that op, which then waits. Releases are revised at every tick:
  earlier when the copy is done, later when it is late and there is still room.
* Where evictions may be late, a step whose end would wait for copies of optimizer state is walked over a second time: it
  begins with these tensors on the device and what is left of their copies on the links, as the step after it does. They
  are released as above, at the beginning of the step, as far as there is room. The walk that ends earlier counts.
* Loads are taken in order of deadline. A load is issued as soon as it is in reach (the latest start that lets all
  loads of its link be in time, less a lead) and its bytes fit at every op up to its use; at its use at the latest.
The walk itself is native/src/search/windows_sweep.cpp.
"""

from __future__ import annotations

import numpy as np

from tieroff.planner.auto.select import Selection
from tieroff.planner.native import _native
from tieroff.planner.problem.assemble import Move
from tieroff.planner.problem.moved import NO_WRITE, dirty_writes, slot_columns
from tieroff.planner.problem.pieces import LOWER
from tieroff.planner.problem.problem import Bytes, Problem, Slot, holds_within

_NEVER = -1


def _rows(problem: Problem, selection: Selection) -> tuple[list[Slot], Bytes]:
    """Returns the chosen slots by tensor, in order, and a row for each column of `_native.sweep_windows`."""
    op_count = problem.op_count
    slots = sorted(selection.slots, key=lambda s: (s.tensor, s.start))
    tensor, start, stop, is_boundary, is_last = slot_columns(slots)
    write = dirty_writes(problem, tensor, start, stop)
    copy_tick = np.where(write == NO_WRITE, _NEVER, np.minimum(np.maximum(write + 1, 0), start))
    limit = np.where(is_boundary, op_count, stop - 1)
    deadline = np.where(is_boundary, stop - op_count, stop)
    own = [(LOWER.index(tier), *problem.move_ns(tier, problem.size_bytes(t))) for t, tier in selection.tier_of.items()]
    moved = np.zeros((len(problem.trace.tensors), 3), np.int64)
    moved[list(selection.tier_of)] = np.array(own, np.int64).reshape(-1, 3)
    tier, out_ns, back_ns = moved[tensor].T
    size = problem.sizes[tensor]
    late_limit = np.where(problem.may_leave_late[tensor] & (is_boundary == 1), np.maximum(deadline - 1, 0), 0)
    columns = (tensor, tier, start, limit, deadline, copy_tick, size, out_ns, back_ns, is_boundary, is_last, late_limit)
    return slots, np.stack(columns)


def _move(problem: Problem, slot: Slot, release_at: int, load_at: int) -> Move:
    if slot.is_last:
        return Move(slot, release_at, slot.stop)
    return Move(slot, release_at, load_at + problem.op_count if slot.is_boundary else load_at)


def make_moves(problem: Problem, selection: Selection, lead_ns: int) -> list[Move]:
    """Returns one move per chosen slot; see [Note: sweep]. No op goes over the device's budget.

    Args:
        problem: the problem.
        selection: slots that bring every op under the budget.
        lead_ns: how much earlier than the latest start a load may be issued.
    """
    selection = _with_gaps(problem, selection)
    slots, rows = _rows(problem, selection)
    usage = selection.usage.copy()
    ticks = _native.sweep_windows(usage, problem.starts_ns, problem.device_bytes, lead_ns, *rows)
    releases, loads = (column.tolist() for column in ticks)
    moves = [_move(problem, *each) for each in zip(slots, releases, loads, strict=True)]
    return _settle(problem, moves, usage)


def _with_gaps(problem: Problem, selection: Selection) -> Selection:
    """Returns the selection with the longest gap of each tied tensor whose chosen slots have no idle op.

    A tied tensor has to leave. One that the last op and the first both use cannot do so at the step's end.
    """
    op_count = problem.op_count
    chosen = [slot for slot in selection.slots if slot.tensor in problem.tied]
    bare = {slot.tensor for slot in chosen} - {slot.tensor for slot in chosen if slot.pieces(op_count)}
    if not bare:
        return selection
    usage, added = selection.usage.copy(), []
    for unit in problem.units:
        for tensor in bare.intersection(unit.tensors):
            longest = max((slot for slot in unit.slots if slot.tensor == tensor), key=lambda s: s.stop - s.start)
            added.append(longest)
            for start, stop in longest.pieces(op_count):
                usage[start:stop] -= problem.size_bytes(tensor)
    return Selection((*selection.slots, *added), selection.tier_of, usage)


def _settle(problem: Problem, moves: list[Move], usage: Bytes) -> list[Move]:
    """Drops moves of tensors that turn out to fit while they are away, the largest first, and mends empty ones.

    A tensor's boundary move is dropped only with no other move of it left. A tied tensor has to leave: an inner move of
    it is dropped only where another one has it away or can at the boundary, and one left alone and empty gets an op. Without a
    boundary, as gradients are, one of several stays.
    """
    by_tensor: dict[int, list[Move]] = {}
    for move in moves:
        by_tensor.setdefault(move.slot.tensor, []).append(move)
    result: list[Move] = []
    for tensor in sorted(by_tensor, key=lambda t: (-problem.size_bytes(t), t)):
        left = by_tensor[tensor]
        is_tied = tensor in problem.tied
        crosses = is_tied and any(move.slot.is_boundary for move in left)
        for move in sorted(left, key=lambda m: m.slot.is_boundary):
            is_needed = move.slot.is_boundary and not problem.capabilities.wraps and len(left) > 1
            if is_tied:
                others = [other for other in left if other is not move]
                is_last = not _can_leave(others, problem.op_count) and (crosses or _can_leave([move], problem.op_count))
                is_needed = move.slot.is_boundary or not others or is_last
            if not is_needed and _fits(problem, move, usage):
                left.remove(move)
        if is_tied and len(left) == 1 and left[0].release_at == left[0].load_at:
            left = [_for_one_op(left[0], problem.op_count)]
        result += left
    return result


def _can_leave(moves: list[Move], op_count: int) -> bool:
    """Returns whether a move has its tensor away for an op, or is a boundary's and can be made to."""
    return any(move.release_at < move.load_at or (move.slot.is_boundary and move.slot.pieces(op_count)) for move in moves)


def _for_one_op(move: Move, op_count: int) -> Move:
    """Returns an empty move with one op in it: at the boundary the one on the side that is idle for longer."""
    slot, tick = move.slot, move.load_at
    if slot.is_boundary and slot.stop - op_count < op_count - slot.start:
        return Move(slot, tick - 1, tick)
    return Move(slot, tick, tick + 1)


def _fits(problem: Problem, move: Move, usage: Bytes) -> bool:
    """Returns whether the device has room for a tensor while it is away; takes the room if so."""
    op_count, size = problem.op_count, problem.size_bytes(move.slot.tensor)
    spans = [(move.release_at, move.load_at, size)]
    if move.slot.is_boundary:
        late = max(move.release_at - op_count, 0)
        spans = [(late, move.load_at - op_count, size), (move.release_at, op_count, size)]
    return holds_within(usage, [span for span in spans if span[0] < span[1]], problem.device_bytes)
