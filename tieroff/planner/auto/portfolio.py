"""`auto`: the planner's own policy, an anytime portfolio; the fastest plan by simulation wins.

Windows come from two sources: greedy choices that are swept, then repaired and filled by the native search; and the
fractional relaxation, which is solved meanwhile. A local search continues from the best. Choices are swept for the original
problem and for variants in which more and more tensors are recomputed (tieroff/planner/extended/recompute.py); the later
stages run on the most promising of these. The search ends early when a plan is as good as a lower bound. It is deterministic:
what is tried depends on the problem alone. Where the executor updates on the host, the problem that updates leave is searched
afterwards in the same way (tieroff/planner/extended/host_updates.py), so host updates never make a plan slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from tieroff.core.plan import Plan, Repeat
from tieroff.planner.auto.best import Best
from tieroff.planner.auto.exchange import plan_exchanged
from tieroff.planner.auto.greedy import candidate_count, greedy_selections, last_resort, plan_greedy
from tieroff.planner.auto.relaxed import can_relax, fitted_windows, relaxed_windows
from tieroff.planner.auto.select import Selection
from tieroff.planner.auto.windows import make_moves
from tieroff.planner.bounds.bounds import Scope, lower_bound_ns
from tieroff.planner.extended.buckets import can_update
from tieroff.planner.extended.host_updates import updated_problems
from tieroff.planner.extended.improve import improve
from tieroff.planner.extended.recompute import Remade, remade_problems
from tieroff.planner.policy import policy
from tieroff.planner.problem.assemble import build_plan, plan_of, totals_of
from tieroff.planner.problem.pieces import KEPT, LOWER, Piece, Windows, fit, make_windows
from tieroff.planner.problem.problem import Problem
from tieroff.planner.problem.runs import Draft, draft

GENERATORS = frozenset({"swept", "fitted", "relaxed", "recomputed", "improved", "updated"})

_CLOSE = {"fast": 0.002, "high": 0.0002}  # of the bound: no need to search on
_FIRST = {"fast": 2, "high": 2}  # swept choices for the problem as it is, before any other
_CHOICES = {"fast": 4, "high": 54}  # swept choices on that one
_REMADE = {"fast": 6, "high": 16}  # problems with repeats
_UPDATED = {"fast": 4, "high": 6}  # problems in which the CPU updates buckets of the optimizer
_RIVALS = {"fast": 1, "high": 2}  # of them that are searched
_RELAXED = {"fast": 1, "high": 3}  # problems whose relaxation is solved
_RIVAL = 1.03  # times the best estimate: what may yet turn out better
_IMPROVED = {"fast": 2, "high": 4}  # windows that the local search begins with
_WORK = {"fast": 80_000_000, "high": 5_000_000_000}  # of it for each, about ns
_FULL = 8  # greedy candidates that a step's size must allow for each thing tried
_NEAR = 1.002  # of the best step time: drafts that are simulated


@dataclass(frozen=True, eq=False)
class _Ground:
    """A problem, and how its plans become plans of the one that was asked for.

    Attributes:
        repeats: added to its plans, where nothing else changes; None where updates on the host change more.
        choices: those of the greedy portfolio that were made so far; `choice` adds to them.
    """

    problem: Problem
    restore: Callable[[Plan], Plan | None]
    repeats: tuple[Repeat, ...] | None = None
    choices: list[tuple[Selection, float]] = field(default_factory=list)

    def choice(self, number: int) -> tuple[Selection, float] | None:
        """Returns one of the greedy portfolio's choices with a lead to try, or None where it has not as many."""
        while len(self.choices) <= number:
            made = next(self._more, None)
            if made is None:
                return None
            self.choices.append(made)
        return self.choices[number]

    @cached_property
    def _more(self) -> Iterator[tuple[Selection, float]]:
        made = greedy_selections(self.problem)
        return (choice for choice in made if choice[1] == 0.0 or self.problem.effort == "high")

    @cached_property
    def kept(self) -> Windows:
        """Windows with nothing away."""
        return kept_windows(self.problem)


@dataclass(frozen=True, slots=True)
class _Found:
    ground: _Ground
    draft: Draft


@policy("auto")
def plan_auto(problem: Problem) -> Plan:
    """Returns the best plan found."""
    return plan_with(problem, GENERATORS)


def plan_with(problem: Problem, generators: frozenset[str]) -> Plan:
    """Returns the best plan that some of GENERATORS find."""
    if problem.fits:
        return build_plan(problem, "auto", [], {})
    repeats = problem.capabilities.repeats_ops and "recomputed" in generators
    updates = "updated" in generators and can_update(problem)
    bound_ns = lower_bound_ns(problem, Scope(repeats, updates))
    search = _Search(problem, _as_it_is(problem), generators, bound_ns)
    search.run()
    best = search.best
    if updates and not best.is_within(bound_ns, _CLOSE[problem.effort]):
        rivals = [_Search(problem, ground, generators, bound_ns) for ground in _updated(problem)]
        for rival in rivals if len(rivals) > _RIVALS[problem.effort] else ():
            rival.probe()
        rivals.sort(key=lambda rival: (rival.best.step_ns is None, rival.best.step_ns))
        for rival in rivals[: _RIVALS[problem.effort]]:
            rival.run()
            best.offer(rival.best.plan)
    plan = best.plan
    return plan if plan is not None else _last_resort(problem)


def _as_it_is(problem: Problem) -> _Ground:
    return _Ground(problem, lambda plan: plan, ())


def _updated(problem: Problem) -> Iterator[_Ground]:
    """Yields the problems in which the CPU updates buckets of the optimizer."""
    count = max(1, min(_UPDATED[problem.effort], candidate_count(problem) // _FULL))
    for updated in updated_problems(problem, count):
        yield _Ground(updated.problem, updated.plan)


def _remade(ground: _Ground, count: int) -> Iterator[_Ground]:
    """Yields the problems in which ops are repeated."""
    for remade in remade_problems(ground.problem, count):
        yield _Ground(remade.problem, partial(_restore, ground, remade), None if ground.repeats is None else remade.repeats)


def _restore(ground: _Ground, remade: Remade, plan: Plan) -> Plan | None:
    return ground.restore(remade.plan(plan))


def _made(ground: _Ground, drafted: Draft) -> Plan | None:
    return ground.restore(plan_of(ground.problem, "auto", drafted))


def _last_resort(problem: Problem) -> Plan:
    """Returns the floor's plan, with repeats or updates on the host where it fits only so; over the budget where none is."""
    plan = last_resort(problem, "auto")
    best = Best(problem)
    best.offer(plan)
    for ground in (_as_it_is(problem), *_updated(problem)) if best.plan is None else ():
        for each in (ground, *_remade(ground, _REMADE[problem.effort])):
            best.offer(each.restore(last_resort(each.problem, "auto")))
    return best.plan if best.plan is not None else plan


class _Search:
    """The search for one problem, or one that is left of it.

    Attributes:
        best: of all plans so far, of the problem that was asked for.
    """

    def __init__(self, problem: Problem, ground: _Ground, generators: frozenset[str], bound_ns: int) -> None:
        self._problem = ground.problem
        self._ground = ground
        self._generators = generators
        self._found: list[_Found] = []
        # Of what is tried: all on steps of a few thousand tensors, ever less on larger ones.
        self._share = candidate_count(ground.problem) // _FULL
        self._bound_ns = bound_ns
        self.best = Best(problem)

    def probe(self) -> None:
        """Sweeps a first choice, which shows which of several searches is worth running."""
        self._sweep(self._ground, 1)

    def run(self) -> None:
        """Goes from one generator to the next until the best plan is as good as the bound."""
        grounds = self._grounds()
        first = next(grounds)
        self._sweep(first, self._limit(_FIRST))
        if self._problem.fits:
            return  # what updates on the host have left: nothing has to move any more
        for ground in grounds:
            if self._is_done():
                return
            self._sweep(ground, 1)
        if self._is_done():
            return
        chosen = self._best_grounds(first)
        with ThreadPoolExecutor(2) as pool:  # HiGHS runs beside the rest
            solving = [pool.submit(self._relax, ground, ground in (chosen[0], first)) for ground in chosen]
            for ground in dict.fromkeys((chosen[0], first)):
                if ground in chosen:
                    self._sweep(ground, self._limit(_CHOICES), 1)
            for ground, future in zip(chosen, solving, strict=True):
                for windows in future.result():
                    for fitted in fitted_windows(ground.problem, windows):
                        self._offer(ground, fitted)
        if "improved" in self._generators and not self._is_done():
            self._improve(first if first in chosen else None)

    def _limit(self, counts: dict[str, int]) -> int:
        return max(1, min(counts[self._problem.effort], self._share))

    def _is_done(self) -> bool:
        return self.best.is_within(self._bound_ns, _CLOSE[self._problem.effort])

    def _grounds(self) -> Iterator[_Ground]:
        """Yields the problem as it is, then those in which ops are repeated."""
        yield self._ground
        if "recomputed" in self._generators:
            yield from _remade(self._ground, self._limit(_REMADE))

    def _best_grounds(self, first: _Ground) -> list[_Ground]:
        """Returns the problems with the best drafts so far, best first, as long as they are near the first.

        The problem as it is comes after them where it may yet turn out better: where its bound is below what was found.
        """
        order = sorted(self._found, key=lambda found: found.draft.estimate_ns)
        near = [found.ground for found in order if found.draft.estimate_ns <= _RIVAL * order[0].draft.estimate_ns]
        chosen = list({id(ground): ground for ground in near}.values())[: _RELAXED[self._problem.effort]]
        step_ns = self.best.step_ns
        if not chosen or (first not in chosen and (step_ns is None or lower_bound_ns(first.problem) < step_ns)):
            chosen.append(first)
        return chosen

    def _sweep(self, ground: _Ground, count: int, skip: int = 0) -> None:
        """Tries greedy choices of one problem."""
        problem = ground.problem
        if problem.fits:
            self.best.offer(ground.restore(build_plan(problem, "auto", [], {})))
            return
        if not can_relax(problem):
            if "swept" in self._generators and not skip:
                plan = plan_exchanged(problem, "auto") if "improved" in self._generators else plan_greedy(problem)
                self.best.offer(ground.restore(plan))
            return
        count = min(count, candidate_count(problem)) if self._generators & {"swept", "fitted"} else 0
        for number in range(skip, count):
            choice = ground.choice(number)
            if choice is None:
                return
            selection, lead = choice
            windows = swept_windows(problem, ground.kept, selection, int(lead * int(problem.starts_ns[-1])))
            if "swept" in self._generators:
                self._offer(ground, windows)
            # To fill windows takes time with the square of a step's size, and those that are swept fit as they are.
            if "fitted" in self._generators and (self._share or "swept" not in self._generators):
                fitted = fit(
                    problem, windows, repair="furthest_use", passes="LRlr", lead_ns=0, device_bytes=problem.device_bytes
                )
                if fitted is not None:
                    self._offer(ground, fitted)
            if self._is_done():
                return

    def _relax(self, ground: _Ground, is_full: bool) -> list[Windows]:
        if "relaxed" not in self._generators or not self._share:
            return []
        effort = self._problem.effort if is_full else "fast"
        return list(relaxed_windows(replace(ground.problem, effort=effort)))

    def _offer(self, ground: _Ground, windows: Windows) -> None:
        drafted = draft(ground.problem, windows)
        if drafted is None:
            return
        self._found.append(_Found(ground, drafted))
        if self.best.step_ns is None or drafted.estimate_ns <= self.best.step_ns * _NEAR:
            self._weigh(ground, drafted)

    def _weigh(self, ground: _Ground, drafted: Draft) -> None:
        """Offers the plan of a draft; makes it only where it has to, since most plans are soon beaten by others."""
        make = partial(_made, ground, drafted)
        if ground.repeats is None:
            self.best.offer(make())
            return
        totals = totals_of(ground.problem, drafted, ground.repeats, self._ground.problem.trace)
        if totals is not None:
            self.best.weigh(totals, make)

    def _improve(self, also: _Ground | None) -> None:
        """Searches on from the best drafts, and from the best of one problem if they have none of it."""
        effort = self._problem.effort
        self._found.sort(key=lambda found: found.draft.estimate_ns)
        begins = self._found[: _IMPROVED[effort]]
        if also is not None and all(found.ground is not also for found in begins):
            begins += [found for found in self._found if found.ground is also][:1]
        for seed, found in enumerate(begins):
            problem = found.ground.problem
            self._offer(found.ground, improve(problem, found.draft.windows, seed=seed, work=_WORK[effort]))


def swept_windows(problem: Problem, kept: Windows, selection: Selection, lead_ns: int) -> Windows:
    """Returns the windows into which a greedy choice is swept; see tieroff/planner/auto/windows.py.

    Args:
        problem: what is planned.
        kept: windows of whole tensors, all of which stay; from `kept_windows`.
        selection: the choice.
        lead_ns: as `make_moves` takes it.
    """
    tensor, start = kept.tensor[kept.piece].tolist(), kept.start.tolist()
    row_of = {gap: row for row, gap in enumerate(zip(tensor, start, strict=True))}
    moves = [move for move in make_moves(problem, selection, lead_ns) if move.release_at < move.load_at]
    number_of = {tensor: LOWER.index(tier) for tensor, tier in selection.tier_of.items()}
    away = [
        (row_of[move.slot.tensor, move.slot.start], move.release_at, move.load_at, number_of[move.slot.tensor])
        for move in moves
    ]
    rows, *columns = np.array(away, np.int64).reshape(-1, 4).T
    changed = {}
    for name, column in zip(("away_start", "away_stop", "tier"), columns, strict=True):
        changed[name] = getattr(kept, name).copy()
        changed[name][rows] = column
    return replace(kept, **changed)


def kept_windows(problem: Problem) -> Windows:
    """Returns the windows of all tensors that may move, whole, with none of them away."""
    lifetimes = problem.trace.lifetimes
    tensors = sorted({slot.tensor for unit in problem.units for slot in unit.slots})
    return make_windows(problem, [(Piece(t, 0, problem.size_bytes(t)), [KEPT] * len(lifetimes[t].gaps)) for t in tensors])
