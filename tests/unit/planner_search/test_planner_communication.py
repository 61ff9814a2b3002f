"""Steps with communication beside compute, at random: plans are valid, both simulators agree, bounds hold."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.property.test_planner_properties import machines, traces
from tests.support.covering import examples
from tests.support.oracles.simulate import simulate_reference
from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR, RUNTIME_EXECUTOR, Capabilities
from tieroff.core.tensor import Tier
from tieroff.core.trace import Queue, Trace, validate, with_waits
from tieroff.errors import InfeasiblePlanError
from tieroff.planner.bounds.bounds import lower_bound_ns, relaxed_bound_ns, rests_ns, scope_of
from tieroff.planner.make_plan import make_plan
from tieroff.planner.policies import all_policies
from tieroff.planner.problem.problem import live_bytes, make_problem
from tieroff.planner.simulate.simulator import simulate

_settings = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
_RUNTIME = replace(RUNTIME_EXECUTOR, min_bytes=0, granule_bytes=1)


@st.composite
def communicating(draw: st.DrawFn) -> Trace:
    """Returns a trace of which some ops are communication, awaited where their data is needed or sooner."""
    trace = draw(traces())
    chosen = draw(st.sets(st.integers(0, len(trace.ops) - 1), min_size=1, max_size=5))
    ops = with_waits(
        replace(op, queue=Queue.COMMUNICATION, transient_bytes=0) if index in chosen else op
        for index, op in enumerate(trace.ops)
    )
    early = draw(st.sets(st.integers(0, len(ops) - 1), max_size=2))
    ops = tuple(
        replace(op, awaits=max([op.awaits, *(i for i in chosen if i < index)]))
        if index in early and op.queue is Queue.COMPUTE
        else op
        for index, op in enumerate(ops)
    )
    trace = replace(trace, ops=ops)
    validate(trace)
    return trace


@st.composite
def cases(draw: st.DrawFn) -> tuple[Trace, dict[Tier, int]]:
    """Returns such a trace, and budgets of which the device's lies between hopeless and ample."""
    trace = draw(communicating())
    peak = int(live_bytes(trace).max())
    device = max(1, peak * draw(st.integers(50, 100)) // 100)
    return trace, {Tier.DEVICE: device, Tier.HOST: draw(st.sampled_from((10_000, 300))), Tier.NVME: 10_000}


@pytest.mark.parametrize("capabilities", [_RUNTIME, IDEAL_EXECUTOR], ids=["runtime", "ideal"])
@pytest.mark.parametrize("policy", ["floor", "auto"])
@_settings
@given(case=cases(), machine=machines())
def test_plan_beside_communication_is_valid_and_no_faster_than_the_bounds(
    policy: str, capabilities: Capabilities, case: tuple[Trace, dict[Tier, int]], machine: Machine
) -> None:
    trace, budget = case
    try:
        plan = make_plan(trace, machine, budget, policy, capabilities=capabilities)
    except InfeasiblePlanError:
        return
    check(plan, trace, capabilities)
    timeline = simulate(plan, trace, machine)
    assert timeline == simulate_reference(plan, trace, machine)
    if not timeline.is_periodic:
        return
    problem, scope = make_problem(trace, machine, budget, capabilities), scope_of(plan)
    assert lower_bound_ns(problem, scope) <= timeline.step_ns
    assert relaxed_bound_ns(problem, scope, slot_counts=(4,)) <= timeline.step_ns


@_settings
@given(case=cases(), machine=machines(), data=st.data())
def test_every_policy_plans_beside_communication_or_says_why_not(
    case: tuple[Trace, dict[Tier, int]], machine: Machine, data: st.DataObject
) -> None:
    trace, budget = case
    policy = data.draw(st.sampled_from(sorted(set(all_policies()) - {"auto"})))
    try:
        plan = make_plan(trace, machine, budget, policy, capabilities=IDEAL_EXECUTOR)
    except InfeasiblePlanError:
        return
    check(plan, trace, IDEAL_EXECUTOR)


@_settings
@given(trace=communicating())
def test_time_before_and_after_an_op_is_never_more_than_the_step(trace: Trace) -> None:
    problem = make_problem(trace, Machine(), {}, Capabilities())
    rests = rests_ns(problem)
    assert rests[0] == problem.starts_ns[-1] == trace.ideal_ns
    assert (problem.starts_ns + rests <= trace.ideal_ns).all()
    longest = max(sum(trace.compute_ns), sum(trace.ops[index].duration_ns for index in trace.communication))
    assert longest <= trace.ideal_ns <= sum(op.duration_ns for op in trace.ops)


@_settings
@given(case=cases(), machine=machines())
def test_communication_that_is_awaited_at_once_takes_as_long_as_compute(
    case: tuple[Trace, dict[Tier, int]], machine: Machine
) -> None:
    trace, budget = case
    awaited = [
        replace(op, awaits=index - 1) if index - 1 in trace.communication and op.queue is Queue.COMPUTE else op
        for index, op in enumerate(trace.ops)
    ]
    # Of two that follow each other the first is not awaited at once.
    pairs = itertools.pairwise(range(len(awaited)))
    if any(awaited[a].queue is awaited[b].queue is Queue.COMMUNICATION for a, b in pairs):
        return
    trace = replace(trace, ops=tuple(awaited))
    assert all(map(trace.blocks, trace.communication))
    alone = replace(trace, ops=tuple(replace(op, queue=Queue.COMPUTE, awaits=-1) for op in awaited))
    assert trace.ideal_ns == alone.ideal_ns
    try:
        plan = make_plan(trace, machine, budget, "floor", capabilities=IDEAL_EXECUTOR)
    except InfeasiblePlanError:
        return
    timelines = simulate(plan, trace, machine), simulate(replace(plan, trace_digest=alone.digest), alone, machine)
    assert timelines[0].step_ns == timelines[1].step_ns
    problems = [make_problem(each, machine, budget, IDEAL_EXECUTOR) for each in (trace, alone)]
    bounds = [relaxed_bound_ns(problem, scope_of(plan), slot_counts=(4,)) for problem in problems]
    assert bounds[0] == bounds[1]
