"""The problem type, its reader and its checker."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.oracles.sharding import ShardingEdge, ShardingNode, build_problem
from tests.support.outside import outside
from tieroff.errors import ConfigError, InvalidPlanError
from tieroff.study.sharding.check import check_sharding, count_sharding
from tieroff.study.sharding.iopddl import load_problem
from tieroff.study.sharding.problem import FORBIDDEN_COST, ShardingPlan, ShardingProblem

DOCUMENT: dict[str, Any] = {
    "problem": {
        "name": "two nodes",
        "nodes": {"intervals": [[0, 4], [2, 6]], "costs": [[1, 2], [3, 4, 5]], "usages": [[10, 20], [30, 5, 7]]},
        "edges": {"nodes": [[0, 1]], "costs": [[100, 200, 300, 400, 500, FORBIDDEN_COST]]},
        "usage_limit": 30,
    }
}


def two_nodes() -> ShardingProblem:
    nodes = [ShardingNode([1, 2], [10, 20], 0, 4), ShardingNode([3, 4, 5], [30, 5, 7], 2, 6)]
    return build_problem(nodes, [ShardingEdge(0, 1, [100, 200, 300, 400, 500, FORBIDDEN_COST])], 30)


def test_count_is_that_of_paper_and_pencil() -> None:
    count = count_sharding(two_nodes(), [1, 0])
    assert count.cost == 2 + 3 + 400
    assert (count.peak_bytes, count.peak_at) == (20 + 30, 2)
    assert count_sharding(two_nodes(), [0, 1]).peak_bytes == 15


def test_intervals_are_half_open() -> None:
    nodes = [ShardingNode([0], [10], 0, 4), ShardingNode([0], [10], 4, 6), ShardingNode([0], [99], 5, 5)]
    assert count_sharding(build_problem(nodes, [], 10), [0, 0, 0]).peak_bytes == 10


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        (ShardingPlan((0, 1), 204, 0.0, True), "cost is counted"),
        (ShardingPlan((0, 0), 104, 0.0, True), "memory stays within the limit"),
        (ShardingPlan((0, 1), 205, 0.0, False), "memory stays within the limit"),
        (ShardingPlan((0, 1), 205, 206.0, True), "a bound is below the cost"),
        (ShardingPlan((1, 2), FORBIDDEN_COST + 7, 0.0, True), "choices are allowed"),
        (ShardingPlan((0,), 1, 0.0, True), "one strategy per node"),
        (ShardingPlan((0, 3), 1, 0.0, True), "strategies exist"),
        (ShardingPlan((-1, 0), 1, 0.0, True), "strategies exist"),
    ],
)
def test_a_wrong_plan_is_refused_by_rule(plan: ShardingPlan, rule: str) -> None:
    with pytest.raises(InvalidPlanError) as told:
        check_sharding(two_nodes(), plan)
    assert told.value.rule == rule


def test_a_right_plan_passes() -> None:
    assert check_sharding(two_nodes(), ShardingPlan((0, 1), 205, 205.0, True)).cost == 205


@pytest.mark.parametrize("is_packed", [False, True])
def test_reader_gives_the_problem_of_the_file(tmp_path: Path, is_packed: bool) -> None:
    data = json.dumps(DOCUMENT).encode()
    path = tmp_path / "problem.json"
    path.write_bytes(gzip.compress(data) if is_packed else data)
    problem = load_problem(path)
    assert (problem.name, problem.usage_limit, problem.node_count) == ("two nodes", 30, 2)
    for name in ("first_strategy", "cost", "usage", "start", "stop", "source", "target", "first_entry", "entry"):
        assert getattr(problem, name).tolist() == getattr(two_nodes(), name).tolist(), name


def changed(**parts: Any) -> dict[str, Any]:
    return {"problem": {**DOCUMENT["problem"], **parts}}


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({}, "'problem' is missing"),
        (changed(nodes={"intervals": [[0, 1]]}), "'costs' is missing"),
        (changed(edges={"nodes": [[0, 1]], "costs": [[1, 2, 3]]}), "a cost for every pair"),
        (changed(edges={"nodes": [[0, 2]], "costs": [[1, 2]]}), "edges between nodes that are there"),
        (changed(nodes={"intervals": [[0, 1]], "costs": [[]], "usages": [[]]}), "one strategy|index"),
        (changed(nodes={"intervals": [[0, 1]], "costs": [[1]], "usages": [[1, 2]]}), "differ in length"),
        ([], "list indices"),
    ],
)
def test_reader_says_what_is_wrong(tmp_path: Path, document: Any, told: str) -> None:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=told):
        load_problem(path)


def test_reader_names_a_file_that_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "problem.json.gz"
    path.write_bytes(gzip.compress(json.dumps(DOCUMENT).encode())[:-20])
    with pytest.raises(ConfigError, match=r"problem\.json\.gz"):
        load_problem(path)


def test_count_of_the_contests_example_is_its_evaluators() -> None:
    problem = load_problem(outside("iopddl/example.json"))
    count = count_sharding(problem, [0, 0, 2, 1, 0])
    # By the contest's definition: nodes 15 + 55 + 35 + 75 + 95, edges 30 + 40 + 10 + 30 + 60; at 50 and at 110 the
    # nodes 0, 1, 2 (10 + 25 + 15) and 2, 3, 4 (15 + 10 + 15) are held.
    assert count.cost == 445
    assert (count.peak_bytes, count.peak_at) == (50, 50)


def test_a_problem_has_no_usage_below_0() -> None:
    with pytest.raises(ConfigError, match="usages at or above 0"):
        replace(two_nodes(), usage=-two_nodes().usage)
