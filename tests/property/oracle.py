"""The exact optimum of tiny problems, by trying every plan of a rich family: the checker filters, the simulator judges.

Whole tensors; each gap of each movable tensor is kept or left over every possible window; what comes back comes from
HOST, from NVME, from HOST after a copy went on to NVME or the other way round, with copies in both, or is made again by
repeating an op that writes it; copies out are issued at any tick from the last write on. One copy serves all gaps up to
the next write. Transfers of one tick are served in order of deadline, or the other way round. Any of the optimizer's ops
may be updates on the host, each over one op, of tensors that the host has anyway or gets in a last gap.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tieroff.core.check.plan import check
from tieroff.core.lifetime import Gap, Lifetime
from tieroff.core.machine import LINK_NAMES
from tieroff.core.plan import HostUpdate, Plan, Repeat, Residency, Transfer
from tieroff.core.tensor import Tier
from tieroff.errors import InvalidPlanError
from tieroff.planner.problem.problem import Problem, make_problem
from tieroff.planner.simulate.simulator import simulate

Window = tuple[int, int] | None
"""Ticks of the release and of the load of one gap; None: kept."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is done with one tensor."""

    residencies: tuple[Residency, ...]
    transfers: tuple[Transfer, ...] = ()
    repeats: tuple[Repeat, ...] = ()


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best plan found, and how many were simulated."""

    plan: Plan
    step_ns: int
    count: int


class Choices:
    """All choices for one tensor of a problem."""

    def __init__(self, problem: Problem, tensor: int, *, with_repeats: bool) -> None:
        self._problem, self._n = problem, problem.op_count
        self._life: Lifetime = problem.trace.lifetimes[tensor]
        self._tensor = tensor
        self._is_persistent = problem.trace.tensors[tensor].is_persistent
        ops = problem.trace.ops
        self._writers = [i for i, op in enumerate(ops) if tensor in op.writes and tensor not in op.reads]
        self._with_repeats = with_repeats and problem.capabilities.repeats_ops and not self._is_persistent

    def __iter__(self) -> Iterator[Choice]:
        if not self._life.required and Tier.HOST in self._problem.tiers and self._is_persistent:
            yield Choice((Residency(self._tensor, Tier.HOST, 0, self._n),))
        for windows in itertools.product(*(list(self._windows(gap)) for gap in self._life.gaps)):
            away = [(gap, w) for gap, w in zip(self._life.gaps, windows, strict=True) if w is not None]
            held = tuple(self._device(away))
            if not away:
                yield Choice(held)
                continue
            for ways in itertools.product(*(list(self._ways(run)) for run in self._runs(away))):
                parts = [Choice(held), *ways]
                yield Choice(*(tuple(x for p in parts for x in getattr(p, name)) for name in Choice.__slots__))

    def _windows(self, gap: Gap) -> Iterator[Window]:
        yield None
        for release in range(gap.start, gap.stop):
            for load in (gap.stop,) if gap.is_last else range(release + 1, gap.stop + 1):
                yield release, load

    def _device(self, away: Sequence[tuple[Gap, tuple[int, int]]]) -> Iterator[Residency]:
        life, n = self._life, self._n
        if not away:
            yield Residency(self._tensor, Tier.DEVICE, life.birth, life.death)
            return
        ends = [release for _, (release, _) in away]
        begins = [load for gap, (_, load) in away if not gap.is_last]
        if self._is_persistent:
            begins = [begins[-1] - n, *begins[:-1]]
        else:
            begins, ends = [life.birth, *begins], ends if away[-1][0].is_last else [*ends, life.death]
        for start, stop in zip(begins, ends, strict=True):
            yield self._stay(Tier.DEVICE, start, stop)

    def _stay(self, tier: Tier, start: int, stop: int) -> Residency:
        first = start % self._n
        return Residency(self._tensor, tier, first, first + min(stop - start, self._n))

    def _move(self, source: Tier, target: Tier, issue: int, ready: int) -> Transfer:
        first = issue % self._n
        if issue == ready and not first and issue and target is not Tier.DEVICE:
            first = self._n  # before the step ends, and so before the residency does
        return Transfer(self._tensor, source, target, first, first + ready - issue, 0)

    def _runs(self, away: Sequence[tuple[Gap, tuple[int, int]]]) -> list[tuple[int | None, list[tuple[Gap, int, int, int]]]]:
        """Returns rows of gaps that one copy can serve, each with the tick of the write before it."""
        n = self._n
        shifts = (-n, 0) if self._is_persistent else (0,)
        writes = [w + shift for shift in shifts for w in self._life.writes]
        before = away[-1][0].stop - n if self._is_persistent else -1
        runs: list[tuple[int | None, list[tuple[Gap, int, int, int]]]] = []
        leading: list[tuple[Gap, int, int, int]] = []
        for gap, (release, load) in away:
            since = [w for w in writes if before <= w < gap.start]
            if since:
                runs.append((max(since), [(gap, release, load, gap.stop)]))
            else:
                (runs[-1][1] if runs else leading).append((gap, release, load, gap.stop))
            before = gap.stop
        if not runs:
            return [(None, leading)]
        runs[-1][1].extend((gap, release + n, load + n, stop + n) for gap, release, load, stop in leading)
        return runs

    def _ways(self, run: tuple[int | None, list[tuple[Gap, int, int, int]]]) -> Iterator[Choice]:
        write, gaps = run
        tiers, n = self._problem.tiers, self._n
        first, release, load, _ = gaps[0]
        end = gaps[-1][3] + (not gaps[-1][0].is_last)
        backs = {tier: tuple(self._move(tier, Tier.DEVICE, at, by) for g, _, at, by in gaps if not g.is_last) for tier in tiers}
        if write is None:
            for tier in tiers:
                yield Choice((Residency(self._tensor, tier, 0, n),), backs[tier])
            return
        if self._with_repeats and len(gaps) == 1 and not first.is_last:
            yield from (Choice((), (), (Repeat(op, load),)) for op in self._writers if op < load < n)
        for issue in range(max(write + 1, release - n), release + 1):
            begin = issue - (issue == release and not issue % n)  # across the step's end, not from it on
            for tier in tiers:
                out = self._move(Tier.DEVICE, tier, issue, release)
                yield Choice((self._stay(tier, begin, end),), (out, *backs[tier]))
                other = next((t for t in tiers if t is not tier), None)
                if other is None:
                    continue
                both = self._move(Tier.DEVICE, other, issue, release)
                copies = self._stay(tier, begin, end), self._stay(other, begin, end)
                yield Choice(copies, (out, both, *backs[tier]))
                for by in {release + 1, load} if self._problem.capabilities.moves_host_nvme else ():
                    on = self._move(tier, other, release, by)
                    yield Choice((self._stay(tier, begin, by), self._stay(other, release, end)), (out, on, *backs[other]))


def _ranked(transfers: Sequence[Transfer], sign: int) -> tuple[Transfer, ...]:
    def key(t: Transfer) -> tuple[int, bool, int, int]:
        return t.issue_at, t.target is Tier.DEVICE or t.issue_at < t.ready_by, sign * t.ready_by, sign * t.tensor

    counts: dict[str, int] = defaultdict(int)
    ranked = []
    for t in sorted(transfers, key=key):
        link = LINK_NAMES[t.source, t.target]
        ranked.append(replace(t, rank=counts[link]))
        counts[link] += 1
    return tuple(ranked)


def _lines(problem: Problem, residencies: Sequence[Residency]) -> dict[Tier, list[int]]:
    lines = {tier: [0] * problem.op_count for tier in Tier}
    for r in residencies:
        for op in range(r.start, r.stop):
            lines[r.tier][op % problem.op_count] += problem.size_bytes(r.tensor)
    return lines


def _view(problem: Problem, updates: Sequence[int]) -> Problem:
    """Returns the problem that is left on the device when the host runs some ops, and its tensors live to see them."""
    ops, tensors = list(problem.trace.ops), list(problem.trace.tensors)
    for op in updates:
        for index in {*ops[op].reads, *ops[op].writes}:
            holds = tuple(hold for hold in tensors[index].holds if hold != (op, op + 1))
            until = -1 if tensors[index].is_persistent else max(tensors[index].lives_until, op + 1)
            tensors[index] = replace(tensors[index], holds=holds, lives_until=until)
        ops[op] = replace(ops[op], duration_ns=0, reads=(), writes=())
    trace = replace(problem.trace, ops=tuple(ops), tensors=tuple(tensors))
    return make_problem(trace, problem.machine, problem.budget, problem.capabilities)


def optimum(
    problem: Problem, tensors: Sequence[int], *, with_repeats: bool = False, update_ns: int | None = None, most: int = 20_000
) -> Optimum | None:
    """Returns the best plan that moves some of the tensors, None if none is valid or there are too many to try.

    Args:
        problem: what is planned.
        tensors: that may move.
        with_repeats: ops may run again.
        update_ns: time of an update on the host; None: there are none.
        most: plans to try, for each choice of ops that the host runs.
    """
    best: Optimum | None = None
    ops = [i for i, op in enumerate(problem.trace.ops) if op.phase == "optimizer" and update_ns is not None]
    for count in range(len(ops) + 1):
        for chosen in itertools.combinations(ops, count):
            updates = tuple(HostUpdate(op, op, op + 1, update_ns or 0) for op in chosen)
            view = _view(problem, chosen) if chosen else problem
            found = _optimum(problem, view, tensors, updates, with_repeats, most)
            if found is not None and (best is None or found.step_ns < best.step_ns):
                best = found
    return best


def _optimum(
    problem: Problem, view: Problem, tensors: Sequence[int], updates: tuple[HostUpdate, ...], with_repeats: bool, most: int
) -> Optimum | None:
    lives = [life for life in view.trace.lifetimes if life.tensor not in tensors]
    fixed = [Residency(life.tensor, Tier.DEVICE, life.birth, life.death) for life in lives]
    base = _lines(problem, fixed)
    base[Tier.DEVICE] = [a + op.transient_bytes for a, op in zip(base[Tier.DEVICE], problem.trace.ops, strict=True)]
    partial: list[tuple[dict[Tier, list[int]], tuple[Choice, ...]]] = [(base, ())]
    for position, tensor in enumerate(tensors):
        choices = [(choice, _lines(problem, choice.residencies)) for choice in Choices(view, tensor, with_repeats=with_repeats)]
        if len(choices) * len(partial) > 50 * most:
            return None
        is_last = position == len(tensors) - 1
        partial = [
            (together, (*chosen, choice))
            for used, chosen in partial
            for choice, lines in choices
            for together in [{tier: [a + b for a, b in zip(used[tier], lines[tier], strict=True)] for tier in Tier}]
            if not is_last or all(max(together[tier]) <= problem.budget[tier] for tier in Tier)
        ]
    if len(partial) > most:
        return None
    best: Optimum | None = None
    for used, chosen in partial:
        for sign in (1, -1):
            plan = _plan(problem, used, fixed, chosen, updates, sign)
            timeline = simulate(plan, problem.trace, problem.machine)
            if not timeline.is_periodic or (best is not None and timeline.step_ns >= best.step_ns):
                continue
            try:
                check(plan, problem.trace, problem.capabilities)
            except InvalidPlanError:
                break
            best = Optimum(plan, timeline.step_ns, len(partial))
    return best


def _plan(
    problem: Problem,
    used: dict[Tier, list[int]],
    fixed: Sequence[Residency],
    chosen: Sequence[Choice],
    updates: tuple[HostUpdate, ...],
    sign: int,
) -> Plan:
    return Plan(
        policy="oracle",
        trace_digest=problem.trace.digest,
        op_count=problem.op_count,
        budget_bytes=dict(problem.budget),
        peak_bytes={tier: max(line) for tier, line in used.items()},
        residencies=(*fixed, *(r for choice in chosen for r in choice.residencies)),
        transfers=_ranked([t for choice in chosen for t in choice.transfers], sign),
        repeats=tuple({r: None for choice in chosen for r in choice.repeats}),
        host_updates=updates,
    )
