"""What a choice of strategies costs and holds, counted again from the problem alone, in plain whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tieroff.errors import InvalidPlanError
from tieroff.study.sharding.problem import FORBIDDEN_COST, ShardingPlan, ShardingProblem


@dataclass(frozen=True, slots=True)
class ShardingCount:
    """What one choice costs, and the most that it holds at any time, in bytes per device."""

    cost: int
    peak_bytes: int
    peak_at: int


def count_sharding(problem: ShardingProblem, strategies: Sequence[int]) -> ShardingCount:
    """Returns what a choice costs and holds.

    Raises:
        InvalidPlanError: not one strategy per node, or one that a node does not have.
    """
    if len(strategies) != problem.node_count:
        raise InvalidPlanError(
            f"expected a strategy for each of {problem.node_count} nodes, got {len(strategies)}", rule="one strategy per node"
        )
    sizes = np.diff(problem.first_strategy).tolist()
    for node, (chosen, size) in enumerate(zip(strategies, sizes, strict=True)):
        if not 0 <= chosen < size:
            raise InvalidPlanError(f"node {node}: expected a strategy below {size}, got {chosen}", rule="strategies exist")
    places = [int(first) + chosen for first, chosen in zip(problem.first_strategy[:-1], strategies, strict=True)]
    cost = sum(int(problem.cost[place]) for place in places)
    edges = zip(problem.source.tolist(), problem.target.tolist(), problem.first_entry.tolist(), strict=False)
    cost += sum(
        int(problem.entry[first + strategies[source] * sizes[target] + strategies[target]]) for source, target, first in edges
    )
    peak, peak_at = _peak(problem, places)
    return ShardingCount(cost, peak, peak_at)


def _peak(problem: ShardingProblem, places: Sequence[int]) -> tuple[int, int]:
    events: dict[int, int] = {}
    for start, stop, place in zip(problem.start.tolist(), problem.stop.tolist(), places, strict=True):
        if start < stop:
            events[start] = events.get(start, 0) + int(problem.usage[place])
            events[stop] = events.get(stop, 0) - int(problem.usage[place])
    held = peak = peak_at = 0
    for time, change in sorted(events.items()):
        held += change
        if held > peak:
            peak, peak_at = held, time
    return peak, peak_at


def check_sharding(problem: ShardingProblem, plan: ShardingPlan) -> ShardingCount:
    """Returns what a feasible plan costs and holds, when that is what it says.

    Raises:
        InvalidPlanError: a cost that differs, a forbidden choice, bytes above the limit, or a bound above the cost.
    """
    count = count_sharding(problem, plan.strategies)
    if plan.cost != count.cost:
        raise InvalidPlanError(f"expected the cost {count.cost}, but the plan says {plan.cost}", rule="cost is counted")
    if count.cost * 10 >= FORBIDDEN_COST:
        raise InvalidPlanError(f"a cost of {count.cost} holds a forbidden choice", rule="choices are allowed")
    if plan.is_feasible != (count.peak_bytes <= problem.usage_limit):
        raise InvalidPlanError(
            f"at {count.peak_at} each device holds {count.peak_bytes} bytes and has {problem.usage_limit}, "
            f"but the plan says that it is {'' if plan.is_feasible else 'not '}within them",
            rule="memory stays within the limit",
        )
    if plan.bound is not None and plan.bound > count.cost:
        raise InvalidPlanError(f"the bound {plan.bound} is above the cost {count.cost}", rule="a bound is below the cost")
    return count
