"""`greedy`: a small portfolio of greedy choices, each turned into windows and simulated; the fastest plan wins."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

from tieroff.core.plan import Plan
from tieroff.planner.bounds import lower_bound_ns
from tieroff.planner.build import build_plan
from tieroff.planner.policies.floor import floor_selection, plan_floor
from tieroff.planner.policies.select import Score, Selection, Selector
from tieroff.planner.problem import Problem
from tieroff.planner.simulate import simulate
from tieroff.planner.windows import make_moves

# Share of the budget to choose for (the rest is room for windows), score, and reluctance to move what is persistent;
# the best in experience first.
_CHOICES = (
    (1.0, Score.TIME, 1.0),
    (1.0, Score.SLACK, 1.0),
    (0.93, Score.TIME, 1.0),
    (0.93, Score.SLACK, 1.0),
    (0.85, Score.TIME, 1.0),
    (0.85, Score.SLACK, 1.0),
    (0.93, Score.TIME, 4.0),
    (0.6, Score.SLACK, 1.0),
    (0.9, Score.SLACK, 1000.0),
    (1.0, Score.RELIEF, 1.0),
    (0.97, Score.TIME, 1.0),
    (0.75, Score.TIME, 1.0),
    (1.0, Score.BYTES, 1.0),
    (0.97, Score.SLACK, 1.0),
    (0.75, Score.SLACK, 1.0),
    (0.6, Score.TIME, 1.0),
    (1.0, Score.RATIO, 1.0),
    (0.97, Score.SLACK, 2.0),
)
_LEADS = (0.02, 0.0, 0.1)  # of the step
_ENOUGH = 4 * len(_LEADS)  # candidates to compare by bytes once the lower bound is met
_LIMIT_S = 2.5


def plan_greedy(problem: Problem) -> Plan:
    """Returns the fastest plan of the portfolio, by simulation; ties go to the fewest bytes moved.

    The floor's choice is always a candidate, so a plan within the budget is found whenever the floor's is one. The
    portfolio is fixed; the time limit only cuts it short on large traces.
    """
    if int(problem.live.max(initial=0)) <= problem.device_bytes:
        return build_plan(problem, "greedy", [], {})
    deadline = time.monotonic() + _LIMIT_S
    bound_ns = lower_bound_ns(problem)
    best: tuple[tuple[int, int], Plan] | None = None
    for count, (selection, lead) in enumerate(_candidates(problem)):
        if best is not None and best[0][0] <= bound_ns and count >= _ENOUGH:
            break
        moves = make_moves(problem, selection, int(lead * int(problem.starts_ns[-1])))
        plan = build_plan(problem, "greedy", moves, selection.tier_of)
        timeline = simulate(plan, problem.trace, problem.machine)
        key = timeline.step_ns, sum(timeline.moved_bytes.values())
        if best is None or key < best[0]:
            best = key, replace(plan, step_ns=timeline.step_ns)
        if time.monotonic() > deadline:
            break
    return best[1] if best is not None else plan_floor(problem)


def _candidates(problem: Problem) -> Iterator[tuple[Selection, float]]:
    return itertools.chain(_greedy_candidates(problem), _floor_candidate(problem))


def _greedy_candidates(problem: Problem) -> Iterator[tuple[Selection, float]]:
    if not problem.units:
        return
    selector = Selector(problem)
    seen: set[tuple[object, ...]] = set()
    for share, score, reluctance in _CHOICES:
        selection = selector.select(score, int(share * problem.device_bytes), problem.tiers, reluctance)
        if selection is None or selection.slots in seen:
            continue
        seen.add(selection.slots)
        for lead in _LEADS:
            yield selection, lead


def _floor_candidate(problem: Problem) -> Iterator[tuple[Selection, float]]:
    selection = floor_selection(problem)
    if selection.usage.max(initial=0) <= problem.device_bytes:
        yield selection, _LEADS[0]
