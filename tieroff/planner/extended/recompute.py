"""Recompute of single ops: which activations are dropped in a gap and recomputed, and the problem that is left.

[Note: remade problems]
Where a tensor is made again at tick e, what lies before and after it are two tensors that have nothing to do with each
other, and op e takes the repeated ops' time in addition to its own, reads what they read and writes what they write. So the
choice of what to make again turns a problem into another one of the same kind, whose plans are those of the first with
the repeats added: ticks, memory and time are the same. Its tensors that stem from one are put together again in
`Remade.plan`. The inputs of a repeated op are those of its first run: alive and unchanged, or made again at the same tick.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from tieroff.core.lifetime import Gap
from tieroff.core.plan import Plan, Repeat, Residency, Transfer
from tieroff.core.tensor import Tensor, TensorClass
from tieroff.core.trace import Op, Trace
from tieroff.planner.problem.problem import Problem, make_problem

_CHAIN_AT_MOST = 8  # ops that are repeated for one tensor
_DEVICE_SHARE = 0.9  # of the budget, that an op with the repeats before it may need at least
_SHARE_OF_TRANSFER = 0.5  # a repeat that takes more than this share of the time of a copy out and a load is not worth it


@dataclass(frozen=True, slots=True)
class Candidate:
    """A gap whose tensor could be made again at its end, with about the time that it takes."""

    gap: Gap
    size_bytes: int
    duration_ns: int


@dataclass(frozen=True)
class Remade:
    """A problem in which tensors are made again; see [Note: remade problems].

    Attributes:
        original: the problem that it stems from.
        problem: the one to plan.
        origin: per tensor of `problem` that of `original`.
        repeats: of all its plans.
    """

    original: Problem
    problem: Problem
    origin: tuple[int, ...]
    repeats: tuple[Repeat, ...]

    def plan(self, plan: Plan) -> Plan:
        """Returns the plan of the original problem that a plan of this one stands for."""
        origin = self.origin
        return replace(
            plan,
            trace_digest=self.original.trace.digest,
            residencies=tuple(
                r
                if origin[r.tensor] == r.tensor
                else Residency(origin[r.tensor], r.tier, r.start, r.stop, r.first_byte, r.stop_byte)
                for r in plan.residencies
            ),
            transfers=tuple(
                t
                if origin[t.tensor] == t.tensor
                else Transfer(origin[t.tensor], t.source, t.target, t.issue_at, t.ready_by, t.rank, t.first_byte, t.stop_byte)
                for t in plan.transfers
            ),
            repeats=self.repeats,
            skipped=dict(self.original.skipped),
        )


def find_candidates(problem: Problem) -> list[Candidate]:
    """Returns the gaps over the budget whose tensor can be made again and is worth it, the cheapest per byte first."""
    chains = _Chains(problem)
    links = [link for tier in problem.tiers[:1] for link in problem.links(tier)]
    found: list[Candidate] = []
    for life in problem.trace.lifetimes:
        for gap in life.gaps:
            if gap.is_last or not chains.can_repeat(life.tensor, gap.stop):
                continue
            if int(problem.live[gap.start : gap.stop].max(initial=0)) <= problem.device_bytes:
                continue
            chain = chains.find(life.tensor, gap.stop, lambda _: False)
            if chain is None:
                continue
            size = problem.size_bytes(life.tensor)
            duration_ns = sum(problem.trace.ops[op].duration_ns for op in chain.ops)
            if not links or duration_ns <= _SHARE_OF_TRANSFER * sum(link.transfer_ns(size) for link in links):
                found.append(Candidate(gap, size, duration_ns))
    return sorted(found, key=lambda c: (c.duration_ns / c.size_bytes, -c.size_bytes, c.gap.tensor, c.gap.start))


@dataclass(slots=True)
class _Chain:
    """Ops to repeat at one tick, the tensors that they make again, and those that have to be there for them."""

    ops: list[int] = field(default_factory=list)
    made: set[int] = field(default_factory=set)
    needed: set[int] = field(default_factory=set)


class _Chains:
    """Finds what has to be repeated to make a tensor again."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._trace = problem.trace

    def can_repeat(self, tensor: int, tick: int) -> bool:
        """True when one op alone wrote the tensor, before the tick, and may run twice."""
        trace = self._trace
        life, writes = trace.lifetimes[tensor], trace.lifetimes[tensor].writes
        if trace.tensors[tensor].is_persistent or len(writes) != 1 or writes[0] >= tick:
            return False
        if not _can_move(trace.tensors[tensor], self._problem.capabilities.min_bytes):
            return False
        op = trace.ops[writes[0]]
        return tensor in op.writes and life.birth == writes[0] and all(self._is_written_once(w, op) for w in op.writes)

    def _is_written_once(self, tensor: int, op: Op) -> bool:
        is_plain = not self._trace.tensors[tensor].is_persistent and tensor not in op.reads
        # What cannot move is on the device for all its life, and so cannot begin again.
        can_begin = _can_move(self._trace.tensors[tensor], self._problem.capabilities.min_bytes)
        return is_plain and can_begin and len(self._trace.lifetimes[tensor].writes) == 1

    def find(self, tensor: int, tick: int, is_away: Callable[[int], bool]) -> _Chain | None:
        """Returns the chain of a tensor at a tick, or None.

        Args:
            tensor: what to make.
            tick: when.
            is_away: whether a tensor is alive at the tick and dropped.
        """
        chain = _Chain()
        if not self._add(tensor, tick, is_away, chain):
            return None
        chain.needed -= chain.made
        chain.ops.sort()
        there = {*self._trace.ops[tick].reads, *self._trace.ops[tick].writes}
        more = sum(self._problem.size_bytes(t) for t in (chain.needed | chain.made) - there if self._is_idle(t, tick))
        if int(self._problem.base[tick]) + more > _DEVICE_SHARE * self._problem.device_bytes:
            return None
        return chain

    def _is_idle(self, tensor: int, tick: int) -> bool:
        life = self._trace.lifetimes[tensor]
        is_alive = life.birth <= tick < life.death
        return not is_alive or any(gap.start <= tick < gap.stop or tick + len(self._trace.ops) < gap.stop for gap in life.gaps)

    def _add(self, tensor: int, tick: int, is_away: Callable[[int], bool], chain: _Chain) -> bool:
        trace = self._trace
        if not self.can_repeat(tensor, tick):
            return False
        index = trace.lifetimes[tensor].writes[0]
        if index in chain.ops:
            return True
        if any(start < tick < stop for written in trace.ops[index].writes for start, stop in trace.tensors[written].holds):
            return False  # the program holds on to what would begin again
        chain.ops.append(index)
        if len(chain.ops) > _CHAIN_AT_MOST:
            return False
        chain.made.update(trace.ops[index].writes)
        for read in trace.ops[index].reads:
            life = trace.lifetimes[read]
            if any(index < write < tick for write in life.writes):
                return False
            is_alive = trace.tensors[read].is_persistent or life.birth <= tick < life.death
            if is_alive and not is_away(read):
                chain.needed.add(read)
            elif not self._add(read, tick, is_away, chain):
                return False
        return True


def _can_move(tensor: Tensor, min_bytes: int) -> bool:
    return tensor.is_movable and tensor.kind is not TensorClass.INPUT and tensor.size_bytes >= min_bytes


class OpenGaps:
    """Gaps whose tensors are still to be made, by tensor: no look at one of them takes longer the more there are."""

    def __init__(self, gaps: list[Gap]) -> None:
        self._of: dict[int, dict[int, Gap]] = {}
        for gap in gaps:
            self._of.setdefault(gap.tensor, {})[gap.start] = gap

    def has(self, gap: Gap) -> bool:
        """Returns whether a gap is open."""
        return gap.start in self._of[gap.tensor]

    def around(self, tensor: int, tick: int) -> list[Gap]:
        """Returns the open gaps of a tensor in which it is away at a tick: at most one."""
        return [gap for gap in self._of.get(tensor, {}).values() if gap.start <= tick < gap.stop]

    def is_away(self, tick: int, tensor: int) -> bool:
        """Returns whether a tensor is away at a tick."""
        return bool(self.around(tensor, tick))

    def close(self, gaps: list[Gap]) -> None:
        """Takes gaps out."""
        for gap in gaps:
            del self._of[gap.tensor][gap.start]


def remake(problem: Problem, chosen: list[Candidate]) -> Remade:
    """Returns the problem in which the tensors of these gaps are made again, as far as that goes together."""
    chains = _Chains(problem)
    trace = problem.trace
    births: dict[int, set[int]] = defaultdict(set)  # per tensor: ticks at which it is made again
    needs: dict[int, set[int]] = defaultdict(set)  # per tick: further tensors that repeats need
    repeats: set[tuple[int, int]] = set()
    gaps = sorted((c.gap for c in chosen), key=lambda gap: (gap.stop, gap.tensor))
    open_ = OpenGaps(gaps)
    for gap in gaps:
        if not open_.has(gap):
            continue  # it was made for another one, before its own use
        chain = chains.find(gap.tensor, gap.stop, partial(open_.is_away, gap.stop))
        open_.close([gap])
        if chain is None:
            continue
        repeats.update((gap.stop, op) for op in chain.ops)
        needs[gap.stop] |= chain.needed
        for tensor in chain.made:
            births[tensor].add(gap.stop)
            open_.close(open_.around(tensor, gap.stop))
    made = tuple(Repeat(op, at) for at, op in sorted(repeats))
    derived, origin = split(trace, {t: sorted(ticks) for t, ticks in births.items()}, needs, made)
    once = replace(problem.capabilities, repeats_ops=False)  # what is made again is decided
    return Remade(problem, make_problem(derived, problem.machine, problem.budget, once, problem.effort), origin, made)


def split(
    trace: Trace, births: dict[int, list[int]], needs: dict[int, set[int]], repeats: tuple[Repeat, ...]
) -> tuple[Trace, tuple[int, ...]]:
    """Returns the trace in which tensors begin again at their births, and the origin of each of its tensors."""
    origin = list(range(len(trace.tensors)))
    tensors = list(trace.tensors)
    first_of: dict[int, int] = {}
    for tensor, ticks in births.items():
        first_of[tensor] = len(tensors)
        edges = [0, *ticks, len(trace.ops) + 1]
        parts = [
            replace(
                trace.tensors[tensor],
                name=f"{trace.tensors[tensor].name}@{number}" if number else trace.tensors[tensor].name,
                holds=tuple(hold for hold in trace.tensors[tensor].holds if start <= hold[0] < stop),
                lives_until=trace.tensors[tensor].lives_until if trace.tensors[tensor].lives_until >= start else -1,
            )
            for number, (start, stop) in enumerate(itertools.pairwise(edges))
        ]
        last = max(number for number, edge in enumerate(edges[:-1]) if edge < trace.lifetimes[tensor].death)
        parts = [replace(part, lives_until=part.lives_until if n == last else -1) for n, part in enumerate(parts)]
        tensors[tensor] = parts[0]
        tensors += parts[1:]
        origin += [tensor] * len(ticks)

    def at(tensor: int, tick: int) -> int:
        if tensor not in births:
            return tensor
        number = sum(birth <= tick for birth in births[tensor])
        return tensor if number == 0 else first_of[tensor] + number - 1

    repeated: dict[int, list[int]] = defaultdict(list)
    for repeat in repeats:
        repeated[repeat.at].append(repeat.op)
    ops: list[Op] = []
    for tick, op in enumerate(trace.ops):
        if tick not in needs and tick not in repeated and births.keys().isdisjoint((*op.reads, *op.writes)):
            ops.append(op)
            continue
        again = [trace.ops[index] for index in repeated[tick]]
        reads = dict.fromkeys(at(t, tick) for t in (*op.reads, *sorted(needs.get(tick, ()))))
        writes = dict.fromkeys(at(t, tick) for t in (*op.writes, *(t for run in again for t in run.writes)))
        if again or reads.keys() != set(op.reads) or writes.keys() != set(op.writes):
            op = replace(
                op,
                duration_ns=op.duration_ns + sum(run.duration_ns for run in again),
                transient_bytes=max([op.transient_bytes, *(run.transient_bytes for run in again)]),
                reads=tuple(reads),
                writes=tuple(writes),
            )
        ops.append(op)
    changed = births.keys() | set().union(*needs.values(), *(trace.ops[repeat.op].writes for repeat in repeats))
    return trace.rewritten(tuple(ops), tuple(tensors), changed), tuple(origin)


def remade_problems(problem: Problem, count: int) -> Iterator[Remade]:
    """Yields problems in which ever more tensors are made again, at most `count` with about equal steps of bytes between."""
    if not problem.capabilities.repeats_ops or problem.trace.communication:
        return  # a repeat makes its tick longer, which beside communication is not what it costs
    candidates = find_candidates(problem)
    total = sum(candidate.size_bytes for candidate in candidates)
    held, step = 0, 1
    for taken, candidate in enumerate(candidates, 1):
        held += candidate.size_bytes
        if held * count >= step * total:
            step = held * count // total + 1
            yield remake(problem, candidates[:taken])
