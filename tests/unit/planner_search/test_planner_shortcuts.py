"""What the planner computes the short way is what the long way gives: bytes per op, lifetimes kept, totals of drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tieroff import _native
from tieroff.core.lifetime import derive_lifetimes
from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR
from tieroff.core.tensor import Tier
from tieroff.planner.auto.greedy import greedy_selections
from tieroff.planner.auto.portfolio import kept_windows, swept_windows
from tieroff.planner.extended.recompute import remade_problems
from tieroff.planner.problem.assemble import plan_of, totals_of
from tieroff.planner.problem.pieces import fit
from tieroff.planner.problem.problem import Problem, holds_within, make_problem
from tieroff.planner.problem.runs import Draft, draft
from tieroff.planner.simulate.simulator import simulate_totals
from tieroff.study.profiles.files import load_trace
from tieroff.units import TIB

_MACHINE = Machine(
    d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9, nvme_write_bytes_per_s=2 * 10**8, nvme_read_bytes_per_s=3 * 10**8
)
_SPANS = [(0, 3, 5), (2, 4, 7), (4, 4, 9)]


def _problem(project: Path, name: str, share: float) -> Problem:
    trace = load_trace(project / f"tests/data/traces/{name}.json")
    peak = trace.peak_bytes
    budget = {Tier.DEVICE: int(share * peak), Tier.HOST: peak // 4, Tier.NVME: TIB}
    return make_problem(trace, _MACHINE, budget, IDEAL_EXECUTOR)


def test_bytes_are_held_and_dropped_per_op() -> None:
    usage = np.arange(5, dtype=np.int64)
    assert _native.most_bytes(usage, _SPANS) == 3
    assert _native.hold_bytes(usage, _SPANS) == 14
    assert usage.tolist() == [5, 6, 14, 10, 4]
    _native.drop_bytes(usage, _SPANS)
    assert usage.tolist() == [0, 1, 2, 3, 4]
    assert _native.most_bytes(usage, []) == 0


def test_bytes_within_a_limit_stay_and_others_leave_no_trace() -> None:
    usage = np.arange(5, dtype=np.int64)
    assert not holds_within(usage, _SPANS, 13)
    assert usage.tolist() == [0, 1, 2, 3, 4]
    assert holds_within(usage, _SPANS, 14)
    assert usage.tolist() == [5, 6, 14, 10, 4]


@pytest.mark.parametrize("span", [(-1, 2, 1), (3, 2, 1), (0, 6, 1)])
@pytest.mark.parametrize("function", [_native.most_bytes, _native.hold_bytes, _native.drop_bytes])
def test_a_span_outside_the_step_is_refused(function: Callable[..., object], span: tuple[int, int, int]) -> None:
    usage = np.zeros(5, np.int64)
    with pytest.raises(ValueError, match="within the step"):
        function(usage, [(0, 5, 1), span])
    assert not usage.any()


def test_a_sweep_refuses_ticks_outside_the_step() -> None:
    usage, starts = np.zeros(2, np.int64), np.arange(3, dtype=np.int64)
    row = {"tensor": 0, "tier": 0, "start": 0, "release_limit": 0, "deadline": 2, "copy_tick": 0, "size_bytes": 1}
    row |= {"out_ns": 1, "back_ns": 1, "is_boundary": 0, "is_last": 0, "late_limit": 0}
    late = {"is_boundary": 1, "late_limit": 2}
    for changed in (
        late,
        {"late_limit": 1},
        {"is_boundary": 1, "late_limit": -1},
        {"start": 3},
        {"deadline": 3},
        {"tier": 2},
        {"release_limit": 3},
        {"copy_tick": 1},
    ):
        columns = {name: np.array([value], np.int64) for name, value in (row | changed).items()}
        with pytest.raises(ValueError, match="expected"):
            _native.sweep_windows(usage, starts, 1, 0, **columns)


@pytest.mark.parametrize("name", ["cnn", "gpt", "lstm"])
def test_lifetimes_of_a_problem_with_repeats_are_those_of_its_trace(project: Path, name: str) -> None:
    for remade in remade_problems(_problem(project, name, 0.4), 4):
        assert remade.problem.trace.lifetimes == derive_lifetimes(replace(remade.problem.trace))


def _drafts(problem: Problem) -> Iterator[Draft]:
    for selection, lead in greedy_selections(problem):
        swept = swept_windows(problem, kept_windows(problem), selection, 0) if lead == 0.0 else None
        if swept is not None:
            fitted = fit(problem, swept, repair="deepest", passes="LRlr", lead_ns=0, device_bytes=problem.device_bytes)
            drafts = (draft(problem, windows) for windows in (swept, fitted) if windows is not None)
            yield from (drafted for drafted in drafts if drafted is not None)


@pytest.mark.parametrize("share", [0.7, 0.35])
@pytest.mark.parametrize("name", ["cnn", "gpt", "lstm"])
def test_totals_of_a_draft_are_those_of_its_plan(project: Path, name: str, share: float) -> None:
    problem = _problem(project, name, share)
    compared = 0
    for drafted in _drafts(problem):
        totals = simulate_totals(plan_of(problem, "auto", drafted), problem.trace, problem.machine)
        assert totals_of(problem, drafted, (), problem.trace) == totals
        compared += 1
    for remade in remade_problems(problem, 2):
        for drafted in _drafts(remade.problem):
            plan = remade.plan(plan_of(remade.problem, "auto", drafted))
            totals = simulate_totals(plan, problem.trace, problem.machine)
            assert totals_of(remade.problem, drafted, remade.repeats, problem.trace) == totals
            compared += 1
    assert compared


@pytest.mark.parametrize("name", ["cnn", "gpt", "lstm"])
def test_a_draft_has_totals_when_its_plan_is_within_the_budget(project: Path, name: str) -> None:
    problem = _problem(project, name, 0.5)
    for drafted in _drafts(problem):
        peaks = plan_of(problem, "auto", drafted).peak_bytes
        assert all(peaks[tier] <= size for tier, size in problem.budget.items())
        budget = {**problem.budget, Tier.DEVICE: peaks[Tier.DEVICE]}
        assert totals_of(replace(problem, budget=budget), drafted, (), problem.trace) is not None
        budget[Tier.DEVICE] -= 1
        assert totals_of(replace(problem, budget=budget), drafted, (), problem.trace) is None
