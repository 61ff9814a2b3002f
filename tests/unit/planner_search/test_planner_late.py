"""Optimizer state that the last update wrote leaves while the next step begins, where the executor can do that."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.parity.late import late_tensors, plan_late
from tests.property.test_planner_properties import machines, traces
from tests.support.covering import examples
from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.plan import RUNTIME_EXECUTOR, Capabilities, Plan, Residency, Transfer
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.errors import InvalidPlanError
from tieroff.planner.auto.portfolio import plan_auto
from tieroff.planner.problem.problem import make_problem
from tieroff.planner.simulate.simulator import simulate

DEVICE, HOST = Tier.DEVICE, Tier.HOST
_LATE = Capabilities(late_evictions=True)
_STATE = 1
# One byte a nanosecond each way: the state takes 40 ns.
_MACHINE = Machine(name="hand", d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9)
_BUDGET = {DEVICE: 70, HOST: 1000, Tier.NVME: 0}


def _step(
    first_transient_bytes: int = 0, kind: TensorClass = TensorClass.OPTIMIZER, first_reads: tuple[int, ...] = ()
) -> Trace:
    """Returns a step whose last op writes state, for which its second op has no room."""
    ops = (
        Op("first", 100, first_reads, (), transient_bytes=first_transient_bytes),
        Op("second", 100, (), (), transient_bytes=60),
        Op("update", 10, (0, _STATE), (_STATE,)),
    )
    tensors = (
        Tensor("stays", 1, TensorClass.OPTIMIZER, is_persistent=True, is_movable=False),
        Tensor("state", 40, kind, is_persistent=True),
    )
    return Trace(ops, tensors, name="hand")


def _plan(trace: Trace, capabilities: Capabilities) -> Plan:
    plan = plan_auto(make_problem(trace, _MACHINE, _BUDGET, capabilities))
    check(plan, trace, capabilities)
    return plan


def test_state_that_leaves_late_does_not_hold_up_the_end_of_the_step() -> None:
    trace = _step()
    early, late = _plan(trace, Capabilities()), _plan(trace, _LATE)
    assert not late_tensors(early)
    assert late_tensors(late) == {_STATE}
    # Either way it comes back only when the second op is over, and for that the step waits.
    assert simulate(early, trace, _MACHINE).step_ns == 210 + 40 + 40
    assert simulate(late, trace, _MACHINE).step_ns == 210 + 40
    assert Residency(_STATE, DEVICE, 2, 4) in late.residencies
    assert Transfer(_STATE, DEVICE, HOST, 0, 1, 0) in late.transfers


def test_state_leaves_in_its_own_step_where_the_next_one_has_no_room() -> None:
    trace = _step(first_transient_bytes=60)
    late = _plan(trace, _LATE)
    assert not late_tensors(late)
    assert simulate(late, trace, _MACHINE).step_ns == 210 + 40 + 40


def test_late_evictions_need_an_executor_that_can_do_them() -> None:
    trace = _step()
    plan = _plan(trace, _LATE)
    with pytest.raises(InvalidPlanError, match="on the device across the step's end"):
        check(plan, trace, Capabilities())
    check(plan, trace, Capabilities(wraps=True))


def test_only_optimizer_state_leaves_late() -> None:
    trace = _step(kind=TensorClass.PARAMETER)
    assert not late_tensors(_plan(trace, _LATE))
    late = replace(_plan(_step(), _LATE), trace_digest=trace.digest)
    with pytest.raises(InvalidPlanError, match="on the device across the step's end"):
        check(late, trace, _LATE)


def test_state_that_an_op_uses_first_does_not_stay_for_it() -> None:
    trace = _step(first_reads=(_STATE,))
    assert not late_tensors(_plan(trace, _LATE))
    late = replace(_plan(_step(), _LATE), trace_digest=trace.digest)
    with pytest.raises(InvalidPlanError, match="on the device across the step's end"):
        check(late, trace, _LATE)


def test_nothing_comes_to_the_device_across_the_end() -> None:
    trace = _step()
    late = _plan(trace, _LATE)
    load = next(t for t in late.transfers if t.target is DEVICE)
    crossing = replace(load, ready_by=load.issue_at + 2)
    assert crossing.ready_by > late.op_count
    plan = replace(late, transfers=tuple(crossing if t == load else t for t in late.transfers))
    with pytest.raises(InvalidPlanError, match="nothing under way across the end of the step"):
        check(plan, trace, _LATE)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(trace=traces(), machine=machines(), share=st.integers(50, 100))
def test_late_plans_hold_and_are_never_needed_to_fit(trace: Trace, machine: Machine, share: int) -> None:
    can = replace(RUNTIME_EXECUTOR, late_evictions=True, min_bytes=0, granule_bytes=1)
    budget = {DEVICE: max(1, trace.peak_bytes * share // 100), HOST: 10_000}
    for make in (plan_auto, plan_late):
        problem = make_problem(trace, machine, budget, can)
        plan = make(problem)
        fits = plan.peak_bytes[DEVICE] <= budget[DEVICE]
        check(plan if fits else replace(plan, budget_bytes={**plan.budget_bytes, DEVICE: plan.peak_bytes[DEVICE]}), trace, can)
        assert max(simulate(plan, trace, machine).memory[DEVICE]) == plan.peak_bytes[DEVICE]
    early = plan_auto(make_problem(trace, machine, budget, replace(can, late_evictions=False)))
    late = plan_auto(make_problem(trace, machine, budget, can))
    assert (early.peak_bytes[DEVICE] <= budget[DEVICE]) == (late.peak_bytes[DEVICE] <= budget[DEVICE])
