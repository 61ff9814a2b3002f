"""What happens at ops that chosen moves leave over the device's budget: a run time evicts there, and fetches on demand.

The ops are walked in order. Where one is over, gaps that nobody chose are used from this op on, those of the least
recently used tensors first; the copy out is awaited at once and the way back starts with the next use. If they do not
suffice, copies out that are still under way are awaited, and loads that came early are put off to the use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tieroff.core.plan import Plan, Residency, Transfer
from tieroff.core.tensor import Tier
from tieroff.planner.problem.assemble import Move, build_plan, peak_bytes
from tieroff.planner.problem.problem import Bytes, LowerRoom, Problem, Slot, Unit
from tieroff.planner.simulate.options import rerank

Key = tuple[int, int]


def age(slot: Slot, op: int, op_count: int) -> int:
    """Returns how many ops before `op` the gap around it began."""
    return op - slot.start if slot.start <= op else op + op_count - slot.start


def least_recent(slot: Slot, op: int, op_count: int) -> int:
    """Sorts gaps by last use, the oldest first."""
    return -age(slot, op, op_count)


class Moves:
    """Moves chosen so far, with the bytes that they leave on the device at each op."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.usage: Bytes = problem.live.copy()
        self._places_gaps = problem.capabilities.wraps and not problem.tied
        self._room = LowerRoom(problem)
        self._free = {tier: np.full(problem.op_count, problem.budget[tier], np.int64) for tier in problem.tiers}
        self._tier_of_gap: dict[Key, Tier] = {}
        self._moves: dict[Key, Move] = {}

    def __contains__(self, slot: Slot) -> bool:
        return (slot.tensor, slot.start) in self._moves

    def put(self, slot: Slot, release_at: int, load_at: int) -> None:
        """Sets when a slot's tensor is away, in place of what was set before; the tensor must have a place below.

        At a boundary that nothing may cross, the two are brought to either side of it.
        """
        key = slot.tensor, slot.start
        before = self._moves.pop(key, None)
        if before is not None:
            self._count(before, 1)
        if slot.is_boundary and not self._problem.capabilities.wraps:
            release_at, load_at = min(release_at, self._problem.op_count), max(load_at, self._problem.op_count)
        self._moves[key] = Move(slot, release_at, slot.stop if slot.is_last else load_at)
        self._count(self._moves[key], -1)

    def put_rest(self, unit: Unit) -> None:
        """Adds, for each tensor of a unit that moves, what the executor asks to move with it, as whole slots.

        That is a persistent tensor's boundary where nothing crosses it, and some slot of each tensor that is tied.
        """
        problem = self._problem
        for tensor in unit.tensors:
            slots = [slot for slot in unit.slots if slot.tensor == tensor]
            is_tied = tensor in problem.tied
            if not is_tied and not any(slot in self for slot in slots):
                continue
            for slot in slots:
                if slot.is_boundary and not problem.capabilities.wraps and slot not in self:
                    self.put(slot, slot.start, slot.stop)
            own = [self._moves[slot.tensor, slot.start] for slot in slots if slot in self]
            if is_tied and not any(move.release_at < move.load_at for move in own):
                longest = max(slots, key=lambda slot: slot.stop - slot.start)
                self.put(longest, longest.start, longest.stop)

    def _count(self, move: Move, sign: int) -> None:
        if move.release_at < move.load_at:
            away = Slot(move.slot.tensor, move.release_at, move.load_at, move.load_at > self._problem.op_count)
            for start, stop in _ring_pieces(away, self._problem.op_count):
                self.usage[start:stop] += sign * self._problem.size_bytes(move.slot.tensor)

    def listed(self) -> list[Move]:
        """Returns the moves. An empty one is left out, but at a boundary that another move of its tensor asks for."""
        away = {move.slot.tensor for move in self._moves.values() if move.release_at < move.load_at}
        asks = not self._problem.capabilities.wraps
        return [
            move
            for move in self._moves.values()
            if move.release_at < move.load_at or (asks and move.slot.is_boundary and move.slot.tensor in away)
        ]

    def place(self, unit: Unit, order: tuple[Tier, ...]) -> bool:
        """Gives a unit a place in the first tier of `order` with room, and returns whether there is one.

        Where the executor lets a gap be a unit, the place is one for that gap alone.
        """
        if not self._places_gaps:
            return self._room.place(unit.tensors, order)
        slot, size = unit.slots[0], self._problem.room_bytes(unit.slots[0].tensor)
        start, stop = _stay(slot, self._problem.op_count)
        pieces = Slot(slot.tensor, start, stop, stop > self._problem.op_count).pieces(self._problem.op_count)
        for tier in order:
            if all(int(self._free[tier][start:stop].min()) >= size for start, stop in pieces):
                for start, stop in pieces:
                    self._free[tier][start:stop] -= size
                self._tier_of_gap[slot.tensor, slot.start] = tier
                return True
        return False

    def tier_of(self, unit: Unit) -> Tier | None:
        """Returns the tier in which a unit already has its place, if it has one."""
        slot = unit.slots[0]
        return self._tier_of_gap.get((slot.tensor, slot.start)) or self._room.tier_of.get(slot.tensor)

    def plan(self, policy: str) -> Plan:
        """Returns the plan of the moves. A gap with a place of its own is always written, at its start."""
        problem, moves = self._problem, self.listed()
        tier_of = {slot.tensor: self._tier_of_gap.get((slot.tensor, slot.start)) for slot in (m.slot for m in moves)}
        plan = build_plan(problem, policy, moves, {t: tier or self._room.tier_of[t] for t, tier in tier_of.items()})
        own = {tensor for tensor, tier in tier_of.items() if tier is not None}
        residencies = [r for r in plan.residencies if r.tier is Tier.DEVICE or r.tensor not in own]
        transfers = [t for t in plan.transfers if t.tensor not in own]
        stays: list[Residency] = []
        for move in moves:
            if move.slot.tensor in own:
                stay, both = _copies(problem, move, self._tier_of_gap[move.slot.tensor, move.slot.start])
                stays.append(stay)
                transfers += both
        residencies += _joined(stays, problem.op_count)
        transfers.sort(key=lambda t: (t.ready_by, t.tensor))
        peaks = peak_bytes(problem, residencies)
        return replace(plan, transfers=rerank(transfers), residencies=tuple(residencies), peak_bytes=peaks)

    def stay_while_copied(self) -> None:
        """Lets tensors stay until their copies are expected to be out, in order of their gaps, where there is room.

        Without it ops would wait for copies though nothing needs the bytes yet.
        """
        problem, count = self._problem, self._problem.op_count
        line_ns = np.concatenate((problem.starts_ns, problem.starts_ns[1:] + problem.starts_ns[-1]))
        free_ns: dict[Tier | None, int] = {}
        for move in sorted(self._moves.values(), key=lambda m: (m.slot.start % count, m.slot.tensor)):
            slot, size = move.slot, problem.size_bytes(move.slot.tensor)
            if (slot.is_boundary and not problem.capabilities.wraps) or move.release_at >= move.load_at:
                continue
            base = slot.start // count * count
            tier = self._tier_of_gap.get((slot.tensor, slot.start)) or self._room.tier_of[slot.tensor]
            begin_ns = max(free_ns.get(tier, 0), int(line_ns[slot.start - base]))
            free_ns[tier] = begin_ns + problem.links(tier)[0].transfer_ns(size)
            limit = min(base + int(np.searchsorted(line_ns, free_ns[tier])), move.load_at - 1)
            over = np.take(self.usage, np.arange(move.release_at, limit), mode="wrap") > problem.device_bytes - size
            stop = move.release_at + int(np.argmax(over)) if over.any() else limit
            if stop > move.release_at:
                self.put(slot, stop, move.load_at)

    def evict_where_over(self, order: tuple[Tier, ...], key: Callable[[Slot, int, int], int]) -> None:
        """Brings every op under the budget that can be; see the module. `key` sorts the gaps around an op, victims first."""
        problem = self._problem
        if int(self.usage.max(initial=0)) <= problem.device_bytes:
            return
        around: list[list[tuple[Unit, Slot]]] = [[] for _ in range(problem.op_count)]
        for unit in problem.units:
            for slot in unit.slots:
                for start, stop in slot.pieces(problem.op_count):
                    for op in range(start, stop):
                        around[op].append((unit, slot))
        for op in range(problem.op_count):
            if self.usage[op] <= problem.device_bytes:
                continue
            gaps = sorted(around[op], key=lambda pair: (key(pair[1], op, problem.op_count), pair[1].tensor))
            for unit, slot in [pair for pair in gaps if pair[1] not in self]:
                if self.usage[op] <= problem.device_bytes:
                    break
                if slot not in self and self.place(unit, order):
                    self.put(slot, _on_line(slot, op, problem.op_count), slot.stop)
                    self.put_rest(unit)
            self._hasten(op, [slot for _, slot in gaps if slot in self])

    def _hasten(self, op: int, slots: list[Slot]) -> None:
        """Ends copies out that are under way at an op, then puts off loads, until it is under the budget."""
        for puts_off in (False, True):
            for slot in slots:
                if self.usage[op] <= self._problem.device_bytes:
                    return
                move = self._moves[slot.tensor, slot.start]
                at = _on_line(slot, op, self._problem.op_count)
                if puts_off and move.load_at <= at:
                    self.put(slot, min(move.release_at, at) if move.release_at < move.load_at else at, slot.stop)
                elif not puts_off and move.release_at > at:
                    self.put(slot, at, move.load_at)


def _stay(slot: Slot, op_count: int) -> tuple[int, int]:
    """Returns the ops for which a gap's tensor takes room below: until its load is awaited, before op `stop`.

    Where the gap begins with the step's end it begins an op earlier, since a copy may be awaited right there.
    """
    start, stop = min(slot.start, op_count - 1), slot.stop + (not slot.is_last)
    return (start, stop) if stop - start <= op_count else (0, op_count)


def _copies(problem: Problem, move: Move, tier: Tier) -> tuple[Residency, list[Transfer]]:
    """Returns the stay below and the transfers of one gap that is written when it begins."""
    slot, count = move.slot, problem.op_count
    stay = Residency(slot.tensor, tier, *_stay(slot, count))
    base = count if slot.start >= count and move.release_at > slot.start else 0
    transfers = [Transfer(slot.tensor, Tier.DEVICE, tier, slot.start - base, move.release_at - base, 0)]
    if not slot.is_last:
        base = count if move.load_at >= count else 0
        transfers.append(Transfer(slot.tensor, tier, Tier.DEVICE, move.load_at - base, slot.stop - base, 0))
    return stay, transfers


def _joined(stays: list[Residency], op_count: int) -> list[Residency]:
    """Returns stays in one tier that touch as one: a copy that is awaited where it is issued is there before both."""
    joined: list[Residency] = []
    for stay in sorted(stays, key=lambda r: (r.tensor, r.tier, r.start)):
        last = joined[-1] if joined else None
        if last is not None and (last.tensor, last.tier) == (stay.tensor, stay.tier) and last.stop >= stay.start:
            joined[-1] = replace(last, stop=max(last.stop, stay.stop))
        else:
            joined.append(stay)
    first = {(r.tensor, r.tier): r for r in reversed(joined)}
    for index, last in enumerate(joined):
        head = first.get((last.tensor, last.tier), last)
        if head is not last and last.stop - op_count >= head.start:
            joined[index] = replace(last, stop=max(last.stop, head.stop + op_count))
            joined.remove(head)
            return _joined(joined, op_count)
    return joined


def _on_line(slot: Slot, op: int, op_count: int) -> int:
    return op if slot.start <= op else op + op_count


def _ring_pieces(away: Slot, op_count: int) -> tuple[tuple[int, int], ...]:
    """Returns the ops of an interval on the ring; it may lie in the next step as a whole."""
    if away.start >= op_count:
        return ((away.start - op_count, away.stop - op_count),)
    return away.pieces(op_count)
