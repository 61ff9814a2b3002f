"""From chosen slots to windows: when each tensor is released and when its load is issued.

[Note: sweep]
The ops are walked in order with a clock that runs as the links are expected to run (one transfer at a time, in order
of issue). Committed bytes per op are known for the whole step at every moment: what is required, what was not chosen,
and the windows fixed so far. Nothing is committed that takes an op over the budget, so every window fits.
* A copy out is queued right after the last write. When the gap begins, the tensor stays until its copy is expected to
  be done; if a later op needs the room before, up to that op, which then waits. Releases are revised at every tick:
  earlier when the copy is done, later when it is late and there is still room.
* Loads are taken in order of deadline. A load is issued as soon as it is in reach (the latest start that lets all
  loads of its link be in time, less a lead) and its bytes fit at every op up to its use; at its use at the latest.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from tieroff.core.tensor import Tier
from tieroff.planner.build import Move, last_dirty_writes
from tieroff.planner.policies.select import Selection
from tieroff.planner.problem import Bytes, Problem, Slot

_NEVER = -1


@dataclass(slots=True)
class _Gap:
    """One chosen slot on its way to a move. Positions are on the line [0, n]."""

    slot: Slot
    size_bytes: int
    release_limit: int
    deadline: int
    copy_tick: int  # when its copy out is queued; -1 if the copy below is valid
    out_ns: int
    back_ns: int
    tier: Tier
    copied_ns: int = _NEVER
    loaded_ns: int = _NEVER
    release_at: int = _NEVER
    load_at: int = _NEVER
    reach_ns: int = 0


class _Sweep:
    def __init__(self, problem: Problem, selection: Selection, lead_ns: int) -> None:
        self._problem = problem
        self._n = problem.op_count
        self._starts = problem.starts_ns
        self._line = problem.starts_ns.tolist()  # single values of it come faster from a list
        self.usage = selection.usage.copy()
        self._budget = problem.device_bytes
        self._now_ns = 0
        self._link_free: dict[tuple[Tier, bool], int] = {}
        self._gaps = self._make_gaps(selection)
        self._copies: list[list[_Gap]] = [[] for _ in range(self._n + 1)]
        self._begins: list[list[_Gap]] = [[] for _ in range(self._n + 1)]
        self._due: list[list[_Gap]] = [[] for _ in range(self._n + 1)]
        for gap in self._gaps:
            if gap.copy_tick >= 0:
                self._copies[gap.copy_tick].append(gap)
            self._begins[gap.slot.start].append(gap)
            if not gap.slot.is_last:
                self._due[gap.deadline].append(gap)
        self._leaving: list[_Gap] = []  # in the order in which they began
        self._copying: list[tuple[int, int]] = []  # a heap: when a copy is done, and which of them
        self._stays: list[list[int]] = [[] for _ in range(self._n + 1)]  # those that stay up to a tick
        self._loads = self._order_loads(lead_ns)

    def _make_gaps(self, selection: Selection) -> list[_Gap]:
        problem = self._problem
        by_tensor: dict[int, list[Slot]] = {}
        for slot in sorted(selection.slots, key=lambda s: (s.tensor, s.start)):
            by_tensor.setdefault(slot.tensor, []).append(slot)
        gaps: list[_Gap] = []
        for tensor, slots in by_tensor.items():
            tier = selection.tier_of[tensor]
            size = problem.size_bytes(tensor)
            out, back = problem.links(tier)
            times = out.transfer_ns(size), back.transfer_ns(size)
            for slot, write in zip(slots, last_dirty_writes(problem, slots), strict=True):
                copy_tick = _NEVER if write is None else min(max(write + 1, 0), slot.start)
                limit, deadline = (self._n, slot.stop - self._n) if slot.is_boundary else (slot.stop - 1, slot.stop)
                gaps.append(_Gap(slot, size, limit, deadline, copy_tick, *times, tier))
        return gaps

    def _order_loads(self, lead_ns: int) -> dict[Tier, list[_Gap]]:
        """Returns the loads of each tier, last deadline first, with the time from which each is in reach."""
        loads: dict[Tier, list[_Gap]] = {}
        for gap in sorted(self._gaps, key=lambda g: (-g.deadline, -g.slot.tensor)):
            if not gap.slot.is_last:
                loads.setdefault(gap.tier, []).append(gap)
        for queue in loads.values():
            latest = self._line[-1]
            for gap in queue:
                latest = min(latest, self._line[gap.deadline]) - gap.back_ns
                gap.reach_ns = latest - lead_ns
        return loads

    def run(self) -> list[Move]:
        """Walks the step and returns the moves."""
        for tick in range(self._n + 1):
            self._revise(tick)
            for gap in self._copies[tick]:
                gap.copied_ns = self._serve(gap.tier, leaves=True, duration_ns=gap.out_ns)
            for gap in self._begins[tick]:
                self._begin(gap, tick)
            self._issue_loads(tick)
            for gap in self._due[tick]:
                if gap.load_at == _NEVER:
                    self._issue(gap, tick)
                self._now_ns = max(self._now_ns, gap.loaded_ns)
            if tick < self._n:
                self._now_ns += self._line[tick + 1] - self._line[tick]
        return [self._move(gap) for gap in self._gaps]

    def _move(self, gap: _Gap) -> Move:
        if gap.slot.is_last:
            return Move(gap.slot, gap.release_at, gap.slot.stop)
        shift = self._n if gap.slot.is_boundary else 0
        return Move(gap.slot, gap.release_at, gap.load_at + shift)

    def _serve(self, tier: Tier, *, leaves: bool, duration_ns: int) -> int:
        done = max(self._now_ns, self._link_free.get((tier, leaves), 0)) + duration_ns
        self._link_free[tier, leaves] = done
        return done

    def _extend(self, gap: _Gap, tick: int) -> int:
        """Returns the tick up to which a leaving tensor stays from `tick` on, and commits its bytes."""
        target_ns = gap.copied_ns - self._now_ns + self._line[min(tick, self._n)]
        stop = min(int(np.searchsorted(self._starts, target_ns)), gap.release_limit)
        if stop <= tick:
            return tick
        over = self.usage[tick:stop] > self._budget - gap.size_bytes
        if over.any():
            stop = tick + int(np.argmax(over))
        self.usage[tick:stop] += gap.size_bytes
        return stop

    def _begin(self, gap: _Gap, tick: int) -> None:
        gap.release_at = tick
        if gap.copy_tick >= 0:
            gap.release_at = self._extend(gap, tick)
            if gap.release_at > tick:
                self._leaving.append(gap)
                number = len(self._leaving) - 1
                heapq.heappush(self._copying, (gap.copied_ns, number))
                self._stays[gap.release_at].append(number)
            else:
                self._now_ns = max(self._now_ns, gap.copied_ns)

    def _revise(self, tick: int) -> None:
        """Releases what is copied, and waits for what must go; in the order in which gaps began.

        Looks only at gaps whose copy is done by now and at those that stay up to this tick.
        """
        due = self._stays[tick] + self._copied()
        heapq.heapify(due)
        late: list[int] = []  # copied too late for their turn: they go at the next tick
        while due:
            number = heapq.heappop(due)
            gap = self._leaving[number]
            if gap.copied_ns <= self._now_ns and gap.release_at > tick:
                self.usage[tick : gap.release_at] -= gap.size_bytes
                gap.release_at = tick
            elif gap.release_at == tick and gap.copied_ns > self._now_ns:
                gap.release_at = self._extend(gap, tick)
                if gap.release_at > tick:
                    self._stays[gap.release_at].append(number)
                    continue
                self._now_ns = gap.copied_ns
                for other in self._copied():
                    if other > number:
                        heapq.heappush(due, other)
                    else:
                        late.append(other)
        for number in late:  # only now: `_copied` would find them again at every wait
            heapq.heappush(self._copying, (self._leaving[number].copied_ns, number))

    def _copied(self) -> list[int]:
        """Returns the gaps whose copies are done by now, each once."""
        found: list[int] = []
        while self._copying and self._copying[0][0] <= self._now_ns:
            found.append(heapq.heappop(self._copying)[1])
        return found

    def _issue_loads(self, tick: int) -> None:
        """Issues loads in order of deadline while the next one is in reach and fits."""
        blocked: set[Tier] = set()
        while True:
            heads = [q[-1] for tier, q in self._loads.items() if q and tier not in blocked]
            if not heads:
                return
            gap = min(heads, key=lambda g: (g.deadline, g.slot.tensor))
            if gap.load_at != _NEVER:
                self._loads[gap.tier].pop()
                continue
            is_away = gap.slot.is_boundary or _NEVER < gap.release_at <= tick
            is_far = tick < gap.deadline and self._line[tick + 1] <= gap.reach_ns  # the next tick is early enough
            if not is_away or is_far:
                blocked.add(gap.tier)
                continue
            highest = int(self.usage[tick : gap.deadline].max(initial=0))
            if tick < gap.deadline and highest + gap.size_bytes > self._budget:
                return
            self._loads[gap.tier].pop()
            self._issue(gap, tick)

    def _issue(self, gap: _Gap, tick: int) -> None:
        gap.load_at = tick
        self.usage[tick : gap.deadline] += gap.size_bytes
        gap.loaded_ns = self._serve(gap.tier, leaves=False, duration_ns=gap.back_ns)


def make_moves(problem: Problem, selection: Selection, lead_ns: int) -> list[Move]:
    """Returns one move per chosen slot; see [Note: sweep]. No op goes over the device's budget.

    Args:
        problem: the problem.
        selection: slots that bring every op under the budget.
        lead_ns: how much earlier than the latest start a load may be issued.
    """
    sweep = _Sweep(problem, _with_gaps(problem, selection), lead_ns)
    return _settle(problem, sweep.run(), sweep.usage)


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
    it is dropped only where another one has it away or can at the boundary, and one left alone and empty gets an op.
    """
    by_tensor: dict[int, list[Move]] = {}
    for move in moves:
        by_tensor.setdefault(move.slot.tensor, []).append(move)
    result: list[Move] = []
    for tensor in sorted(by_tensor, key=lambda t: (-problem.size_bytes(t), t)):
        left = by_tensor[tensor]
        is_tied = tensor in problem.tied
        crosses = any(move.slot.is_boundary for move in left)
        for move in sorted(left, key=lambda m: m.slot.is_boundary):
            is_needed = move.slot.is_boundary and not problem.capabilities.wraps and len(left) > 1
            if is_tied:
                others = [other for other in left if other is not move]
                is_needed = move.slot.is_boundary or not crosses or not _can_leave(others, problem.op_count)
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
    away = Slot(move.slot.tensor, move.release_at, move.load_at, move.slot.is_boundary)
    pieces = away.pieces(problem.op_count)
    size = problem.size_bytes(move.slot.tensor)
    if any(int(usage[start:stop].max()) + size > problem.device_bytes for start, stop in pieces if start < stop):
        return False
    for start, stop in pieces:
        usage[start:stop] += size
    return True
