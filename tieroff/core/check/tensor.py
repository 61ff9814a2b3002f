"""The checker's rules on one tensor: each part of it, cut where any item's range begins or ends, on its own."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from operator import itemgetter

from tieroff.core.check.data import Event, Job, Kind, Use, Versions
from tieroff.core.check.rules import Rule, refuse
from tieroff.core.plan import Capabilities, Plan, Residency, Transfer
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Queue, Trace

Interval = tuple[int, int]

_TIERS = tuple(Tier)


@dataclass(slots=True)
class Uses:
    """What happens to one tensor in the ring, whatever the plan holds of it.

    Attributes:
        tensor, name: of the trace, and for messages.
        runs: ops that touch it on the device, in order.
        updates: ops that touch it and that the host runs, in the plan's order.
        spans: half-open op intervals in which communication touches it on the device.
        repeats: per repeat of an op that touches it its tick and the op, in order.
        required: half-open op intervals in which ops or holds require it on the device: sorted, disjoint.
        needed_until: last tick at which an op, a hold or the program needs its data.
    """

    tensor: Tensor
    name: str
    runs: list[Use] = field(default_factory=list)
    updates: list[Use] = field(default_factory=list)
    spans: list[Interval] = field(default_factory=list)
    repeats: list[tuple[int, Use]] = field(default_factory=list)
    required: list[Interval] = field(default_factory=list)
    needed_until: int = 0


def derive_uses(plan: Plan, ring: Trace, capabilities: Capabilities) -> list[Uses]:
    """Returns the uses of every tensor of the ring. A tensor that cannot move is required for all of its life.

    Communication uses a tensor twice, at its own op and at the last one before it is awaited: what it writes has one version
    while it is under way and another from then on, so that no copy of the first is of use.
    """
    uses = [Uses(tensor, f"tensor {index} ({tensor.name})") for index, tensor in enumerate(ring.tensors)]
    update_of = {update.op: update for update in plan.host_updates}
    for index, op in enumerate(ring.ops):
        update = update_of.get(index)
        written = set(op.writes)
        stop = _awaited_at(ring, index) if op.queue is Queue.COMMUNICATION else index + 1
        for tensor in written.union(op.reads):
            if update is None:
                uses[tensor].runs.append(Use(index, tensor in written))
                if stop > index + 1:
                    uses[tensor].spans.append((index, stop))
                    uses[tensor].runs.append(Use(stop - 1, tensor in written))
            else:
                uses[tensor].updates.append(Use(index, tensor in written, update=update))
    for repeat in sorted(plan.repeats, key=lambda r: (r.at, r.op)):
        op = ring.ops[repeat.op]
        for tensor in {*op.reads, *op.writes}:
            uses[tensor].repeats.append((repeat.at, Use(repeat.op, tensor in op.writes)))
    for own in uses:
        _derive_required(own, len(ring.ops), capabilities.min_bytes)
    return uses


def _awaited_at(ring: Trace, op: int) -> int:
    """Returns the first op that waits for communication, itself or later of its queue, or the end of the ring."""
    return next((index for index in range(op + 1, len(ring.ops)) if ring.ops[index].awaits >= op), len(ring.ops))


def _derive_required(uses: Uses, op_count: int, min_bytes: int) -> None:
    tensor = uses.tensor
    # A hold of the op that the host runs only means that the op uses the tensor.
    away = {(use.op, use.op + 1) for use in uses.updates}
    merged: list[Interval] = []
    used = [(use.op, use.op + 1) for use in uses.runs] + uses.spans
    for start, stop in sorted(used + [h for h in tensor.holds if h not in away]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    end = max([tensor.lives_until, *(stop for _, stop in merged[-1:]), *(use.op + 1 for use in uses.updates)])
    uses.needed_until = max(end - 1, 0)
    if not can_move(tensor, min_bytes) and merged:
        merged = [(0, op_count)] if tensor.is_persistent else [(merged[0][0], end)]
    uses.required = merged


def can_move(tensor: Tensor, min_bytes: int) -> bool:
    """True when a tensor may be away from the device while it lives."""
    return tensor.is_movable and tensor.kind is not TensorClass.INPUT and tensor.size_bytes >= min_bytes


class TensorCheck:
    """Checks all parts of one tensor."""

    def __init__(self, op_count: int, uses: Uses, *, can_wrap: bool) -> None:
        self._n = op_count
        self._uses = uses
        self._can_wrap = can_wrap

    def run(self, residencies: list[Residency], transfers: list[Transfer]) -> None:
        """Cuts the tensor where any of its items' ranges begins or ends, and checks each part."""
        size = self._uses.tensor.size_bytes
        events = _use_events(self._uses, self._n)
        items: list[Residency | Transfer] = [*residencies, *transfers]
        if not any(item.first_byte or item.stop_byte not in (0, size) for item in items):
            part = _PartCheck(self._n, self._uses, events, self._uses.name, residencies, transfers)
            part.run(self._can_wrap)
            return
        cuts = sorted({0, size, *(i.first_byte for i in items), *(i.stop_byte or size for i in items)})
        position = {byte: index for index, byte in enumerate(cuts)}
        held: list[list[Residency]] = [[] for _ in cuts[1:]]
        moved: list[list[Transfer]] = [[] for _ in cuts[1:]]
        for r in residencies:
            for own in held[position[r.first_byte] : position[r.stop_byte or size]]:
                own.append(r)
        for t in transfers:
            for jobs in moved[position[t.first_byte] : position[t.stop_byte or size]]:
                jobs.append(t)
        for index, (start, stop) in enumerate(itertools.pairwise(cuts)):
            name = f"{self._uses.name}, bytes {start} to {stop},"
            part = _PartCheck(self._n, self._uses, events, name, held[index], moved[index])
            part.run(self._can_wrap)


class _PartCheck:
    """Checks bytes of a tensor that all items treat alike."""

    def __init__(
        self,
        op_count: int,
        uses: Uses,
        use_events: list[Event],
        name: str,
        residencies: list[Residency],
        transfers: list[Transfer],
    ) -> None:
        self._n = op_count
        self._use_events = use_events
        self._uses = uses
        self._name = name
        self._is_persistent = uses.tensor.is_persistent
        self._residencies = residencies
        self._transfers = transfers
        self._held: dict[Tier, list[Interval]] = {tier: [] for tier in _TIERS}
        for r in residencies:
            self._held[r.tier].append((r.start, r.stop))
        for intervals in self._held.values():
            intervals.sort()

    def run(self, can_wrap: bool) -> None:
        """Applies all rules on these bytes; those that later ones rely on come first."""
        is_moved = bool(self._transfers or self._held[Tier.HOST] or self._held[Tier.NVME])
        if is_moved and self._is_persistent and not can_wrap:
            for start, stop in self._held[Tier.DEVICE]:
                if stop > self._n or stop - start == self._n:
                    message = f"{self._name} is moved and on the device across the step's end: ops {start} to {stop}"
                    refuse(Rule.CAPABILITY, message)
        self._check_cover()
        self._check_transfers()
        self._check_begins()
        self._check_data()

    def _is_whole(self, interval: Interval) -> bool:
        """True for an interval that neither begins nor ends."""
        return self._is_persistent and interval[1] - interval[0] == self._n

    def _check_cover(self) -> None:
        if not self._residencies:
            refuse(Rule.REQUIRED, f"{self._name} has no residency at all")
        for tier, held in self._held.items():
            if len(held) < 2:
                continue
            for before, after in itertools.pairwise([*held, (held[0][0] + self._n, 0)]):
                if before[1] > after[0]:
                    refuse(Rule.OVERLAP, f"{self._name} has two residencies in {tier.value} at op {after[0] % self._n}")
        line: list[Interval] = []
        wrapped = [(0, stop - self._n) for _, stop in self._held[Tier.DEVICE] if stop > self._n]
        for start, stop in wrapped + self._held[Tier.DEVICE]:
            if line and start == line[-1][1]:
                line[-1] = (line[-1][0], stop)
            else:
                line.append((start, stop))
        position = 0
        for start, stop in self._uses.required:
            while position < len(line) and line[position][1] <= start:
                position += 1
            if position == len(line) or line[position][0] > start:
                refuse(Rule.REQUIRED, f"{self._name} is required at op {start} and is not on the device")
            if line[position][1] < stop:
                refuse(Rule.REQUIRED, f"{self._name} is required at op {line[position][1]} and is not on the device")

    def _covers(self, tier: Tier, start: int, stop: int) -> bool:
        """True when a residency covers the ring from tick `start` to tick `stop`."""
        n = self._n
        for s, e in self._held[tier]:
            if (s <= start and stop <= e) or (s <= start + n and stop + n <= e) or self._is_whole((s, e)):
                return True
        return False

    def _check_transfers(self) -> None:
        n = self._n
        for t in self._transfers:
            # What leads to the device is awaited after the residencies of the same tick have ended.
            late = t.target is Tier.DEVICE
            if not self._covers(t.source, t.issue_at, t.ready_by + late):
                refuse(Rule.SOURCE, f"{self._name} is not in {t.source.value} from issue until it is awaited: {t}")
            if not self._holds_target(t.target, t.issue_at, t.ready_by + late) and not (
                # Copied at the very end of the ring into a residency that begins with the next round.
                t.issue_at == n and self._holds_target(t.target, 0, 0)
            ):
                refuse(Rule.TARGET, f"{self._name} is not in {t.target.value} from the issue on: {t}")
        for use in self._uses.updates:
            update = use.update
            if update is not None and not self._covers(Tier.HOST, update.issue_at, update.ready_by):
                refuse(Rule.HOST_UPDATE, f"{self._name} is not in host from issue to ready: {update}")

    def _holds_target(self, tier: Tier, start: int, stop: int) -> bool:
        n = self._n
        for s, e in self._held[tier]:
            if (s <= start < e and stop <= e) or (s <= start + n < e and stop + n <= e) or self._is_whole((s, e)):
                return True
        return False

    def _check_begins(self) -> None:
        n = self._n
        for r in self._residencies:
            if self._is_persistent and r.stop - r.start == n:
                continue
            if r.tier is Tier.DEVICE:
                if not self._is_persistent and r.start == self._held[Tier.DEVICE][0][0]:
                    continue
                if any(use.writes and r.start <= at < r.stop for at, use in self._uses.repeats):
                    continue
            if not any(
                t.target is r.tier
                and (r.start <= t.issue_at < r.stop or r.start <= t.issue_at + n < r.stop or t.issue_at - n == r.start)
                for t in self._transfers
            ):
                refuse(Rule.FROM_NOWHERE, f"{self._name} has neither birth nor transfer nor repeat to fill {r}")

    def _check_data(self) -> None:
        n = self._n
        first = [event for event in self._use_events if event[0] < n + 1 << 4]
        state = self._follow(first, (0,))
        crosses = (
            any(r.stop > n and r.stop - r.start < n for r in self._residencies)
            or any(t.ready_by > n for t in self._transfers)
            or any(use.update is not None and use.update.ready_by > n for use in self._uses.updates)
        )
        if self._is_persistent and (crosses or not state.is_as_at_first):
            self._follow(self._use_events, (0, n + 1))

    def _follow(self, use_events: list[Event], bases: tuple[int, ...]) -> Versions:
        """Returns the state after one round of the ring per base, each of ticks 0 to n; see [Note: versions]."""
        uses, n = self._uses, self._n
        births = self._held[Tier.DEVICE][:1]
        resident = {r.tier for r in self._residencies if r.stop > n or r.stop - r.start == n}
        state = Versions(
            self._name,
            resident=resident if self._is_persistent else set(),
            is_persistent=self._is_persistent,
            needed_until=uses.needed_until,
            birth=births[0][0] if births else -1,
            has_repeats=any(use.writes for _, use in uses.repeats),
        )
        events = use_events.copy()
        for base in bases:
            self._add_moves(events, base)
        state.follow(events, until=bases[-1] + n)
        return state

    def _add_moves(self, events: list[Event], base: int) -> None:
        n = self._n
        for r in self._residencies:
            if self._is_persistent and r.stop - r.start == n:
                continue
            events.append((base + r.start << 4 | Kind.BEGIN, r))
            events.append((base + r.stop + (r.stop > n) << 4 | Kind.END, r))
            if r.stop > n and not base:
                events.append((r.stop - n << 4 | Kind.END, r))
        for t in self._transfers:
            issue, ready = Kind.ISSUE, Kind.READY_IN
            if t.target is not Tier.DEVICE:
                issue, ready = Kind.ISSUE_FIRST if t.issue_at == t.ready_by else Kind.ISSUE, Kind.READY_OUT
            job = Job(t)
            events.append((base + t.issue_at << 4 | issue, job))
            events.append((base + t.ready_by + (t.ready_by > n) << 4 | ready, job))
            if t.ready_by > n and not base:
                events.append((t.ready_by - n << 4 | ready, Job(t)))


def _use_events(uses: Uses, op_count: int) -> list[Event]:
    """Returns the events that all parts of a tensor go through, in the order of their keys; a round has n + 1 ticks."""
    events: list[Event] = []
    for base in (0, op_count + 1) if uses.tensor.is_persistent else (0,):
        for use in uses.runs:
            events.append((base + use.op << 4 | Kind.OP, Use(use.op, use.writes, base) if base else use))
        for at, use in uses.repeats:
            events.append((base + at << 4 | Kind.REPEAT, Use(use.op, use.writes, base)))
        for use in uses.updates:
            events += _update_events(use, base, op_count)
    events.sort(key=itemgetter(0))
    return events


def _update_events(use: Use, base: int, op_count: int) -> list[Event]:
    update = use.update
    if update is None:
        return []
    own = Use(use.op, use.writes, base, update)
    issue = Kind.UPDATE_FIRST if update.issue_at == update.ready_by else Kind.UPDATE
    wraps = update.ready_by > op_count
    events: list[Event] = [
        (base + use.op << 4 | Kind.DUE, own),
        (base + update.issue_at << 4 | issue, own),
        (base + update.ready_by + wraps << 4 | Kind.UPDATED, own),
    ]
    if wraps and not base:
        events.append((update.ready_by - op_count << 4 | Kind.UPDATED, Use(use.op, use.writes, -op_count - 1, update)))
    return events
