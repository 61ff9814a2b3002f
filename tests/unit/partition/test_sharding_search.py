"""The search for strategies, and the command that runs it."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.oracles.sharding import ShardingEdge, ShardingNode, build_problem, solve_without_limit
from tests.support.outside import outside
from tieroff.cli import app
from tieroff.errors import ConfigError
from tieroff.study.sharding.check import check_sharding
from tieroff.study.sharding.elimination import Factor, eliminate
from tieroff.study.sharding.iopddl import load_problem
from tieroff.study.sharding.problem import FORBIDDEN_COST
from tieroff.study.sharding.search import search_sharding

PUBLISHED = {"A": 6548641531, "C": 84102445260, "K": 2274276676, "M": 49928460991}
"""Cost of the best of 20 teams, by instance of the contest."""


def chain(count: int, limit: int) -> tuple[list[ShardingNode], list[ShardingEdge]]:
    """A chain in which the cheap strategies hold much."""
    nodes = [ShardingNode([0, 10 + n % 7, 30], [limit, limit // 3, 1], n, n + 2) for n in range(count)]
    edges = [ShardingEdge(n, n + 1, [0, 5, 9, 5, 0, 5, 9, 5, 0]) for n in range(count - 1)]
    return nodes, edges


def test_search_keeps_the_limit_where_the_cheapest_does_not() -> None:
    problem = build_problem(*chain(200, 90), 100)
    free = solve_without_limit(problem)
    assert not free.is_feasible and free.cost == 0
    # Only neighbours are held together, so that the limit can be told by their edges too, and elimination is exact.
    nodes, edges = chain(200, 90)
    pairs = list(itertools.product(nodes[0].usages, repeat=2))
    allowed = [cost if a + b <= 100 else FORBIDDEN_COST for cost, (a, b) in zip(edges[0].costs, pairs, strict=True)]
    exact = solve_without_limit(build_problem(nodes, [ShardingEdge(e.source, e.target, allowed) for e in edges], 10**6))
    found = search_sharding(problem, time_limit_s=2)
    assert found.is_feasible and found.cost is not None and found.bound is not None and exact.cost is not None
    check_sharding(problem, found)
    assert 0 < found.bound <= exact.cost <= found.cost <= 1.01 * exact.cost


def test_search_stops_when_its_bound_is_met() -> None:
    problem = build_problem(*chain(200, 90), 10**6)
    begun = time.monotonic()
    found = search_sharding(problem, time_limit_s=60)
    assert (found.cost, found.is_feasible) == (0, True)
    assert time.monotonic() - begun < 30


def test_search_proves_that_nothing_fits() -> None:
    problem = build_problem([ShardingNode([1, 2], [7, 8], 0, 1), ShardingNode([1], [7], 0, 1)], [], 13)
    found = search_sharding(problem, time_limit_s=5)
    assert (found.strategies, found.cost, found.bound, found.is_feasible) == ((), None, None, False)


def test_search_proves_that_nothing_is_allowed() -> None:
    nodes = [ShardingNode([1, 2], [0, 0]), ShardingNode([1], [0])]
    found = search_sharding(build_problem(nodes, [ShardingEdge(0, 1, [FORBIDDEN_COST] * 2)], 13), time_limit_s=5)
    assert not found.is_feasible and found.bound is None


def test_search_refuses_a_time_limit_of_nothing() -> None:
    with pytest.raises(ConfigError, match="time limit above 0"):
        search_sharding(build_problem([ShardingNode([1], [1])], [], 1), time_limit_s=0)


def test_elimination_names_a_graph_that_is_too_dense() -> None:
    import numpy as np

    pairs = [Factor((a, b), np.zeros((10, 10))) for a in range(9) for b in range(a)]
    with pytest.raises(ConfigError, match="too dense"):
        eliminate([10] * 9, pairs, entries_max=10**6)


def test_command_prints_one_document(tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    edge = {"nodes": [[0, 1]], "costs": [[9, 1, 1, 9]]}
    nodes = {"intervals": [[0, 2], [0, 2]], "costs": [[1, 2], [3, 4]], "usages": [[5, 6], [7, 8]]}
    path.write_text(json.dumps({"problem": {"name": "p", "nodes": nodes, "edges": edge, "usage_limit": 13}}))
    done = CliRunner().invoke(app, ["partition", "--problem", str(path), "--time-limit", "5", "--json"])
    assert done.exit_code == 0, done.output
    # 1 + 4 + 1 holds 5 + 8 and costs 6; 2 + 3 + 1 holds 6 + 7 and costs 6 too.
    document = json.loads(done.stdout)
    assert sorted(document) == ["bound", "cost", "is_feasible", "strategies"]
    assert (document["cost"], document["bound"], document["is_feasible"]) == (6, 6.0, True)
    assert document["strategies"] in ([0, 1], [1, 0])


def test_command_prints_a_table_for_people(tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    nodes = {"intervals": [[0, 2]], "costs": [[1, 2]], "usages": [[5, 6]]}
    document = {"problem": {"name": "p", "nodes": nodes, "edges": {"nodes": [], "costs": []}, "usage_limit": 4}}
    path.write_text(json.dumps(document))
    done = CliRunner().invoke(app, ["partition", "--problem", str(path), "--time-limit", "5"])
    assert done.exit_code == 0 and "nothing found" in done.stdout


def test_command_says_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["partition", "--problem", str(tmp_path / "none.json"), "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["error"]["type"] == "ConfigError"


@pytest.mark.parametrize(
    "instance",
    [pytest.param(name, marks=pytest.mark.long if name == "A" else pytest.mark.published) for name in sorted(PUBLISHED)],
)
def test_search_is_near_the_best_published(instance: str) -> None:
    problem = load_problem(outside(f"iopddl/asplos-2025-iopddl-{instance}.json.gz"))
    found = search_sharding(problem, time_limit_s=40)
    assert found.is_feasible and found.cost is not None and found.bound is not None
    check_sharding(problem, found)
    # Published and proven by others: https://github.com/asplos-contest/2025.
    assert found.cost <= 1.005 * PUBLISHED[instance]
    assert found.bound >= 0.85 * found.cost
