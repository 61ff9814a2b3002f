"""`flashneuron`: the first activations of forward go to the NVMe, as many as backward leaves no room for.

Bae et al., "FlashNeuron: SSD-Enabled Large-Batch Training of Very Deep Neural Networks", FAST 2021.

The rule. What may stay of the activations that cross the end of forward is the device less all that persists and less
the largest footprint of one op. From the first one produced on, in order of production, activations above 1 MiB are
sent away until the rest is below that. Each is written after its last use in forward, one after the other; backward
waits for the last write. In backward, after every op, activations are fetched in the order of their use as far ahead
as the largest free stretch, less the largest footprint of one op, has room; what is not back when it is wanted is
fetched then. The device is one arena: activations that leave are placed from its right end, all else from its left, at
the first stretch that is wide enough; an op that finds none waits for writes to end.

Certain: the linear choice and the limit of 1 MiB (the authors' code); what may stay, the waiting, the arena and the
fetching ahead (the public simulator of G10, which describes them so). Backward begins here with the op after the loss.

Where the port differs. The second phase, which prefers activations that compress, is left out: a plan's transfers
carry all bytes of what they move, so nothing compresses (and 16-bit floats would change numbers). A trace without
room for the arena gets addresses beyond the budget, and its plan is over it. When the NVMe is full or there is none,
host memory is used.

On the ten ops of tests/golden/ten_ops.py. a, b and c, 16 MiB, cross the end of forward. What may stay is the device
less 12 that persist and 14 of the largest op: 7 in A, 5 in B. So a leaves, made first, and then b; ops 2 and 3 find no
room in the arena and wait for the writes. The largest free stretch is never wide enough to fetch ahead: both are
fetched when they are wanted.
* flashneuron: A `a>s 2-2, a<s 7-7, b>s 3-3, b<s 6-6`; B `a>s 2-2, a<s 7-7, b>s 3-3, b<s 6-6`
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import dataclass, field, replace

import numpy as np

from tieroff.core.plan import Allocation, AllocationKind, Plan
from tieroff.core.tensor import Tier
from tieroff.planner.policy import Assumptions, policy
from tieroff.planner.problem.assemble import Move, build_plan
from tieroff.planner.problem.problem import LowerRoom, Problem, Slot
from tieroff.study.policies.shared.copies import issued_at_start, retimed
from tieroff.study.policies.shared.reading import saved_slots, turn_of
from tieroff.units import MIB

_MIN_BYTES = MIB


@policy("flashneuron", paper="Bae et al., FAST 2021", published=True, assumes=Assumptions(compresses=True))
def plan_flashneuron(problem: Problem) -> Plan:
    """Returns the plan; it may be over the device's budget, by addresses too."""
    if problem.fits:
        return build_plan(problem, "flashneuron", [], {})
    room = LowerRoom(problem)
    slots = {slot.tensor: slot for slot in _choose(problem, room)}
    run = _Run(problem, slots, room.tier_of)
    run.run()
    moves = [Move(slot, run.release_at[tensor], run.load_at[tensor]) for tensor, slot in slots.items()]
    plan = build_plan(problem, "flashneuron", moves, room.tier_of)
    plan = retimed(problem, plan, issued_at_start(moves))
    return _with_addresses(problem, plan, run.addresses)


def _footprints(problem: Problem) -> tuple[list[int], list[int]]:
    """Returns the bytes that each op itself touches: all, and those that do not persist; transient bytes in both."""
    tensors = problem.trace.tensors
    both: tuple[list[int], list[int]] = ([], [])
    for op in problem.trace.ops:
        used = {*op.reads, *op.writes}
        both[0].append(op.transient_bytes + sum(tensors[t].size_bytes for t in used))
        both[1].append(op.transient_bytes + sum(tensors[t].size_bytes for t in used if not tensors[t].is_persistent))
    return both


def _choose(problem: Problem, room: LowerRoom) -> list[Slot]:
    """Returns the slots of the first activations, until what crosses the end of forward is below what may stay."""
    tensors, lifetimes = problem.trace.tensors, problem.trace.lifetimes
    turn = turn_of(problem.trace)
    persistent = sum(tensor.size_bytes for tensor in tensors if tensor.is_persistent)
    line = problem.device_bytes - persistent - max(_footprints(problem)[0])
    crossing = sum(
        tensor.size_bytes
        for tensor, life in zip(tensors, lifetimes, strict=True)
        if not tensor.is_persistent and life.birth < turn - 1 and life.death > turn - 1
    )
    chosen: list[Slot] = []
    for slot in saved_slots(problem):
        if crossing < line:
            break
        size = problem.size_bytes(slot.tensor)
        if size > _MIN_BYTES and slot.start < turn and room.place((slot.tensor,), problem.tiers[::-1]):
            chosen.append(slot)
            crossing -= size
    return chosen


@dataclass(slots=True)
class _Arena:
    """Addresses [0, size_bytes), filled from both ends; `held` is sorted and disjoint."""

    size_bytes: int
    held: list[tuple[int, int]] = field(default_factory=list)

    def _stretches(self) -> list[tuple[int, int]]:
        ends = [0, *(stop for _, stop in self.held)]
        starts = [*(start for start, _ in self.held), self.size_bytes]
        return [(a, b) for a, b in zip(ends, starts, strict=True) if a < b]

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest free stretch."""
        return max((b - a for a, b in self._stretches()), default=0)

    def take(self, size_bytes: int, *, from_right: bool) -> int:
        """Returns the address of the stretch nearest to one end that is wide enough, now held; -1 if there is none."""
        wide = [(a, b) for a, b in self._stretches() if b - a >= size_bytes]
        if not wide:
            return -1
        address = wide[-1][1] - size_bytes if from_right else wide[0][0]
        insort(self.held, (address, address + size_bytes))
        return address

    def take_beyond(self, size_bytes: int) -> int:
        """Returns an address above everything held, wherever the arena ends."""
        address = max(self.size_bytes, self.held[-1][1] if self.held else 0)
        self.held.append((address, address + size_bytes))
        return address

    def free(self, address: int, size_bytes: int) -> None:
        """Gives a stretch back."""
        self.held.remove((address, address + size_bytes))


class _Run:
    """One step on the nominal clock: when the arena and the two queues of each lower tier let things happen."""

    def __init__(self, problem: Problem, slots: dict[int, Slot], tier_of: dict[int, Tier]) -> None:
        self._problem = problem
        self._slots = slots
        self._tier_of = tier_of
        self._now_ns = 0
        self._free_ns: dict[tuple[Tier, bool], int] = {}
        self._writes: list[tuple[int, int]] = []  # end of the copy, tensor
        self._ready_ns: dict[int, int] = {}  # of loads
        self._place: dict[int, int] = {}
        self.release_at: dict[int, int] = {}
        self.load_at: dict[int, int] = {}
        self.addresses: dict[int, list[int]] = {}
        self._largest = max(_footprints(problem)[1])
        transient = max(op.transient_bytes for op in problem.trace.ops)
        self._arena = _Arena(max(problem.device_bytes - transient, 0))
        self._to_fetch = sorted(slots.values(), key=lambda s: (-s.stop, -s.tensor))  # the next one last

    def run(self) -> None:
        """Walks the step; afterwards every tensor has an address per residency, and every slot its ticks."""
        problem = self._problem
        n, turn, lifetimes = problem.op_count, turn_of(problem.trace), problem.trace.lifetimes
        births: list[list[int]] = [[] for _ in range(n + 1)]
        deaths: list[list[int]] = [[] for _ in range(n + 1)]
        for tensor, life in enumerate(lifetimes):
            births[life.birth].append(tensor)
            deaths[life.death].append(tensor)
        reserved = self._reserve()
        leaving: list[list[int]] = [[] for _ in range(n + 1)]
        for tensor, slot in self._slots.items():
            leaving[slot.start].append(tensor)
        for tick in range(n):
            for tensor in deaths[tick]:
                if tensor not in reserved:
                    self._free(tensor)
            self._end_writes(tick, self._now_ns)
            for tensor in leaving[tick]:
                heapq.heappush(self._writes, (self._serve(tensor, leaves=True), tensor))
            if tick >= turn - 1:
                while self._writes:
                    self._await_write(tick)
            if tick >= turn:
                self._fetch_ahead(tick)
            while self._to_fetch and self._to_fetch[-1].stop == tick:
                slot = self._to_fetch.pop()
                self._fetch(slot, tick, self._take(problem.size_bytes(slot.tensor), tick, from_right=True))
            for tensor in births[tick]:
                if tensor in reserved:
                    continue
                address = self._take(problem.size_bytes(tensor), tick, from_right=tensor in self._slots)
                self._hold(tensor, address)
            used = [self._ready_ns.get(t, 0) for t in {*problem.trace.ops[tick].reads, *problem.trace.ops[tick].writes}]
            self._now_ns = max([self._now_ns, *used]) + problem.trace.ops[tick].duration_ns

    def _reserve(self) -> set[int]:
        """Places what persists at the left, and beside it the scratch of single ops; returns those tensors."""
        tensors, lifetimes = self._problem.trace.tensors, self._problem.trace.lifetimes
        for tensor, t in enumerate(tensors):
            if t.is_persistent:
                self._hold(tensor, self._take(t.size_bytes, 0, from_right=False))
        scratch: dict[int, list[int]] = {}
        for tensor, t in enumerate(tensors):
            if not (t.is_persistent or t.is_movable) and lifetimes[tensor].death - lifetimes[tensor].birth == 1:
                scratch.setdefault(lifetimes[tensor].birth, []).append(tensor)
        most = max((sum(tensors[t].size_bytes for t in own) for own in scratch.values()), default=0)
        base = self._take(most, 0, from_right=False) if most else 0
        for own in scratch.values():
            address = base
            for tensor in own:
                self.addresses[tensor] = [address]
                address += tensors[tensor].size_bytes
        return {t for own in scratch.values() for t in own} | {i for i, t in enumerate(tensors) if t.is_persistent}

    def _serve(self, tensor: int, *, leaves: bool) -> int:
        """Returns when a copy ends that is queued now."""
        tier = self._tier_of[tensor]
        link = self._problem.links(tier)[0 if leaves else 1]
        done = max(self._now_ns, self._free_ns.get((tier, leaves), 0)) + link.transfer_ns(self._problem.size_bytes(tensor))
        self._free_ns[tier, leaves] = done
        return done

    def _hold(self, tensor: int, address: int) -> None:
        self._place[tensor] = address
        self.addresses.setdefault(tensor, []).append(address)

    def _free(self, tensor: int) -> None:
        self._arena.free(self._place.pop(tensor), self._problem.size_bytes(tensor))

    def _end_writes(self, tick: int, until_ns: int) -> None:
        while self._writes and self._writes[0][0] <= until_ns:
            _, tensor = heapq.heappop(self._writes)
            self.release_at[tensor] = tick
            self._free(tensor)

    def _await_write(self, tick: int) -> None:
        self._now_ns = max(self._now_ns, self._writes[0][0])
        self._end_writes(tick, self._now_ns)

    def _take(self, size_bytes: int, tick: int, *, from_right: bool) -> int:
        """Returns an address, after waiting for writes if there is no room, or one beyond the arena."""
        address = self._arena.take(size_bytes, from_right=from_right)
        while address < 0 and self._writes:
            self._await_write(tick)
            address = self._arena.take(size_bytes, from_right=from_right)
        return address if address >= 0 else self._arena.take_beyond(size_bytes)

    def _fetch_ahead(self, tick: int) -> None:
        rest = self._arena.largest_bytes - self._largest
        while self._to_fetch and self._problem.size_bytes(self._to_fetch[-1].tensor) < rest:
            size = self._problem.size_bytes(self._to_fetch[-1].tensor)
            self._fetch(self._to_fetch.pop(), tick, self._arena.take(size, from_right=True))
            rest -= size

    def _fetch(self, slot: Slot, tick: int, address: int) -> None:
        self.load_at[slot.tensor] = tick
        self._hold(slot.tensor, address)
        self._ready_ns[slot.tensor] = self._serve(slot.tensor, leaves=False)


def _with_addresses(problem: Problem, plan: Plan, addresses: dict[int, list[int]]) -> Plan:
    """Returns the plan with each residency on the device at its address; those of a tensor are in order of time."""
    rest = {tensor: iter(own) for tensor, own in addresses.items()}
    line = [next(rest[r.tensor]) if r.tier is Tier.DEVICE else -1 for r in plan.residencies]
    highest = np.array([op.transient_bytes for op in problem.trace.ops], np.int64)
    ends = np.zeros(problem.op_count, np.int64)
    for r, address in zip(plan.residencies, line, strict=True):
        if address >= 0:
            ends[r.start : r.stop] = np.maximum(ends[r.start : r.stop], address + problem.size_bytes(r.tensor))
    peaks = {**plan.peak_bytes, Tier.DEVICE: int((highest + ends).max(initial=0))}
    return replace(plan, allocation=Allocation(AllocationKind.ADDRESSES, addresses=tuple(line)), peak_bytes=peaks)
