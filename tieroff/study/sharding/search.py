"""`auto`: the choice of strategies under a limit of memory by a search, with a bound on what any choice costs.

Native code (native/src/sharding) does the work, within a time limit and on two threads:

1. Arc consistency; nodes that determine each other become one; strategies that another one dominates go.
2. The relaxation that gives every edge's cost to its ends by messages and every byte a price: its value bounds every choice
   from below, for any messages and prices. It has the value of the linear program's dual, without its matrix.
3. Assignments are rounded from the messages, repaired by prices that rise while memory is over the limit, and improved
   along random trees of nodes, each of which is solved exactly with its surroundings fixed.

With a time limit the result depends on the machine's speed. It is checked by `check_sharding` before it is returned.
"""

from __future__ import annotations

import math

from tieroff import _native
from tieroff.errors import ConfigError
from tieroff.study.sharding.check import check_sharding, count_sharding
from tieroff.study.sharding.problem import ShardingPlan, ShardingProblem


def search_sharding(problem: ShardingProblem, time_limit_s: float, seed: int = 1) -> ShardingPlan:
    """Returns the best plan found within the time, with a bound that holds for every choice.

    It stops earlier when the cost meets the bound.

    Raises:
        ConfigError: the time limit is not above 0.
    """
    if not 0 < time_limit_s < math.inf:
        raise ConfigError(f"expected a time limit above 0 seconds, got {time_limit_s}")
    is_feasible, bound, strategies, _ = _native.shard(
        first_strategy=problem.first_strategy,
        cost=problem.cost,
        usage=problem.usage,
        start=problem.start,
        stop=problem.stop,
        source=problem.source,
        target=problem.target,
        first_entry=problem.first_entry,
        entry=problem.entry,
        limit=problem.usage_limit,
        time_limit_s=time_limit_s,
        seed=seed,
    )
    proven = bound if math.isfinite(bound) else None
    if not is_feasible:
        return ShardingPlan((), None, proven, False)
    cost = count_sharding(problem, strategies).cost
    plan = ShardingPlan(tuple(strategies), cost, None if proven is None else min(proven, float(cost)), True)
    check_sharding(problem, plan)
    return plan
