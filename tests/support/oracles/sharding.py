"""Sharding problems from nodes and edges, and their least cost by elimination, where memory is no matter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tieroff.study.sharding.check import count_sharding
from tieroff.study.sharding.elimination import Factor, eliminate
from tieroff.study.sharding.iopddl import parse_problem
from tieroff.study.sharding.problem import FORBIDDEN_COST, ShardingPlan, ShardingProblem


@dataclass(frozen=True, slots=True)
class ShardingNode:
    """One node: per strategy its cost and the bytes that it holds on each device over [start, stop)."""

    costs: Sequence[int]
    usages: Sequence[int]
    start: int = 0
    stop: int = 0


@dataclass(frozen=True, slots=True)
class ShardingEdge:
    """One edge: a cost per pair of strategies, row by row of the source's."""

    source: int
    target: int
    costs: Sequence[int]


def build_problem(nodes: Sequence[ShardingNode], edges: Sequence[ShardingEdge], usage_limit: int) -> ShardingProblem:
    """Returns the problem of these nodes and edges, as the reader of the contest's files makes it."""
    return parse_problem(
        {
            "nodes": {
                "intervals": [[node.start, node.stop] for node in nodes],
                "costs": [node.costs for node in nodes],
                "usages": [node.usages for node in nodes],
            },
            "edges": {"nodes": [[edge.source, edge.target] for edge in edges], "costs": [edge.costs for edge in edges]},
            "usage_limit": usage_limit,
        }
    )


def solve_without_limit(problem: ShardingProblem) -> ShardingPlan:
    """Returns the strategies of least cost when memory is no matter, for costs whose sum stays below 2**53."""
    sizes = np.diff(problem.first_strategy).tolist()
    factors = [
        Factor((node,), _costs(problem.cost[first : first + size]))
        for node, (first, size) in enumerate(zip(problem.first_strategy[:-1], sizes, strict=True))
    ]
    for edge, (a, b) in enumerate(zip(problem.source.tolist(), problem.target.tolist(), strict=True)):
        table = _costs(problem.entry[problem.first_entry[edge] : problem.first_entry[edge + 1]]).reshape(sizes[a], sizes[b])
        factors.append(Factor((a,), table.diagonal().copy()) if a == b else Factor((a, b), table))
    found = eliminate(sizes, factors)
    if not math.isfinite(found.cost):
        return ShardingPlan((), None, None, False)
    peak = count_sharding(problem, found.values).peak_bytes
    return ShardingPlan(found.values, round(found.cost), found.cost, peak <= problem.usage_limit)


def _costs(values: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.where(values < FORBIDDEN_COST // 10, values.astype(np.float64), np.inf)
