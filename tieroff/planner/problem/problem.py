"""What a policy works on: the movable gaps of a trace, the bytes at each op and the room in each tier.

[Note: slots]
A Slot is a gap as the executor can use it. Where nothing may cross the end of the step, a persistent tensor that is
moved at all is away when the step ends and comes back in the next one: its wrapping gap becomes the boundary slot,
whose release lies at or before tick n and whose load lies at or after tick n (that is, tick 0 of the next step). It
exists even with no idle op in it, for a tensor that is required by the last op and by the first. Where evictions may be
late, optimizer state is released in the next step if it is still being copied out when this one ends: its release then
lies after tick n, before its load.

[Note: units]
A Unit is what can be decided on its own: one gap of an activation; all the gaps of a persistent tensor where nothing
may cross the step's end; a parameter with the gradients that follow it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tieroff.core.lifetime import Lifetime
from tieroff.core.machine import Link, Machine
from tieroff.core.plan import Capabilities
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Trace
from tieroff.planner.native import _native

Bytes = npt.NDArray[np.int64]

Span = tuple[int, int, int]
"""Ops [start, stop) on the line [0, 2 n] that goes round the ring, and the bytes that are held there."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Idle ops [start, stop) of a tensor; see [Note: slots]. `start <= n`, `stop <= 2 n`.

    With `is_last` the tensor's life ends at `stop`, and nothing comes back.
    """

    tensor: int
    start: int
    stop: int
    is_boundary: bool
    is_last: bool = False

    def pieces(self, op_count: int) -> tuple[tuple[int, int], ...]:
        """Returns the idle ops as intervals on the line [0, n); none is empty."""
        if not self.is_boundary:
            return ((self.start, self.stop),)
        head, tail = (0, self.stop - op_count), (self.start, op_count)
        if head[1] > 0:
            return (head, tail) if self.start < op_count else (head,)
        return (tail,) if self.start < op_count else ()


@dataclass(frozen=True, slots=True)
class Unit:
    """Slots that move together; see [Note: units]. `is_split` says that inner gaps may still be kept one by one."""

    slots: tuple[Slot, ...]
    is_split: bool = False

    @property
    def tensors(self) -> tuple[int, ...]:
        """The tensors of its slots, each once, in order."""
        if len(self.slots) == 1:
            return (self.slots[0].tensor,)
        return tuple(dict.fromkeys(slot.tensor for slot in self.slots))


@dataclass(frozen=True)
class Problem:
    """One planning problem, derived once and shared by all policies.

    Attributes:
        budget: bytes per tier; a tier that cannot be used has 0.
        tiers: lower tiers that can be used, fastest first.
        starts_ns: start of each op with nothing moved, and the end of the step: n + 1 values.
        live: bytes on the device at each op with nothing moved.
        base: bytes on the device at each op with everything moved that can be.
        units: in order of their first slot.
        skipped: rule -> number of tensors that it keeps on the device.
        effort: "fast" (seconds) or "high" (minutes): how long a policy may search.
    """

    trace: Trace
    machine: Machine
    capabilities: Capabilities
    budget: dict[Tier, int]
    tiers: tuple[Tier, ...]
    starts_ns: Bytes
    live: Bytes
    base: Bytes
    units: tuple[Unit, ...]
    skipped: dict[str, int]
    effort: str = "fast"

    @cached_property
    def op_count(self) -> int:
        """Number of ops."""
        return len(self.trace.ops)

    @property
    def fits(self) -> bool:
        """True when nothing has to move."""
        return int(self.live.max(initial=0)) <= self.device_bytes

    @cached_property
    def tied(self) -> frozenset[int]:
        """Tensors that move together with another one: parameters and the gradients that follow them."""
        return frozenset(t for unit in self.units if len(unit.tensors) > 1 for t in unit.tensors)

    @property
    def device_bytes(self) -> int:
        """The device's budget."""
        return self.budget[Tier.DEVICE]

    def size_bytes(self, tensor: int) -> int:
        """Returns the bytes of a tensor."""
        return self.trace.tensors[tensor].size_bytes

    @cached_property
    def sizes(self) -> Bytes:
        """Bytes of each tensor."""
        return np.array([tensor.size_bytes for tensor in self.trace.tensors], np.int64)

    @cached_property
    def is_persistent(self) -> npt.NDArray[np.bool_]:
        """Of each tensor, whether it outlives the step."""
        return np.array([tensor.is_persistent for tensor in self.trace.tensors], np.bool_)

    @cached_property
    def may_leave_late(self) -> npt.NDArray[np.bool_]:
        """Of each tensor, whether it may stay on the device into the next step while it is copied out; see [Note: slots]."""
        can = self.capabilities.late_evictions and not self.capabilities.wraps
        kinds = (tensor.kind is TensorClass.OPTIMIZER and tensor.is_persistent for tensor in self.trace.tensors)
        return np.array([can and is_state for is_state in kinds], np.bool_)

    @cached_property
    def _writes(self) -> Bytes:
        """Every write as tensor * 3 n + op + n, sorted; those of persistent tensors also one step earlier."""
        n = self.op_count
        keys = [life.tensor * 3 * n + op + n for life in self.trace.lifetimes for op in life.writes]
        written = np.array(keys, np.int64)
        return np.sort(np.append(written, written[self.is_persistent[written // (3 * n)]] - n))

    def writes_before(self, tensor: Bytes, tick: Bytes) -> Bytes:
        """Returns of each tensor its last write before a tick, of the step before as negative; far below 0 if there is none."""
        n = self.op_count
        writes = np.append(-1, self._writes)
        found = writes[np.searchsorted(writes, tensor * 3 * n + tick + n) - 1]
        return np.where(found // (3 * n) == tensor, found % (3 * n) - n, np.iinfo(np.int64).min)

    def room_bytes(self, tensor: int) -> int:
        """Returns the bytes that a tensor takes in a lower tier."""
        granule = self.capabilities.granule_bytes
        return -(-self.trace.tensors[tensor].size_bytes // granule) * granule

    def links(self, tier: Tier) -> tuple[Link, Link]:
        """Returns the links from the device to a lower tier and back."""
        if tier not in self._links:
            self._links[tier] = self.machine.link(Tier.DEVICE, tier), self.machine.link(tier, Tier.DEVICE)
        return self._links[tier]

    def move_ns(self, tier: Tier, size_bytes: int) -> tuple[int, int]:
        """Returns the times that bytes take to a lower tier and back, each with the link to itself."""
        key = tier, size_bytes
        if key not in self._move_ns:
            out, back = self.links(tier)
            self._move_ns[key] = out.transfer_ns(size_bytes), back.transfer_ns(size_bytes)
        return self._move_ns[key]

    @cached_property
    def _move_ns(self) -> dict[tuple[Tier, int], tuple[int, int]]:
        return {}  # most tensors share their sizes with others

    @cached_property
    def _links(self) -> dict[Tier, tuple[Link, Link]]:
        return {}

    def lower_interval(self, tensor: int) -> tuple[int, int]:
        """Returns the longest op interval for which a moved tensor can take room in its lower tier."""
        life = self.trace.lifetimes[tensor]
        if self.trace.tensors[tensor].is_persistent:
            return 0, self.op_count
        gap = life.gaps[0]
        return max(gap.last_write + 1, 0), life.death

    @cached_property
    def lower_spans(self) -> list[Span]:
        """Per tensor `lower_interval` and the bytes that it takes there; empty for one that is never idle."""
        pairs = zip(self.trace.lifetimes, self.trace.tensors, strict=True)
        return [
            (*self.lower_interval(life.tensor), self.room_bytes(life.tensor)) if life.gaps or t.is_persistent else (0, 0, 0)
            for life, t in pairs
        ]

    @cached_property
    def idle_spans(self) -> list[list[Span]]:
        """Per unit its idle ops, as `Slot.pieces` of all its slots, and the bytes that are away over them."""
        op_count, tensors = self.op_count, self.trace.tensors
        return [
            [(*piece, tensors[slot.tensor].size_bytes) for slot in unit.slots for piece in slot.pieces(op_count)]
            for unit in self.units
        ]


def holds_within(usage: Bytes, spans: list[Span], limit_bytes: int) -> bool:
    """Returns whether bytes can be held in addition with no op over a limit; if so, adds them to the usage."""
    if _native.hold_bytes(usage, spans) <= limit_bytes:
        return True
    _native.drop_bytes(usage, spans)
    return False


def live_bytes(trace: Trace) -> Bytes:
    """Returns the bytes on the device at each op with nothing moved."""
    spans = [(life.birth, life.death, t.size_bytes) for t, life in zip(trace.tensors, trace.lifetimes, strict=True)]
    transient = np.array([op.transient_bytes for op in trace.ops], np.int64)
    return held_bytes(spans, len(trace.ops)) + transient


def held_bytes(spans: Iterable[Span], op_count: int) -> Bytes:
    """Returns the sum per op of the bytes of spans, in time linear in their number and that of the ops."""
    return ring_sum(op_count, *np.array(list(spans), np.int64).reshape(-1, 3).T)


def ring_sum(op_count: int, start: Bytes, stop: Bytes, size_bytes: Bytes) -> Bytes:
    """Returns the sum per op of sizes that are held over [start, stop) on the line [0, 2 n], which goes round the ring."""
    change = np.zeros(2 * op_count + 1, np.int64)
    np.add.at(change, start, size_bytes)
    np.subtract.at(change, stop, size_bytes)
    line = np.cumsum(change)
    return line[:op_count] + line[op_count : 2 * op_count]


def _slots(life: Lifetime, is_persistent: bool, op_count: int, wraps: bool) -> tuple[Slot, ...]:
    slots = [Slot(g.tensor, g.start, g.stop, g.wraps, g.is_last) for g in life.gaps]
    if is_persistent and not wraps and slots and not slots[-1].is_boundary:
        slots.append(Slot(life.tensor, op_count, op_count, True))
    return tuple(slots)


def _kept_by(tensor: Tensor, slots: tuple[Slot, ...], min_bytes: int) -> str:
    """Returns the rule that keeps a tensor on the device, or "" for none."""
    if tensor.kind is TensorClass.INPUT:
        return "input"
    if not tensor.is_movable:
        return "not movable"
    if tensor.size_bytes < min_bytes:
        return "small"
    return "" if slots else "never idle"


def _units(trace: Trace, capabilities: Capabilities) -> tuple[tuple[Unit, ...], dict[str, int]]:
    op_count = len(trace.ops)
    skipped: Counter[str] = Counter()
    slots_of: dict[int, tuple[Slot, ...]] = {}
    for index, (tensor, life) in enumerate(zip(trace.tensors, trace.lifetimes, strict=True)):
        slots = _slots(life, tensor.is_persistent, op_count, capabilities.wraps)
        rule = _kept_by(tensor, slots, capabilities.min_bytes)
        if rule:
            skipped[rule] += 1
        else:
            slots_of[index] = slots
    followers: dict[int, list[int]] = {}
    if capabilities.gradient_follows_parameter:
        for index, tensor in enumerate(trace.tensors):
            if tensor.kind is TensorClass.GRADIENT and tensor.owner >= 0 and index in slots_of:
                if tensor.owner in slots_of:
                    followers.setdefault(tensor.owner, []).append(index)
                else:
                    skipped["follows its parameter"] += 1
                    del slots_of[index]
    led = {index for indices in followers.values() for index in indices}
    units: list[Unit] = []
    for index, slots in slots_of.items():
        if index in led:
            continue
        if index in followers:
            more = tuple(slot for follower in followers[index] for slot in slots_of[follower])
            units.append(Unit(slots + more, is_split=True))
        elif trace.tensors[index].is_persistent and not capabilities.wraps:
            units.append(Unit(slots, is_split=True))
        else:
            units += [Unit((slot,)) for slot in slots]
    return tuple(units), dict(skipped)


def make_problem(
    trace: Trace, machine: Machine, budget: dict[Tier, int], capabilities: Capabilities, effort: str = "fast"
) -> Problem:
    """Returns the planning problem; a tier that `budget` does not name has what the machine has.

    A lower tier that the executor does not have, or that the machine has no links to, gets a budget of 0.
    """
    full = {tier: budget.get(tier, machine.capacity_bytes(tier)) for tier in Tier}
    for tier in (Tier.HOST, Tier.NVME):
        if tier not in capabilities.tiers or (tier not in budget and not machine.has_tier(tier)):
            full[tier] = 0
    tiers = tuple(tier for tier in (Tier.HOST, Tier.NVME) if full[tier] > 0)
    units, skipped = _units(trace, capabilities) if tiers else ((), {"no lower tier": len(trace.tensors)})
    for tier in tiers if units else ():
        machine.link(Tier.DEVICE, tier), machine.link(tier, Tier.DEVICE)
    live = live_bytes(trace)
    op_count = len(trace.ops)
    slots = (slot for unit in units for slot in unit.slots)
    base = live - held_bytes([(slot.start, slot.stop, trace.tensors[slot.tensor].size_bytes) for slot in slots], op_count)
    starts = np.array(trace.starts_ns, np.int64)
    return Problem(trace, machine, capabilities, full, tiers, starts, live, base, units, skipped, effort)


class LowerRoom:
    """Room taken in the lower tiers at each op, while a policy decides who goes where.

    Bytes that take room at every op are kept as one number, and so is the peak of the others: most of what a training step
    moves is persistent, and visiting all ops for each tensor would take time proportional to their product.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._taken = {tier: np.zeros(problem.op_count, np.int64) for tier in problem.tiers}
        self._most = dict.fromkeys(problem.tiers, 0)  # of `_taken`
        self._always = dict.fromkeys(problem.tiers, 0)  # bytes taken at every op, in addition to `_taken`
        self.tier_of: dict[int, Tier] = {}

    def place(self, tensors: tuple[int, ...], order: tuple[Tier, ...]) -> bool:
        """Gives all the tensors one place in the first tier of `order` with room for them together.

        Tensors that have a place keep it. Returns False, with nothing changed, when no tier has room.
        """
        op_count, lower_spans = self._problem.op_count, self._problem.lower_spans
        tensors = tuple([tensor for tensor in tensors if tensor not in self.tier_of])
        parts: list[Span] = []
        whole_bytes = 0
        for tensor in tensors:
            start, stop, size = lower_spans[tensor]
            if stop - start < op_count:
                parts.append((start, stop, size))
            else:
                whole_bytes += size
        for tier in order if tensors else ():
            taken, always = self._taken[tier], self._always[tier] + whole_bytes
            most = max(self._most[tier], _native.hold_bytes(taken, parts))
            if most + always <= self._problem.budget[tier]:
                self._most[tier], self._always[tier] = most, always
                self.tier_of.update(dict.fromkeys(tensors, tier))
                return True
            _native.drop_bytes(taken, parts)
        return not tensors
