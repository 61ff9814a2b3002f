"""`greedy`: a small portfolio of greedy choices, each turned into windows and simulated; the fastest plan wins."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from tieroff.core.plan import Plan
from tieroff.planner.auto.best import Best
from tieroff.planner.auto.floor import floor_selection, plan_floor
from tieroff.planner.auto.select import Score, Selection, Selector
from tieroff.planner.auto.windows import make_moves
from tieroff.planner.policy import policy
from tieroff.planner.problem.assemble import Move, build_plan
from tieroff.planner.problem.problem import Problem

# Share of the budget to choose for (the rest is room for windows), score, and reluctance to move what is persistent;
# the best in experience first.
CHOICES = (
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
Swept = tuple[Selection, int, list[Move]]
TOLERANCE = 0.005
"""Share of a step within which plans are equals: nobody measures durations better than that."""

WORK = {"fast": 350_000, "high": 3_500_000}  # ops and units visited, over all candidates
_LARGE = 4_000  # ops and units, above which a candidate costs more than its share: the work itself shrinks then


def candidate_count(problem: Problem) -> int:
    """Returns how many candidates are tried: all on traces of a few thousand tensors, fewer on large ones, at least one.

    With effort "fast" that is one from about 25,000 tensors on, so that 50,000 are planned in seconds.
    """
    size = problem.op_count + len(problem.units) + 1
    return max(1, WORK[problem.effort] * min(size, _LARGE) // size**2)


@policy("greedy")
def plan_greedy(problem: Problem) -> Plan:
    """Returns the fastest plan of the portfolio, by simulation; of those as good as it the one that moves least.

    The floor's choice is tried when no other gives a plan, so one is found whenever the floor's is one.
    """
    if problem.fits:
        return build_plan(problem, "greedy", [], {})
    best = Best(problem, TOLERANCE)
    for selection, _, moves in itertools.islice(sweep_choices(problem), candidate_count(problem)):
        best.offer_moves("greedy", moves, selection.tier_of)
    return best.plan if best.plan is not None else last_resort(problem, "greedy")


def last_resort(problem: Problem, policy: str) -> Plan:
    """Returns a plan whenever there is one: the floor's choice with windows, or the floor itself, over the budget or not."""
    best = Best(problem)
    for selection, _, moves in _swept(problem, _floor_candidate(problem)):
        best.offer_moves(policy, moves, selection.tier_of)
    return best.plan if best.plan is not None else plan_floor(problem)


def sweep_choices(problem: Problem) -> Iterator[Swept]:
    """Yields each greedy choice with each lead in ns, and the floor's, with its moves; see tieroff/planner/auto/windows.py."""
    yield from _swept(problem, itertools.chain(greedy_selections(problem), _floor_candidate(problem)))


def sweep_leads(problem: Problem, selection: Selection) -> Iterator[Swept]:
    """Yields one choice with each lead in ns, and its moves."""
    yield from _swept(problem, ((selection, lead) for lead in _LEADS))


def _swept(problem: Problem, selections: Iterable[tuple[Selection, float]]) -> Iterator[Swept]:
    for selection, lead in selections:
        lead_ns = int(lead * int(problem.starts_ns[-1]))
        yield selection, lead_ns, make_moves(problem, selection, lead_ns)


def greedy_selections(problem: Problem) -> Iterator[tuple[Selection, float]]:
    """Yields the choices, each once, with the leads to try."""
    if not problem.units:
        return
    selector = Selector(problem)
    seen: set[tuple[object, ...]] = set()
    for share, score, reluctance in CHOICES:
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
