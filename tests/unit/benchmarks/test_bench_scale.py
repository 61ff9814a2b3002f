"""Planning of large steps: the benchmark's traces, its row, and how the work grows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bench_scale
from tieroff.core.check.plan import check
from tieroff.core.lifetime import Gap
from tieroff.core.plan import IDEAL_EXECUTOR, RUNTIME_EXECUTOR
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.trace import validate
from tieroff.planner.auto import greedy
from tieroff.planner.auto.greedy import candidate_count
from tieroff.planner.auto.select import Score, Selector
from tieroff.planner.extended.recompute import OpenGaps
from tieroff.planner.make_plan import make_plan
from tieroff.planner.problem.problem import LowerRoom, Problem, held_bytes, make_problem
from tieroff.planner.simulate.simulator import simulate, simulate_totals


def problem_of(tensor_count: int, executor: str = "runtime", effort: str = "fast") -> Problem:
    trace = bench_scale.make_trace(tensor_count)
    budget = {Tier.DEVICE: trace.peak_bytes // 2, Tier.HOST: trace.peak_bytes, Tier.NVME: trace.peak_bytes}
    return make_problem(trace, bench_scale.MACHINE, budget, bench_scale.EXECUTORS[executor], effort)


def test_trace_has_64_tensors_and_40_ops_a_layer() -> None:
    trace = bench_scale.make_trace(1_000)
    validate(trace)
    layers = (1_000 - 2) // 64
    assert (len(trace.tensors), len(trace.ops)) == (64 * layers + 2, 40 * layers + 2)
    assert len({tensor.name for tensor in trace.tensors}) == len(trace.tensors)
    used = {index for op in trace.ops for index in (*op.reads, *op.writes)}
    assert used == set(range(len(trace.tensors)))
    gradients = [tensor for tensor in trace.tensors if tensor.kind is TensorClass.GRADIENT]
    assert all(trace.tensors[tensor.owner].kind is TensorClass.PARAMETER for tensor in gradients)


def test_trace_of_every_size_has_the_same_layers() -> None:
    small, large = bench_scale.make_trace(66), bench_scale.make_trace(2_000)
    assert [op.duration_ns for op in small.ops[1:11]] == [op.duration_ns for op in large.ops[1:11]]
    assert len(small.tensors) == 66


def test_benchmark_writes_a_row_per_trace_and_says_where_it_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scale.json"
    assert bench_scale.main(["--tensors", "100", "1000", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["command"] == f"python benchmarks/bench_scale.py --tensors 100 1000 --json {path}"
    assert document["machine"]["name"] == bench_scale.MACHINE.name
    assert {"date", "kernel", "processor", "cores", "python", "effort"} <= document.keys()
    assert [row["tensor_count"] for row in document["rows"]] == [66, 962]
    assert "962" in capsys.readouterr().out
    for row in document["rows"]:
        assert row["share"] == 0.5
        assert row["peak_bytes"] > row["memory_bytes"]
        assert row["cpu_s"] > 0
        assert row["wall_s"] > 0
        assert row["step_s"] >= row["ideal_s"]
        assert row["transfer_count"] > 0
    assert document["rows"][-1]["memory_bytes"] > 0  # a plan of a thousand tensors does not fit into what lay free


def test_table_names_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    bench_scale.show([bench_scale.Row(49_986, 31_242, "runtime", 0.5, 1.0, 2.0, 2**30, 2**31, 7, 3.0, 2.0)])
    line = next(line for line in capsys.readouterr().out.splitlines() if "49,986" in line)
    assert "31,242" in line and "1.500" in line


@pytest.mark.parametrize("arguments", [["--tensors", "10"], ["--share", "0"], ["--share", "0.5", "1.5"]])
def test_option_out_of_range_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench_scale.parse_arguments(arguments)
    assert caught.value.code == 2
    assert "expected" in capsys.readouterr().err


# How the work grows.


@pytest.mark.parametrize("effort", ["fast", "high"])
def test_work_of_all_candidates_does_not_grow_with_a_large_step(effort: str) -> None:
    small, *larger = [problem_of(count, effort=effort) for count in (5_000, 10_000, 20_000)]
    work = [candidate_count(p) * (p.op_count + len(p.units)) for p in (small, *larger)]
    assert work[0] >= work[1] >= work[2]
    assert candidate_count(problem_of(1_000, effort=effort)) >= 3 * len(greedy.CHOICES)


def test_one_candidate_is_tried_for_a_very_large_step() -> None:
    problem = problem_of(1_000)
    large = replace(problem, units=problem.units * 100)
    assert candidate_count(large) == 1


@pytest.mark.parametrize("score", [Score.TIME, Score.SLACK])
def test_each_unit_is_looked_at_once_where_its_value_does_not_change(score: Score, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(1_000)
    looks: list[int] = []
    rank = Selector.rank

    def noting(self: Selector, score: Score, position: int) -> Any:
        looks.append(position)
        return rank(self, score, position)

    monkeypatch.setattr(Selector, "rank", noting)
    assert Selector(problem).choose(score, problem.device_bytes, problem.tiers) is not None
    assert looks == list(range(len(problem.units)))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("reluctance", [1.0, 4.0])
@pytest.mark.parametrize("score", [Score.TIME, Score.SLACK])
def test_choice_in_one_pass_is_that_of_the_best_value_each_time(score: Score, reluctance: float, share: float) -> None:
    problem = problem_of(300)
    selector = Selector(problem)
    line = int(problem.base.max() + share * (problem.live.max() - problem.base.max()))
    usage, chosen = problem.live.copy(), []
    persistent = [problem.trace.tensors[unit.tensors[0]].is_persistent for unit in problem.units]
    while (usage > line).any():
        over = np.maximum(usage - line, 0)
        values = [selector.value(score, p, over) / (reluctance if persistent[p] else 1.0) for p in range(len(problem.units))]
        best = max((p for p in range(len(values)) if p not in chosen), key=lambda p: (values[p], -p))
        assert values[best] > 0
        chosen.append(best)
        for slot in problem.units[best].slots:
            for start, stop in slot.pieces(problem.op_count):
                usage[start:stop] -= problem.size_bytes(slot.tensor)
    found = selector.choose(score, line, problem.tiers, reluctance)
    assert found is not None
    assert found[0] == [problem.units[p] for p in chosen]
    assert np.array_equal(found[1], usage)


def test_open_gaps_close_one_by_one() -> None:
    first, second = Gap(3, 2, 5, False, 1), Gap(3, 7, 9, False, 6)
    gaps = OpenGaps([first, second])
    assert gaps.around(3, 2) == [first]
    assert [gaps.is_away(tick, 3) for tick in (1, 4, 5, 8, 9)] == [False, True, False, True, False]
    assert not gaps.is_away(4, 2)
    gaps.close(gaps.around(3, 4))
    assert not gaps.has(first)
    assert gaps.has(second)


@pytest.mark.parametrize("executor", ["runtime", "ideal"])
def test_plan_of_five_thousand_tensors_is_valid_and_within_its_budget(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one candidate, as on steps ten times as large."""
    monkeypatch.setitem(greedy.WORK, "fast", 1)
    trace = bench_scale.make_trace(5_000)
    budget = {Tier.DEVICE: trace.peak_bytes // 2, Tier.HOST: trace.peak_bytes // 2, Tier.NVME: 2 * trace.peak_bytes}
    capabilities = {"runtime": RUNTIME_EXECUTOR, "ideal": IDEAL_EXECUTOR}[executor]
    plan = make_plan(trace, bench_scale.MACHINE, budget, capabilities=capabilities)
    check(plan, trace, capabilities)
    assert all(plan.peak_bytes[tier] <= size for tier, size in budget.items())
    assert plan.step_ns >= trace.ideal_ns


# What large steps need to be quick says the same as looking at every op does.


def spans_of(problem: Problem, seed: int) -> list[tuple[int, int, int]]:
    random = np.random.default_rng(seed)
    n = problem.op_count
    starts = random.integers(0, n, 200)
    lengths = random.integers(0, n + 1, 200)
    return [(int(a), int(a + b), int(random.integers(1, 10**6))) for a, b in zip(starts, lengths, strict=True)]


def test_held_bytes_are_the_sum_of_all_spans_round_the_ring() -> None:
    problem = problem_of(100)
    n = problem.op_count
    spans = spans_of(problem, 0)
    expected = np.zeros(n, np.int64)
    for start, stop, size in spans:
        for op in range(start, stop):
            expected[op % n] += size
    assert np.array_equal(held_bytes(spans, n), expected)
    assert np.array_equal(held_bytes([], n), np.zeros(n, np.int64))


@pytest.mark.parametrize("share", [0.1, 0.4, 2.0])
def test_lower_room_places_what_fits_at_every_op(share: float) -> None:
    problem = problem_of(500)
    total = sum(problem.room_bytes(tensor) for unit in problem.units for tensor in unit.tensors)
    problem = replace(
        problem, budget={**problem.budget, Tier.HOST: int(share * total) // 2, Tier.NVME: int(share * total) // 4}
    )
    room, free = LowerRoom(problem), {tier: np.full(problem.op_count, problem.budget[tier]) for tier in problem.tiers}
    tier_of: dict[int, Tier] = {}
    for position in np.random.default_rng(1).permutation(len(problem.units)).tolist():
        tensors = [tensor for tensor in problem.units[position].tensors if tensor not in tier_of]
        for tier in problem.tiers if tensors else ():
            left = free[tier].copy()
            for tensor in tensors:
                start, stop = problem.lower_interval(tensor)
                left[start:stop] -= problem.room_bytes(tensor)
            if left.min() >= 0:
                free[tier] = left
                tier_of.update(dict.fromkeys(tensors, tier))
                break
        expected = all(tensor in tier_of for tensor in problem.units[position].tensors)
        assert room.place(problem.units[position].tensors, problem.tiers) == expected
    assert room.tier_of == tier_of
    assert (share < 1.0) == (len(tier_of) < len({tensor for unit in problem.units for tensor in unit.tensors}))


@pytest.mark.parametrize("executor", ["runtime", "ideal"])
def test_totals_of_a_plan_are_those_of_its_timeline(executor: str) -> None:
    trace = bench_scale.make_trace(300)
    budget = {Tier.DEVICE: trace.peak_bytes // 2, Tier.HOST: trace.peak_bytes // 4, Tier.NVME: trace.peak_bytes}
    plan = make_plan(trace, bench_scale.MACHINE, budget, capabilities=bench_scale.EXECUTORS[executor])
    timeline = simulate(plan, trace, bench_scale.MACHINE)
    assert plan.transfers
    assert simulate_totals(plan, trace, bench_scale.MACHINE) == (timeline.step_ns, timeline.moved_bytes, len(plan.transfers))
