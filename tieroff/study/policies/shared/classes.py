"""A device's memory as a pool of objects in size classes, and the swaps that follow from how many each class has.

[Note: walk]
The ops are walked in order. A tensor that is needed and not resident takes an object of its class: one that nothing has
used, else the one that has been free for longest, else that of the idle tensor which is needed furthest in the future.
A walk begins with some persistent tensors resident and ends so: at its end others leave, and these come back.

Each eviction is noted with the tick by which it must be over, each return with the object that it takes. Times follow
when all is known: copies out go one after the other from the last use on; a copy in begins when its object is free, and
not before that of a tensor needed earlier. No object ever holds two tensors at once, so the pool's bytes are never
exceeded.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tieroff.core.plan import Plan
from tieroff.core.tensor import Tier
from tieroff.planner.problem.assemble import Move, build_plan
from tieroff.planner.problem.problem import LowerRoom, Problem, Slot
from tieroff.study.policies.shared.swaps import double_starts_ns, none_empty, with_companions, with_copies_at_gaps

Classes = tuple[tuple[int, int], ...]
"""Size of the objects of each class in ascending order, and their number."""

_BISECTIONS = 40


@dataclass(frozen=True, slots=True)
class _Object:
    """When an object becomes free: at a tick of the walk, or with the release of a slot, `shift` ticks earlier."""

    tick: int = 0
    slot: Slot | None = None
    shift: int = 0


@dataclass(slots=True)
class _Away:
    """A slot's absence. Ticks are of the slot's frame, which is `shift` ticks ahead of the walk's at the return."""

    release_by: int
    load_by: int = 0
    shift: int = 0
    taken: _Object = _Object()


class Pool:
    """What walks need of a problem.

    Attributes:
        sizes: of tensors that can move, ascending.
        slots_of: all slots of each tensor that can move.
        begins: per op, tensors whose required intervals begin, and the position of the interval.
        bytes: the device's budget less the most that cannot move.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.slots_of: dict[int, list[Slot]] = {}
        for unit in problem.units:
            for slot in unit.slots:
                self.slots_of.setdefault(slot.tensor, []).append(slot)
        self.sizes = sorted({problem.size_bytes(tensor) for tensor in self.slots_of})
        index_of = {size: index for index, size in enumerate(self.sizes)}
        required = np.zeros((len(self.sizes), problem.op_count + 1), np.int64)
        alive = np.zeros_like(required)
        fixed = problem.live.copy()
        self.begins: list[list[tuple[int, int]]] = [[] for _ in range(problem.op_count)]
        for tensor in sorted(self.slots_of):
            life, row = problem.trace.lifetimes[tensor], index_of[problem.size_bytes(tensor)]
            for position, (start, stop) in enumerate(life.required):
                self.begins[start].append((tensor, position))
                required[row, [start, stop]] += (1, -1)
            alive[row, [life.birth, life.death]] += (1, -1)
            fixed[life.birth : life.death] -= problem.size_bytes(tensor)
        self._required = np.cumsum(required, axis=1)
        self._alive = np.cumsum(alive, axis=1)
        self.bytes = problem.device_bytes - int(fixed.max())

    def classes(self, is_top: Sequence[bool], wants: Sequence[float]) -> Classes:
        """Returns classes in which every op can run, and that fit in the pool where that can be.

        Args:
            is_top: per size, whether a class ends with it; the last one always does.
            wants: per size, how much it asks for more objects than it needs at least.
        """
        tops = [index for index, ends in enumerate(is_top[:-1]) if ends] + [len(self.sizes) - 1]
        spans = list(zip([0] + [top + 1 for top in tops[:-1]], [top + 1 for top in tops], strict=True))
        counts = np.array([self._required[a:b].sum(axis=0).max() for a, b in spans])
        spare = np.array([self._alive[a:b].sum(axis=0).max() for a, b in spans]) - counts
        asked = np.array([sum(wants[a:b]) / (b - a) for a, b in spans])
        sizes = np.array([self.sizes[top] for top in tops])
        left = self.bytes - int(counts @ sizes)
        low, high = 0.0, 1.0 / asked.min()
        for _ in range(_BISECTIONS if left > 0 else 0):
            middle = (low + high) / 2
            fits = int(np.minimum(spare, spare * asked * middle).astype(np.int64) @ sizes) <= left
            low, high = (middle, high) if fits else (low, middle)
        more = np.minimum(spare, spare * asked * low).astype(np.int64)
        left -= int(more @ sizes)
        for index in reversed(range(len(tops))):
            extra = max(0, min(int(spare[index] - more[index]), left // int(sizes[index])))
            more[index] += extra
            left -= extra * int(sizes[index])
        return tuple(zip(sizes.tolist(), (counts + more).tolist(), strict=True))

    def plan(self, policy: str, classes: Classes) -> Plan:
        """Returns the plan that follows from the classes: a walk from an empty device, then one that ends as it began."""
        problem = self.problem
        aways = _Walk(self, classes, _Walk(self, classes, set()).early).aways
        room = LowerRoom(problem)
        chosen: list[Slot] = []
        for unit in problem.units:
            slots = [slot for slot in unit.slots if slot in aways]
            if slots and room.place(unit.tensors, problem.tiers):
                chosen += with_companions(problem, unit, slots)
        moves = _moves(problem, chosen, aways, room.tier_of)
        return with_copies_at_gaps(problem, build_plan(problem, policy, moves, room.tier_of))


@dataclass(slots=True)
class _Class:
    unused: int
    free: deque[_Object] = field(default_factory=deque)
    idle: list[tuple[int, int, int]] = field(default_factory=list)  # heap: -next use, tensor, index of its slot


class _Walk:
    """One walk with some tensors resident at the step's start; see [Note: walk].

    Attributes:
        early: persistent tensors that found an object that nothing had used.
        aways: the slots in which tensors leave.
    """

    def __init__(self, pool: Pool, classes: Classes, first: set[int]) -> None:
        self._pool = pool
        self._n = pool.problem.op_count
        tops = [size for size, _ in classes]
        own = [_Class(count) for _, count in classes]
        self._class_of = {t: own[int(np.searchsorted(tops, pool.problem.size_bytes(t)))] for t in pool.slots_of}
        self._first = first
        self._resident: dict[int, int] = {}  # tensor -> index of the slot that it is idle in, or -1
        self._ends: list[list[tuple[int, int]]] = [[] for _ in range(self._n + 1)]  # tensor, index of the slot that begins
        self.early: set[int] = set()
        self.aways: dict[Slot, _Away] = {}
        self._run()

    def _run(self) -> None:
        for tensor in sorted(self._first):
            self._class_of[tensor].unused -= 1
            self._rest(tensor, len(self._pool.slots_of[tensor]) - 1, -self._n)
        for tick in range(self._n):
            self._end(tick)
            begins = self._pool.begins[tick]
            needed = [tensor for tensor, _ in begins if tensor not in self._resident]
            for tensor, position in begins:
                self._resident[tensor] = -1
                stop = self._pool.problem.trace.lifetimes[tensor].required[position][1]
                self._ends[stop].append((tensor, position))
            for tensor in needed:
                self._take(tensor, tick)
        self._end(self._n)
        self._restore()

    def _end(self, tick: int) -> None:
        """Required intervals have ended: their tensors are idle in the slot that begins here, or dead."""
        for tensor, position in self._ends[tick]:
            slots = self._pool.slots_of[tensor]
            index = next((i for i, slot in enumerate(slots) if slot.start == tick), -1)
            if position >= 0 and index >= 0:
                self._rest(tensor, index, 0)
                if slots[index].is_last:
                    self._ends[slots[index].stop].append((tensor, -1))
            elif self._pool.problem.trace.lifetimes[tensor].death == tick < self._n and tensor in self._resident:
                del self._resident[tensor]
                self._class_of[tensor].free.append(_Object(tick))

    def _rest(self, tensor: int, index: int, shift: int) -> None:
        slot = self._pool.slots_of[tensor][index]
        self._resident[tensor] = index
        next_use = 4 * self._n if slot.is_last else slot.stop + shift
        heapq.heappush(self._class_of[tensor].idle, (-next_use, tensor, index))

    def _take(self, tensor: int, tick: int) -> None:
        """Gives an object to a tensor that is needed at a tick."""
        own = self._class_of[tensor]
        taken = _Object()
        if own.unused > 0:
            own.unused -= 1
            if self._pool.problem.trace.tensors[tensor].is_persistent:
                self.early.add(tensor)
        elif own.free:
            taken = own.free.popleft()
        else:
            taken = self._evict(own, tick)
        for slot in self._pool.slots_of[tensor]:
            if not slot.is_last and slot.stop in (tick, tick + self._n):
                away = self.aways.setdefault(slot, _Away(self._n))
                away.shift = slot.stop - tick
                away.load_by, away.taken = slot.stop, taken

    def _evict(self, own: _Class, tick: int) -> _Object:
        """Sends out the idle tensor of a class that is needed furthest in the future."""
        while own.idle:
            _, tensor, index = heapq.heappop(own.idle)
            if self._resident.get(tensor) != index:
                continue
            del self._resident[tensor]
            slot = self._pool.slots_of[tensor][index]
            shift = 0 if slot.start <= tick else self._n
            away = self.aways.setdefault(slot, _Away(tick + shift))
            away.release_by = min(away.release_by, tick + shift)
            return _Object(tick, slot, shift)
        return _Object(tick)  # the class has fewer objects than an op needs: the plan shows what that takes

    def _restore(self) -> None:
        """Makes the step's end like its start."""
        for tensor in sorted(self._resident):
            slot = self._pool.slots_of[tensor][-1]
            if slot.is_boundary and tensor not in self._first:
                self.aways.setdefault(slot, _Away(self._n))
                self._class_of[tensor].free.append(_Object(self._n, slot))
        for tensor in sorted(self._first - self._resident.keys()):
            away, own = self.aways[self._pool.slots_of[tensor][-1]], self._class_of[tensor]
            if away.load_by <= self._n:  # else it left before its first use as well, and stays away until then
                away.taken = own.free.popleft() if own.free else _Object(self._n)
                away.load_by = self._n


def _moves(problem: Problem, chosen: list[Slot], aways: dict[Slot, _Away], tier_of: dict[int, Tier]) -> list[Move]:
    """Returns one move per slot; one that only goes along leaves as briefly as can be."""
    releases = _releases(problem, chosen, aways, tier_of)
    moves: list[Move] = []
    before: dict[Tier, int] = {}
    for slot in sorted(chosen, key=lambda s: (aways[s].load_by - aways[s].shift if s in aways else s.stop, s.tensor)):
        release = releases[slot]
        is_bound = slot.is_boundary and not problem.capabilities.wraps
        earliest = max(release, problem.op_count) if is_bound else release + 1
        if slot.is_last:
            moves.append(Move(slot, release, slot.stop))
        elif slot not in aways:
            moves.append(Move(slot, release, min(earliest, slot.stop)))
        else:
            away = aways[slot]
            taken = away.taken
            free = taken.tick if taken.slot is None else releases.get(taken.slot, taken.tick + taken.shift) - taken.shift
            tick = before[tier_of[slot.tensor]] = max(free, before.get(tier_of[slot.tensor], 0))
            moves.append(Move(slot, release, min(max(tick + away.shift, earliest), max(away.load_by, earliest))))
    return none_empty(moves)


def _releases(problem: Problem, chosen: list[Slot], aways: dict[Slot, _Away], tier_of: dict[int, Tier]) -> dict[Slot, int]:
    starts = double_starts_ns(problem)
    free_ns: dict[Tier, int] = {}
    releases: dict[Slot, int] = {}
    for slot in sorted(chosen, key=lambda s: (s.start, s.tensor)):
        tier = tier_of[slot.tensor]
        begin_ns = max(int(starts[slot.start]), free_ns.get(tier, 0))
        free_ns[tier] = begin_ns + problem.links(tier)[0].transfer_ns(problem.size_bytes(slot.tensor))
        is_bound = slot.is_boundary and not problem.capabilities.wraps
        limit = min(slot.stop, problem.op_count) if is_bound else slot.stop - 1
        limit = min(limit, aways[slot].release_by) if slot in aways else limit
        releases[slot] = max(slot.start, min(int(np.searchsorted(starts, free_ns[tier])), limit))
    return releases
