"""Bounds on random traces, machines, budgets and executors: no plan of any policy is below one, whatever the prices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from tests.property.oracle import optimum
from tests.property.test_planner_properties import cases, machines
from tests.support.covering import examples
from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR, Capabilities, Plan
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.errors import InfeasiblePlanError
from tieroff.planner.bounds.bounds import Scope, lower_bound_ns, relaxed_bound_ns, scope_of
from tieroff.planner.bounds.relaxation import Relaxation, check_points, group_tensors, movable_tensors
from tieroff.planner.make_plan import make_plan
from tieroff.planner.policies import all_policies
from tieroff.planner.problem.problem import Problem, make_problem
from tieroff.planner.simulate.simulator import simulate

_Case = tuple[Trace, dict[Tier, int]]
_settings = settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    print_blob=True,
)


@st.composite
def executors(draw: st.DrawFn) -> Capabilities:
    """Returns the ideal executor, or one that lacks some of what it can do."""
    return replace(
        IDEAL_EXECUTOR,
        tiers=draw(st.sampled_from(((Tier.HOST, Tier.NVME), (Tier.HOST, Tier.NVME), (Tier.HOST,), (Tier.NVME,)))),
        wraps=draw(st.sampled_from((True, True, True, False))),
        splits=draw(st.booleans()),
        gradient_follows_parameter=draw(st.sampled_from((False, False, True))),
        min_bytes=draw(st.sampled_from((0, 0, 30))),
        granule_bytes=draw(st.sampled_from((1, 1, 16))),
    )


def problem_of(case: _Case, machine: Machine, caps: Capabilities) -> Problem:
    """Returns the problem of a case."""
    return make_problem(case[0], machine, case[1], caps)


def plan_of(case: _Case, machine: Machine, policy: str, caps: Capabilities) -> Plan | None:
    """Returns a policy's plan, None where it finds none."""
    try:
        return make_plan(case[0], machine, case[1], policy, capabilities=caps)
    except InfeasiblePlanError:
        return None


@pytest.mark.parametrize("policy", all_policies())
@settings(_settings, max_examples=examples(40))
@given(case=cases(), machine=machines(), caps=executors())
def test_every_plan_is_valid_within_its_tiers_and_above_every_bound(
    policy: str, case: _Case, machine: Machine, caps: Capabilities
) -> None:
    plan = plan_of(case, machine, policy, caps)
    if plan is None:
        return
    trace, budget = case
    check(plan, trace, caps)
    timeline = simulate(plan, trace, machine)
    for tier, line in timeline.memory.items():
        assert max(line) <= (budget[tier] if tier is Tier.DEVICE or tier in caps.tiers else 0)
    problem = problem_of(case, machine, caps)
    if problem.fits and policy in ("auto", "greedy", "relaxed"):
        assert plan.moves_nothing and plan.step_ns == trace.ideal_ns
    assert plan == plan_of(case, machine, policy, caps)
    event("moves nothing" if plan.moves_nothing else f"moves, periodic {timeline.is_periodic}")
    scope = scope_of(plan)
    if timeline.is_periodic:
        assert plan.step_ns >= lower_bound_ns(problem, scope)
        for count in (1, 3, 20):
            assert plan.step_ns >= relaxed_bound_ns(problem, scope, slot_counts=(count,))


def relaxation_of(problem: Problem, slot_count: int) -> Relaxation | None:
    """Returns the program behind the bound, None where nothing is idle at a check point."""
    points = check_points(problem, slot_count)
    groups = group_tensors(problem, points)
    return Relaxation(problem, points, groups, device_bytes=problem.device_bytes) if groups else None


@_settings
@given(case=cases(), machine=machines(), caps=executors(), slot_count=st.integers(1, 12), seed=st.integers(0, 2**32 - 1))
def test_bound_holds_for_any_prices(case: _Case, machine: Machine, caps: Capabilities, slot_count: int, seed: int) -> None:
    plan = plan_of(case, machine, "floor", caps)
    problem = problem_of(case, machine, caps)
    relaxation = relaxation_of(problem, slot_count) if problem.units else None
    assume(plan is not None and relaxation is not None and not problem.fits)
    assert plan is not None and relaxation is not None
    if any(not life.required for life in case[0].lifetimes) or not simulate(plan, case[0], machine).is_periodic:
        return
    rng = np.random.default_rng(seed)
    for scale in (0.01, 1.0, 100.0):
        prices = rng.random(relaxation.row_count) * (rng.random(relaxation.row_count) < 0.5) * scale
        assert relaxation.bound_of(prices) <= plan.step_ns
    if relaxation.solve():
        event("solved")
        assert relaxation.solution is not None
        for prices in (relaxation.solution.prices, relaxation.solution.prices * rng.random(relaxation.row_count)):
            assert relaxation.bound_of(prices) <= plan.step_ns


@st.composite
def tiny_cases(draw: st.DrawFn) -> tuple[_Case, Machine]:
    """Returns a case that is over the budget and feasible on the whole, with two or three tensors that may move."""
    op_count = draw(st.integers(3, 6))
    tensors = []
    reads: list[set[int]] = [set() for _ in range(op_count)]
    writes: list[set[int]] = [set() for _ in range(op_count)]
    for index in range(draw(st.integers(2, 3))):
        kind = draw(st.sampled_from((TensorClass.ACTIVATION, TensorClass.PARAMETER)))
        uses = draw(st.sets(st.integers(0, op_count - 1), min_size=1, max_size=2))
        for use in uses:
            reads[use].add(index)
        for use in draw(st.sets(st.integers(0, op_count - 1), max_size=1)):
            writes[use].add(index)
        until = draw(st.sampled_from((-1, -1, op_count)))
        size = draw(st.integers(20, 100))
        tensors.append(Tensor(f"t{index}", size, kind, kind is TensorClass.PARAMETER, lives_until=until))
    ops = tuple(
        Op(
            f"op{i}",
            draw(st.integers(0, 30)),
            tuple(sorted(reads[i])),
            tuple(sorted(writes[i])),
            transient_bytes=draw(st.sampled_from((0, 30))),
            phase="optimizer" if i == op_count - 1 else "",
        )
        for i in range(op_count)
    )
    trace, machine = Trace(ops, tuple(tensors)), draw(machines())
    lower = {Tier.HOST: draw(st.sampled_from((1000, 1000, 100, 0))), Tier.NVME: draw(st.sampled_from((1000, 60, 0)))}
    whole = make_problem(trace, machine, {Tier.DEVICE: 1, Tier.HOST: 1000}, IDEAL_EXECUTOR)
    least, most = int(whole.base.max()), int(whole.live.max())
    assume(least < most)
    return (trace, {Tier.DEVICE: draw(st.integers(least, most - 1)), **lower}), machine


_TINY = replace(IDEAL_EXECUTOR, splits=False)


@settings(_settings, max_examples=examples(50))
@given(case=tiny_cases(), repeats=st.booleans(), update_ns=st.sampled_from((None, 0, 10)))
def test_no_bound_is_above_the_optimum(case: tuple[_Case, Machine], repeats: bool, update_ns: int | None) -> None:
    problem = problem_of(case[0], case[1], _TINY)
    assume(problem.units)
    best = optimum(problem, movable_tensors(problem), with_repeats=repeats, update_ns=update_ns, most=1500)
    assume(best is not None)
    assert best is not None
    event(f"optimum with {scope_of(best.plan)}")
    scope = Scope(repeats, update_ns is not None)
    assert lower_bound_ns(problem, scope) <= best.step_ns
    for count in (1, 2, 20):
        assert relaxed_bound_ns(problem, scope, slot_counts=(count,)) <= best.step_ns


@settings(_settings, max_examples=15)
@given(case=tiny_cases())
def test_auto_is_not_below_the_optimum(case: tuple[_Case, Machine]) -> None:
    (trace, budget), machine = case
    caps = replace(_TINY, repeats_ops=False, updates_on_host=False)
    problem = problem_of(case[0], machine, caps)
    assume(problem.units)
    best = optimum(problem, movable_tensors(problem), most=1500)
    assume(best is not None)
    assert best is not None
    plan = make_plan(trace, machine, budget, capabilities=caps)
    event("the optimum" if plan.step_ns == best.step_ns else "above the optimum")
    assert plan.step_ns >= best.step_ns
