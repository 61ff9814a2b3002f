"""`relaxed`: plans rounded from the fractional relaxation; see tieroff/planner/bounds/relaxation.py and rounding.py.

It serves executors that cross the end of the step and move every tensor on its own; for others it returns the floor plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tieroff.core.plan import Plan
from tieroff.core.tensor import Tier
from tieroff.planner.auto.best import Best
from tieroff.planner.auto.greedy import last_resort
from tieroff.planner.auto.rounding import round_solution
from tieroff.planner.auto.select import Score, Selection, Selector
from tieroff.planner.bounds.relaxation import Group, Relaxation, check_points, column_count, group_tensors
from tieroff.planner.policy import policy
from tieroff.planner.problem.assemble import assemble, build_plan
from tieroff.planner.problem.pieces import LOWER, Windows, fit
from tieroff.planner.problem.problem import Problem

# The program sees a little less than there is: what rounding takes more at ops between check points comes from the rest.
_DEVICE_SHARE = 0.98
_LOWER_SHARE = 0.99
_WHOLE_SHARE = 0.9  # the same where only whole tensors move
_SMALL_SHARE = 0.02  # of the bytes x slots: the groups with the least stay out of the program
_TOLERANCE = 1e-3
_SLOTS = {"fast": (30, 24, 20, 16, 12, 8), "high": (120, 96, 80, 60, 48, 36, 30, 24, 20, 16, 12, 8)}
_COLUMNS_AT_MOST = {"fast": 13_000, "high": 220_000}
# How windows are repaired and filled, the best in experience first.
_WAYS = (("furthest_use", "LRlr"), ("deepest", "LRlr"), ("relative_time", "LRlr"), ("furthest_use", "RLrl"))


@dataclass(frozen=True, slots=True)
class _Grid:
    points: list[int]
    groups: list[Group]


def can_relax(problem: Problem) -> bool:
    """True when the executor can run what comes out of the relaxation, and there is something to move."""
    capabilities = problem.capabilities
    return capabilities.wraps and not capabilities.gradient_follows_parameter and bool(problem.units)


def _worthwhile(groups: list[Group]) -> list[Group]:
    """Returns the groups without those that matter least; they then stay unless a repair moves them."""

    def weight(group: Group) -> float:
        return group.size_gib * (group.pattern.last - group.pattern.first + 1)

    order = sorted(range(len(groups)), key=lambda i: (weight(groups[i]), i))
    limit = _SMALL_SHARE * sum(weight(group) for group in groups)
    kept: set[int] = set()
    for index in order:
        limit -= weight(groups[index])
        if limit < 0:
            kept.add(index)
    return [group for index, group in enumerate(groups) if index in kept]


def _grids(problem: Problem, effort: str) -> Iterator[_Grid]:
    """Yields check points and groups: in effort "high" a coarse and a fine grid, else the finest that is solved fast."""
    for level in ("fast",) if effort == "fast" else ("fast", "high"):
        for slot_count in _SLOTS[level]:
            points = check_points(problem, slot_count)
            groups = _worthwhile(group_tensors(problem, points))
            if column_count(groups) <= _COLUMNS_AT_MOST[level] and groups:
                yield _Grid(points, groups)
                break


def relaxed_windows(problem: Problem) -> Iterator[Windows]:
    """Yields the rounded solution of the relaxation on one grid after another."""
    for grid in _grids(problem, problem.effort) if can_relax(problem) else ():
        relaxation = Relaxation(
            problem,
            grid.points,
            grid.groups,
            device_bytes=int(_DEVICE_SHARE * problem.device_bytes),
            lower_share=_LOWER_SHARE,
            moves_below=False,
        )
        if relaxation.solve(_TOLERANCE):
            yield round_solution(problem, relaxation)


def fitted_windows(problem: Problem, windows: Windows) -> Iterator[Windows]:
    """Yields windows that fit, repaired and filled in different ways."""
    for repair, passes in _WAYS:
        fitted = fit(problem, windows, repair=repair, passes=passes, lead_ns=0, device_bytes=problem.device_bytes)
        if fitted is not None:
            yield fitted


def relaxed_selection(problem: Problem) -> Selection | None:
    """Returns whole units that the relaxation has away, and more where ops are over the budget; None where it has none.

    For executors that do not run what the relaxation itself says: it then names who leaves, and the sweep says when.
    """
    grid = next(_grids(problem, "fast"), None)
    if grid is None:
        return None
    device_bytes = int(_WHOLE_SHARE * problem.device_bytes)
    relaxation = Relaxation(
        problem, grid.points, grid.groups, device_bytes=device_bytes, lower_share=_LOWER_SHARE, moves_below=False
    )
    if not relaxation.solve(_TOLERANCE):
        return None
    windows = round_solution(problem, relaxation)
    away: dict[int, list[Tier]] = {}
    leaves: set[tuple[int, int]] = set()
    for gap in np.flatnonzero(windows.is_away).tolist():
        tensor = int(windows.tensor[windows.piece[gap]])
        away.setdefault(tensor, []).append(LOWER[int(windows.tier[gap])])
        leaves.add((tensor, int(windows.start[gap])))
    first: dict[int, Tier] = {}
    for position, unit in enumerate(problem.units):
        if any((slot.tensor, slot.start) in leaves for slot in unit.slots):
            tiers = [tier for tensor in unit.tensors for tier in away.get(tensor, ())]
            first[position] = max(problem.tiers, key=tiers.count)
    return Selector(problem).select(Score.TIME, problem.device_bytes, problem.tiers, first=first)


@policy("relaxed")
def plan_relaxed(problem: Problem) -> Plan:
    """Returns the best plan rounded from the relaxation, or the floor's if rounding gives none."""
    if problem.fits:
        return build_plan(problem, "relaxed", [], {})
    best = Best(problem)
    for windows in relaxed_windows(problem):
        for fitted in fitted_windows(problem, windows):
            best.offer(assemble(problem, "relaxed", fitted))
    return best.plan if best.plan is not None else last_resort(problem, "relaxed")
