"""Paging of whole tensors: a walk over the step with the device's bytes counted, that records who left and came back.

The policies of published systems that decide while the step runs are subclasses: each says who is evicted
(`Paging.victims`), what is fetched ahead (`Paging.fetch_ahead`) and where evicted tensors go (`Paging.tier_order`).

[Note: walk]
At each tick what op i requires is made resident: outputs are born, what is away is fetched and awaited. Where room is
missing, idle tensors are evicted at that tick, and the op waits for their copies. Then the rule may fetch ahead. A
tensor that came ahead of its use and has to go again before it was never there: its fetch is cancelled.

[Note: steady state]
Where transfers may cross the end of the step, rounds are walked until what is away at the end is what was away at the
start. If that takes too long, the last round is closed: what it began with is restored at its end.
Where nothing crosses, a persistent tensor is either never moved or away at the step's end. All are kept at first; those
that a round evicts start away in the next one, until a round evicts no other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from tieroff.core.plan import Plan
from tieroff.core.tensor import Tier
from tieroff.planner.problem.assemble import Move, build_plan
from tieroff.planner.problem.problem import Bytes, LowerRoom, Problem, Slot
from tieroff.planner.simulate.options import rerank

ROUNDS_MAX = 12
_NEVER = -1
FROM_IDLE = 2**40
"""Lead of copies out that begin as soon as their tensor is idle."""

Span = tuple[int, int]


@dataclass(slots=True)
class _Record:
    """What happened to a slot in the round: ticks of release and load. The part of a boundary slot before its end, at
    the start of the step, is its head and has its own ticks."""

    slot: Slot
    release: int = _NEVER
    load: int = _NEVER
    head_release: int = _NEVER
    head_load: int = _NEVER


class Paging:
    """Demand paging with eviction of the least recently used; see [Note: walk].

    Attributes:
        problem: what is planned.
        used_bytes: resident bytes at the tick, without what is transient.
        idle: tensors that may be evicted, least recently used first.
        away: tensors that are alive and not resident.
        faulted: tensors fetched on demand at the tick.
    """

    def __init__(
        self,
        problem: Problem,
        slots: Iterable[Slot] | None = None,
        spans: Mapping[int, tuple[Span, ...]] | None = None,
        transient: Bytes | None = None,
    ) -> None:
        """Prepares a walk.

        Args:
            problem: what is planned.
            slots: where tensors may be away; all of the problem's if None.
            spans: ticks [start, stop) in which a tensor exists, where that is not its life.
            transient: transient bytes of each op, where they are not the trace's.
        """
        self.problem = problem
        self._n = problem.op_count
        ops = problem.trace.ops
        self._transient = [op.transient_bytes for op in ops] if transient is None else [int(b) for b in transient]
        chosen = [slot for unit in problem.units for slot in unit.slots] if slots is None else list(slots)
        self._records = [_Record(slot) for slot in sorted(chosen, key=lambda s: (s.start, s.tensor))]
        self._companions: dict[int, tuple[int, ...]] = {}
        for unit in problem.units:
            for tensor in unit.tensors:
                if len(unit.tensors) > 1 or tensor not in self._companions:
                    self._companions[tensor] = unit.tensors
        self._make_events(spans or {})
        self._room = LowerRoom(problem)
        self._away_at_start: set[int] = set()
        self._strays: set[int] = set()  # kept tensors that the round evicted, where nothing crosses the step's end
        self._tick = 0
        self.used_bytes = 0
        self.idle: dict[int, None] = {}
        self.away: set[int] = set()
        self.faulted: list[int] = []
        self._arrived: dict[int, None] = {}
        self._open: dict[int, _Record] = {}

    def _make_events(self, spans: Mapping[int, tuple[Span, ...]]) -> None:
        n, trace = self._n, self.problem.trace
        self._opens: list[list[_Record]] = [[] for _ in range(n + 1)]
        self._closes: list[list[int]] = [[] for _ in range(n + 1)]
        self._births: list[list[int]] = [[] for _ in range(n + 1)]
        self._deaths: list[list[int]] = [[] for _ in range(n + 1)]
        for record in self._records:
            slot = record.slot
            self._opens[slot.start].append(record)
            if not slot.is_last:
                self._closes[slot.stop - n if slot.is_boundary else slot.stop].append(slot.tensor)
        self._boundary = [record for record in self._records if record.slot.is_boundary]
        self._permanent_bytes = 0
        for index, (tensor, life) in enumerate(zip(trace.tensors, trace.lifetimes, strict=True)):
            if tensor.is_persistent:
                self._permanent_bytes += tensor.size_bytes
                continue
            for start, stop in spans.get(index, ((life.birth, life.death),)):
                self._births[start].append(index)
                self._deaths[stop].append(index)
        # Reads before writes, each in the order of the op: that is the order of use.
        for tick, op in enumerate(trace.ops):
            place = {tensor: k for k, tensor in reversed(list(enumerate((*op.reads, *op.writes))))}
            last = len(place)
            for tensors in (self._closes[tick], self._births[tick]):
                tensors.sort(key=lambda t: (place.get(t, last), t))
            self._opens[tick + 1].sort(key=lambda r: (place.get(r.slot.tensor, last), r.slot.tensor))

    # What a rule decides.

    def victims(self, shortage_bytes: int, candidates: Iterator[int]) -> list[int]:
        """Returns who is evicted for bytes that are missing, out of idle tensors, least recently used first."""
        chosen: list[int] = []
        for tensor in candidates:
            if shortage_bytes <= 0:
                break
            chosen.append(tensor)
            shortage_bytes -= self.problem.size_bytes(tensor)
        return chosen

    def fetch_ahead(self, tick: int) -> None:
        """Fetches what the rule wants at a tick, beside its op."""

    def tier_order(self, tensor: int) -> tuple[Tier, ...]:
        """Returns the tiers to ask for room for a tensor, in order."""
        return self.problem.tiers

    # What a rule may ask for.

    def needed_at(self, tick: int) -> list[int]:
        """Returns the tensors whose idle time ends with an op; ticks from n on are of the next step."""
        if tick < self._n:
            return [t for t in self._closes[tick] if t in self._open and self._closing_tick(t) == tick]
        if tick >= 2 * self._n or not self.problem.capabilities.wraps:
            return []
        return [t for t in self._closes[tick - self._n] if t in self._open and self._closing_tick(t) == tick]

    def _closing_tick(self, tensor: int) -> int:
        record = self._open[tensor]
        return record.slot.stop - self._n if self._is_head(record) else record.slot.stop

    def prefetch(self, tensor: int, keeps: frozenset[int] | None = None) -> bool:
        """Fetches a tensor that is away beside the tick's op; returns whether there was room.

        Idle tensors that are not in `keeps` are evicted for it; with None it takes room that is free.
        """
        record = self._open.get(tensor)
        if tensor not in self.away or record is None or record.slot.is_last:
            return True
        is_head = self._is_head(record)
        if self._tick == (record.head_release if is_head else record.release):
            return False
        if record.slot.is_boundary and not is_head and not self.problem.capabilities.wraps:
            return True
        size = self.problem.size_bytes(tensor)
        if not (self._shortage(size) <= 0 if keeps is None else self._make_room(size, keeps, cancels=False)):
            return False
        self._fetch(tensor)
        self._arrived[tensor] = None
        return True

    # The walk.

    def run(self) -> tuple[list[Move], dict[int, Tier]]:
        """Returns the moves of a round in the steady state, and the tier of each tensor that moves."""
        walk = self._walk_ring if self.problem.capabilities.wraps else self._walk_line
        walk()
        moves = [move for record in self._records if (move := self._move(record)) is not None]
        left = {move.slot.tensor for move in moves if move.release_at < move.load_at}
        moves = [move for move in moves if move.slot.tensor in left]  # who is never away has not moved
        return moves + self._ties(left), self._room.tier_of

    def _walk_ring(self) -> None:
        self._reset_idle()
        for _ in range(ROUNDS_MAX):
            self._away_at_start = set(self.away)
            self._walk()
            if self.away == self._away_at_start:
                return

    def _walk_line(self) -> None:
        starts_away: set[int] = set()
        for count in itertools.count():
            if count == ROUNDS_MAX:
                # All that have room below: then no kept tensor finds room, and none strays.
                starts_away.update(record.slot.tensor for record in self._boundary)
            self._reset_idle()
            self._arrived.clear()
            self._away_at_start = set(starts_away)
            self._strays.clear()
            self._walk()
            if not self._strays:
                return
            starts_away |= self._strays

    def _reset_idle(self) -> None:
        self.idle = {r.slot.tensor: None for r in self._boundary if r.slot.stop > self._n}

    def _walk(self) -> None:
        """Walks the step once, from what is away at its start; with nothing under way across its end."""
        self.away = set()
        self._open.clear()
        tiers, self._room = self._room.tier_of, LowerRoom(self.problem)
        self.used_bytes = self._permanent_bytes
        for record in self._records:
            record.release = record.load = record.head_release = record.head_load = _NEVER
        for record in self._boundary:
            tensor = record.slot.tensor
            self._open[tensor] = record
            if tensor in self._away_at_start:
                order = (tiers[tensor],) if tensor in tiers else self.tier_order(tensor)
                if not self._room.place(self._companions[tensor], order):
                    self._away_at_start.discard(tensor)  # no room below: it stays
                    continue
                self.away.add(tensor)
                self.idle.pop(tensor, None)
                self.used_bytes -= self.problem.size_bytes(tensor)
        for tick in range(self._n):
            self._step(tick)
        self._end(self._n)

    def _end(self, tick: int) -> None:
        """Frees what dies at a tick, and makes idle what is not required any more."""
        for tensor in self._deaths[tick]:
            if tensor in self.away:
                self.away.discard(tensor)
            else:
                self.used_bytes -= self.problem.size_bytes(tensor)
            self.idle.pop(tensor, None)
            self._open.pop(tensor, None)
        for record in self._opens[tick]:
            self._open[record.slot.tensor] = record
            self.idle[record.slot.tensor] = None

    def _step(self, tick: int) -> None:
        self._tick = tick
        self.faulted = []
        self._end(tick)
        closing = self._closes[tick]
        for tensor in closing:
            self.idle.pop(tensor, None)
            self._arrived.pop(tensor, None)
        self._make_room(0)
        for tensor in closing:
            if tensor in self.away:
                self._make_room(self.problem.size_bytes(tensor))
                self._fetch(tensor)
                self.faulted.append(tensor)
            self._open.pop(tensor, None)
        for tensor in self._births[tick]:
            size = self.problem.size_bytes(tensor)
            self._make_room(size)
            self.used_bytes += size
        self.fetch_ahead(tick)

    def _is_head(self, record: _Record) -> bool:
        return record.slot.is_boundary and self._tick <= record.slot.stop - self._n

    def _shortage(self, size_bytes: int) -> int:
        return self.used_bytes + size_bytes + self._transient[self._tick] - self.problem.device_bytes

    def _make_room(self, size_bytes: int, keeps: frozenset[int] = frozenset(), *, cancels: bool = True) -> bool:
        """Evicts until bytes fit beside the op, and cancels fetches that came ahead if that is not enough."""
        while (shortage := self._shortage(size_bytes)) > 0:
            chosen = self.victims(shortage, (tensor for tensor in self.idle if tensor not in keeps))
            if not chosen:
                break
            for tensor in chosen:
                self._evict(tensor)
        while cancels and self._arrived and self._shortage(size_bytes) > 0:
            self._cancel(next(reversed(self._arrived)))
        return self._shortage(size_bytes) <= 0

    def _evict(self, tensor: int) -> None:
        """Takes an idle tensor off the device, or leaves it there for good if no tier below has room."""
        del self.idle[tensor]
        companions = self._companions[tensor]
        strays: set[int] = set()
        if not self.problem.capabilities.wraps:
            tensors = self.problem.trace.tensors
            strays = {t for t in companions if tensors[t].is_persistent and t not in self._away_at_start}
        if not self._room.place(companions, self.tier_order(tensor)):
            return
        self._strays |= strays
        record = self._open[tensor]
        if self._is_head(record):
            record.head_release = self._tick
        else:
            record.release = self._tick
        self.away.add(tensor)
        self.used_bytes -= self.problem.size_bytes(tensor)

    def _fetch(self, tensor: int) -> None:
        record = self._open[tensor]
        if self._is_head(record):
            record.head_load = self._tick
        else:
            record.load = self._tick
        self.away.discard(tensor)
        self.used_bytes += self.problem.size_bytes(tensor)

    def _cancel(self, tensor: int) -> None:
        record = self._open[tensor]
        del self._arrived[tensor]
        if self._is_head(record) and record.head_load == _NEVER:  # it came at the end of the step before
            record.head_release = self._tick
        elif self._is_head(record):
            record.head_load = _NEVER
        else:
            record.load = _NEVER
        self.away.add(tensor)
        self.used_bytes -= self.problem.size_bytes(tensor)

    # From the records to moves.

    def _move(self, record: _Record) -> Move | None:
        slot = record.slot
        if not slot.is_boundary:
            if record.release == _NEVER:
                return None
            return Move(slot, record.release, slot.stop if record.load == _NEVER else record.load)
        n = self._n
        was_away = slot.tensor in self._away_at_start
        if not self.problem.capabilities.wraps:
            release = n if record.release == _NEVER else record.release
            return Move(slot, release, n + record.head_load) if was_away else None
        if record.release != _NEVER:
            release = record.release
        elif was_away or record.head_release != _NEVER:
            release = n + max(record.head_release, 0)
        else:
            return None
        load = n if record.load == _NEVER else record.load
        if record.head_load != _NEVER:
            load = n + record.head_load
        return Move(slot, release, load) if release < load else None

    def _ties(self, moved: set[int]) -> list[Move]:
        """Returns moves for tensors that must move because their companions do, and that the rule left where they are."""
        added: list[Move] = []
        for unit in self.problem.units:
            if len(unit.tensors) == 1 or moved.isdisjoint(unit.tensors):
                continue
            for tensor in set(unit.tensors) - moved:
                slots = [slot for slot in unit.slots if slot.tensor == tensor]
                is_persistent = self.problem.trace.tensors[tensor].is_persistent
                ends = [slot for slot in slots if slot.is_boundary] if is_persistent else []
                longest = max(slots, key=lambda s: s.stop - s.start)
                added += [Move(slot, slot.start, slot.stop) for slot in dict.fromkeys([*ends, longest])]
        return added


def build_paged(
    problem: Problem, policy: str, moves: list[Move], tier_of: dict[int, Tier], leads: Mapping[Tier, int] | None = None
) -> Plan:
    """Returns the plan of a walk's moves.

    Args:
        problem: what is planned.
        policy: the plan's name.
        moves: at most one per slot.
        tier_of: the tier of each tensor that moves.
        leads: by how many ops a copy out to a tier begins before its release, within the tensor's idle time; 0 where
            none is given: the op that needs the room waits for all of it.
    """
    if not leads:
        return build_plan(problem, policy, moves, tier_of, copies_early=False)
    n = problem.op_count
    plan = build_plan(problem, policy, moves, tier_of)
    move_of = {(move.slot.tensor, move.release_at % n): move for move in moves}
    transfers = []
    for t in plan.transfers:
        if t.source is Tier.DEVICE:
            move = move_of[t.tensor, t.ready_by % n]
            lead = min(leads.get(t.target, 0), move.release_at - move.slot.start)
            issue = max(t.issue_at, t.ready_by - lead)
            shift = n if issue >= n and t.ready_by > n else 0
            t = replace(t, issue_at=issue - shift, ready_by=t.ready_by - shift)
        transfers.append(t)
    return replace(plan, transfers=rerank(transfers))
