"""Solvers for the choice of strategies against trying all, on random small problems."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.covering import examples
from tests.support.oracles.sharding import ShardingEdge, ShardingNode, build_problem, solve_without_limit
from tieroff.study.sharding.check import check_sharding, count_sharding
from tieroff.study.sharding.problem import FORBIDDEN_COST, ShardingProblem
from tieroff.study.sharding.search import search_sharding

COSTS = st.one_of(st.integers(0, 50), st.just(FORBIDDEN_COST))


@st.composite
def problems(draw: st.DrawFn, most_nodes: int = 10, most_strategies: int = 3) -> ShardingProblem:
    count = draw(st.integers(1, most_nodes))
    nodes = []
    for _ in range(count):
        size = draw(st.integers(1, most_strategies))
        start = draw(st.integers(0, 6))
        costs = draw(st.lists(st.integers(0, 50), min_size=size, max_size=size))
        usages = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
        nodes.append(ShardingNode(costs, usages, start, start + draw(st.integers(0, 5))))
    edges = []
    for a, b in draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=12)):
        size = len(nodes[a].costs) * len(nodes[b].costs)
        edges.append(ShardingEdge(a, b, draw(st.lists(COSTS, min_size=size, max_size=size))))
    return build_problem(nodes, edges, draw(st.integers(0, 40)))


def best_by_trying_all(problem: ShardingProblem, usage_limit: int) -> int | None:
    """Returns the least cost of all choices within the limit; None when there is none."""
    choices = itertools.product(*map(range, np.diff(problem.first_strategy)))
    counts = (count_sharding(problem, choice) for choice in choices)
    fitting = [count.cost for count in counts if count.peak_bytes <= usage_limit and count.cost < FORBIDDEN_COST]
    return min(fitting, default=None)


@settings(max_examples=examples(60))
@given(problems(most_strategies=2))
def test_elimination_finds_what_trying_all_finds(problem: ShardingProblem) -> None:
    found = solve_without_limit(problem)
    assert found.cost == best_by_trying_all(problem, 10**9)
    if found.cost is not None:
        assert count_sharding(problem, found.strategies).cost == found.cost


@settings(max_examples=examples(40))
@given(problems(most_nodes=7))
def test_search_finds_what_trying_all_finds(problem: ShardingProblem) -> None:
    found = search_sharding(problem, time_limit_s=5)
    assert found.cost == best_by_trying_all(problem, problem.usage_limit)
    assert found.is_feasible == (found.cost is not None)
    if found.is_feasible:
        check_sharding(problem, found)


@settings(max_examples=4)
@given(st.randoms(use_true_random=False), st.integers(30, 60))
def test_search_stays_between_its_bound_and_elimination_when_memory_is_ample(random: object, count: int) -> None:
    draw = random.randint  # type: ignore[attr-defined]
    nodes = [ShardingNode([draw(0, 99) for _ in range(4)], [draw(0, 9) for _ in range(4)], n, n + 3) for n in range(count)]
    pairs = [(n, n + 1) for n in range(count - 1)] + [(n, n + 3) for n in range(0, count - 3, 4)]
    edges = [ShardingEdge(a, b, [draw(0, 99) for _ in range(16)]) for a, b in pairs]
    free = build_problem(nodes, edges, 10**6)
    exact = solve_without_limit(free)
    found = search_sharding(free, time_limit_s=1)
    assert found.cost is not None and found.bound is not None and exact.cost is not None
    assert found.bound <= exact.cost <= found.cost
    tight = search_sharding(build_problem(nodes, edges, 12), time_limit_s=1)
    assert tight.is_feasible is (tight.cost is not None)
    if tight.cost is not None:
        assert tight.cost >= exact.cost
        check_sharding(build_problem(nodes, edges, 12), tight)
