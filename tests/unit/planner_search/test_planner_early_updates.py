"""Updates on the host that begin in backward: when they may, what plans have of them, and what the checker refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR, Capabilities, Plan, Residency
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.errors import InvalidPlanError
from tieroff.planner.auto.floor import plan_floor
from tieroff.planner.auto.portfolio import plan_auto
from tieroff.planner.extended.buckets import find_buckets
from tieroff.planner.extended.host_updates import update
from tieroff.planner.problem.problem import Problem, make_problem
from tieroff.planner.simulate.simulator import simulate

DEVICE, HOST = Tier.DEVICE, Tier.HOST
_MACHINE = Machine(d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9, cpu_update_bytes_per_s=5 * 10**9)
_EARLY = replace(IDEAL_EXECUTOR, wraps=False, splits=False, repeats_ops=False)
_TENSORS = (
    Tensor("w", 10, TensorClass.PARAMETER, is_persistent=True),
    Tensor("a", 100, TensorClass.ACTIVATION),
    Tensor("g", 10, TensorClass.GRADIENT, owner=0),
    Tensor("m", 100, TensorClass.OPTIMIZER, is_persistent=True),
    Tensor("v", 10, TensorClass.PARAMETER, is_persistent=True),
    Tensor("h", 10, TensorClass.GRADIENT, owner=4),
)
# Backward goes on for 50 ns after the update of w; that of v comes after it.
_CASE = Trace(
    (
        Op("data", 20, phase="forward"),
        Op("forward", 50, (0, 4), (1,), phase="forward"),
        Op("backward of w", 50, (0, 1), (2,), phase="backward"),
        Op("update of w", 10, (0, 2, 3), (0, 3), phase="optimizer"),
        Op("backward of v", 25, (1, 4), (5,), phase="backward"),
        Op("backward of a", 25, (1,), (), phase="backward"),
        Op("end", 0),
    ),
    _TENSORS,
)


def _problem(caps: Capabilities = _EARLY) -> Problem:
    return make_problem(_CASE, _MACHINE, {DEVICE: 140, HOST: 1000, Tier.NVME: 0}, caps)


def make_plan_at_its_op(plan: Plan) -> Plan:
    return replace(
        plan,
        transfers=tuple(replace(t, ready_by=3) if t.tensor == 2 else t for t in plan.transfers),
        host_updates=tuple(replace(u, issue_at=3) for u in plan.host_updates),
    )


def test_an_update_in_backward_begins_when_its_gradient_has_arrived_and_holds_up_nothing() -> None:
    """The gradient is there after 10 of the 25 ns of the next op: the CPU begins after that, and nothing waits."""
    plan = plan_auto(_problem())
    check(plan, _CASE, _EARLY)
    (update,) = plan.host_updates
    assert (update.op, update.issue_at, update.duration_ns) == (3, 5, 20)
    (copy,) = (t for t in plan.transfers if t.tensor == 2)
    assert (copy.source, copy.issue_at, copy.ready_by) == (DEVICE, 3, 5)
    assert Residency(2, DEVICE, 2, 5) in plan.residencies  # it outlives its op until it is copied
    assert plan.step_ns == 20 + 50 + 50 + 25 + 25
    at_its_op = make_plan_at_its_op(plan)
    check(at_its_op, _CASE, _EARLY)
    assert simulate(at_its_op, _CASE, _MACHINE).step_ns == plan.step_ns + 10  # the device waits for the copy


def test_without_it_only_what_comes_after_backward_is_updated_on_the_host() -> None:
    late = replace(_EARLY, updates_early=False)
    assert [bucket.op for bucket in find_buckets(_problem())] == [3]
    assert find_buckets(_problem(late)) == []
    assert plan_auto(_problem(late)).host_updates == ()


def _refused(plan: Plan, caps: Capabilities) -> str:
    with pytest.raises(InvalidPlanError) as caught:
        check(plan, _CASE, caps)
    return str(caught.value)


def test_an_executor_that_updates_after_backward_alone_is_given_no_early_update() -> None:
    plan = plan_auto(_problem())
    late = replace(_EARLY, updates_early=False)
    assert "begins updates on the host at their op" in _refused(plan, late)
    at_its_op = make_plan_at_its_op(plan)
    check(at_its_op, _CASE, _EARLY)
    assert "before backward ends" in _refused(at_its_op, late)


def test_an_early_update_before_its_gradient_is_there_is_refused() -> None:
    plan = plan_auto(_problem())
    hasty = replace(plan, host_updates=tuple(replace(u, issue_at=4) for u in plan.host_updates))
    assert "no valid copy in host at the start" in _refused(hasty, _EARLY)
    short = replace(
        plan, residencies=tuple(replace(r, stop=4) if r == Residency(2, DEVICE, 2, 5) else r for r in plan.residencies)
    )
    assert "is not in device from issue until it is awaited" in _refused(short, _EARLY)


def test_an_early_update_is_over_before_backward_uses_its_parameter_again() -> None:
    ops = list(_CASE.ops)
    ops[5] = replace(ops[5], reads=(0, 1))
    trace = replace(_CASE, ops=tuple(ops))
    problem = make_problem(trace, _MACHINE, {DEVICE: 140, HOST: 1000, Tier.NVME: 0}, _EARLY)
    updated = update(problem, find_buckets(problem))
    plan = updated.plan(plan_floor(updated.problem))
    assert plan is not None
    check(plan, trace, _EARLY)
    (run,) = plan.host_updates
    assert (run.op, run.issue_at, run.ready_by) == (3, 4, 5)
