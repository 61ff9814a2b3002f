"""What plans of the published policies for activations must hold on random traces, under both executors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.property.test_planner_properties import machines, traces
from tests.support.covering import examples
from tieroff.core.check.plan import check
from tieroff.core.plan import IDEAL_EXECUTOR, RUNTIME_EXECUTOR, Plan
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.planner.problem.problem import Problem, make_problem
from tieroff.planner.simulate.simulator import simulate
from tieroff.study.policies.activations.capuchin import plan_capuchin
from tieroff.study.policies.activations.flashneuron import plan_flashneuron
from tieroff.study.policies.activations.ssdtrain import plan_ssdtrain
from tieroff.study.policies.activations.tflms import plan_tflms
from tieroff.study.policies.activations.vdnn import plan_vdnn_all, plan_vdnn_conv, plan_vdnn_dyn
from tieroff.study.policies.online.sentinel import plan_sentinel
from tieroff.units import MIB

POLICIES = (
    plan_vdnn_all,
    plan_vdnn_conv,
    plan_vdnn_dyn,
    plan_tflms,
    plan_flashneuron,
    plan_ssdtrain,
    plan_capuchin,
    plan_sentinel,
)
_settings = settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)


def in_mebibytes(trace: Trace) -> Trace:
    """Returns the trace with bytes and times 2**20 times as large: some rules have limits on sizes."""
    ops = tuple(replace(op, duration_ns=op.duration_ns * MIB, transient_bytes=op.transient_bytes * MIB) for op in trace.ops)
    tensors = tuple(replace(tensor, size_bytes=tensor.size_bytes * MIB) for tensor in trace.tensors)
    return replace(trace, ops=ops, tensors=tensors)


@st.composite
def steps(draw: st.DrawFn) -> Trace:
    """Returns a step of a small network: residual reads, second outputs, in-place layers, scratch, an optimizer."""
    depth = draw(st.integers(2, 5))
    flag = st.integers(0, 3).map(lambda value: value == 3)
    tensors: list[Tensor] = []
    ops: list[Op] = []

    def add(name: str, kind: TensorClass, **fields: Any) -> int:
        size = st.integers(1, 100 if name in ("output", "extra") else 20)
        tensors.append(Tensor(f"{name}{len(tensors)}", draw(size), kind, **fields))
        return len(tensors) - 1

    def run(phase: str, reads: list[int], writes: list[int]) -> None:
        if draw(flag):
            writes = [*writes, add("scratch", TensorClass.ACTIVATION, is_movable=False)]
        module = f"layer{index}" if is_modular else ""
        duration, transient = draw(st.integers(0, 50)), draw(st.sampled_from((0, 0, 20)))
        ops.append(Op(f"{phase}{len(ops)}", duration, tuple(reads), tuple(writes), transient, phase, module))

    is_modular = draw(st.booleans())
    parameters = [add("parameter", TensorClass.PARAMETER, is_persistent=True) for _ in range(depth)]
    outputs = [add("input", draw(st.sampled_from((TensorClass.INPUT, TensorClass.ACTIVATION))))]
    saved: list[list[int]] = []
    for index in range(depth):
        kept = [outputs[-1], *([draw(st.sampled_from(outputs))] if draw(flag) else [])]
        made = [add("output", TensorClass.ACTIVATION)] if not index or not draw(flag) else [outputs[-1]]
        extra = [add("extra", TensorClass.ACTIVATION)] if draw(flag) else []
        run("forward", [*kept, parameters[index]], made + extra)
        saved.append(kept + extra)
        outputs += made
    gradient = outputs[-1]
    gradients: dict[int, int] = {}
    for index in reversed(range(depth)):
        passed = add("passed", TensorClass.ACTIVATION)
        gradients[index] = add("gradient", TensorClass.GRADIENT, owner=parameters[index], lives_until=-1)
        run("backward", [gradient, *saved[index], parameters[index]], [passed, gradients[index]])
        gradient = passed
    for index in range(depth):
        run("optimizer", [gradients[index], parameters[index]], [parameters[index]])
    return in_mebibytes(Trace(tuple(ops), tuple(tensors), name="step"))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Returns a problem on a step of a network, or on a trace of any kind, for one of the two executors."""
    trace = draw(steps()) if draw(st.integers(0, 4)) else in_mebibytes(draw(traces()))
    executor = draw(st.sampled_from((IDEAL_EXECUTOR, RUNTIME_EXECUTOR)))
    lower = st.sampled_from((10_000, 10_000, 300, 100, 0))
    budget = {Tier.DEVICE: 1, Tier.HOST: draw(lower) * MIB, Tier.NVME: draw(lower) * MIB}
    machine = draw(machines())
    if draw(st.booleans()):  # so slow that nothing hides its transfers
        names = ("d2h_bytes_per_s", "h2d_bytes_per_s", "nvme_write_bytes_per_s", "nvme_read_bytes_per_s")
        speeds: dict[str, Any] = dict.fromkeys(names, 10**8)
        machine = replace(machine, **speeds)
    problem = make_problem(trace, machine, budget, executor)
    least, most = int(problem.base.max()), int(problem.live.max())
    budget[Tier.DEVICE] = max(1, least + (most - least) * draw(st.integers(-10, 105)) // 100)
    return make_problem(trace, problem.machine, budget, executor)


@pytest.mark.parametrize("policy", POLICIES)
@_settings
@given(problem=problems())
def test_plan_passes_the_checker_or_is_over_on_the_device_alone(policy: Callable[[Problem], Plan], problem: Problem) -> None:
    plan = policy(problem)
    again = make_problem(problem.trace, problem.machine, problem.budget, problem.capabilities)
    assert plan == policy(again)
    assert plan.moves_nothing or not problem.fits
    peak = plan.peak_bytes[Tier.DEVICE]
    room = {**plan.budget_bytes, Tier.DEVICE: max(peak, problem.device_bytes)}
    check(replace(plan, budget_bytes=room), problem.trace, problem.capabilities)
    timeline = simulate(plan, problem.trace, problem.machine)
    assert max(timeline.memory[Tier.DEVICE]) == peak
    assert timeline.step_ns >= problem.trace.ideal_ns
