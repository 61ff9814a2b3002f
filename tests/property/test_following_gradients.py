"""Plans for the project's own runtime, where gradients follow their parameters, on steps that update in any order."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.property.test_planner_properties import machines
from tests.support.covering import examples
from tieroff.core.machine import Machine
from tieroff.core.plan import Capabilities
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.errors import InfeasiblePlanError
from tieroff.planner.make_plan import make_plan
from tieroff.planner.problem.problem import make_problem

_EXECUTOR = Capabilities(gradient_follows_parameter=True)


@st.composite
def steps(draw: st.DrawFn) -> Trace:
    """Returns a step: layers forwards and backwards, then updates, in any order; now and then an op between, or at the end."""
    depth = draw(st.integers(1, 3))
    tensors: list[Tensor] = []
    ops: list[Op] = []

    def new(kind: TensorClass, owner: int = -1) -> int:
        is_persistent = kind in (TensorClass.PARAMETER, TensorClass.OPTIMIZER)
        size = draw(st.integers(1, 50))
        tensors.append(Tensor(f"{kind.value}{len(tensors)}", size, kind, is_persistent=is_persistent, owner=owner))
        return len(tensors) - 1

    def run(reads: list[int], writes: list[int]) -> None:
        transient = draw(st.sampled_from((0, 0, 10, 100)))
        ops.append(Op(f"op{len(ops)}", draw(st.integers(0, 50)), tuple(sorted(reads)), tuple(sorted(writes)), transient))
        if draw(st.integers(0, 3)) == 3:
            ops.append(Op(f"op{len(ops)}", draw(st.integers(0, 50)), transient_bytes=draw(st.sampled_from((0, 100)))))

    weights = [new(TensorClass.PARAMETER) for _ in range(depth)]
    states = [new(TensorClass.OPTIMIZER) for _ in range(depth)]
    outputs = [new(TensorClass.ACTIVATION) for _ in range(depth)]
    for index in range(depth):
        run([weights[index], *outputs[:index][-1:]], [outputs[index]])
    gradients = [new(TensorClass.GRADIENT, owner=weight) for weight in weights]
    for index in reversed(range(depth)):
        run([weights[index], outputs[index]], [gradients[index]])
    for index in draw(st.permutations(range(depth))):
        run([weights[index], states[index], gradients[index]], [weights[index], states[index]])
    return Trace(tuple(ops), tuple(tensors), name="step", origin="step")


@pytest.mark.parametrize("policy", ["auto", "greedy", "relaxed", "teraio"])
@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(trace=steps(), machine=machines(), share=st.integers(0, 100), host=st.sampled_from((10_000, 200)))
def test_policy_plans_what_the_checker_passes_or_says_why_it_cannot(
    policy: str, trace: Trace, machine: Machine, share: int, host: int
) -> None:
    budget = {Tier.DEVICE: 1, Tier.HOST: host, Tier.NVME: 10_000}
    problem = make_problem(trace, machine, budget, _EXECUTOR)
    least, most = int(problem.base.max()), int(problem.live.max())
    budget[Tier.DEVICE] = max(1, least + (most - least) * share // 100)
    try:
        plan = make_plan(trace, machine, budget, policy, capabilities=_EXECUTOR)  # it checks its plan
    except InfeasiblePlanError as error:
        assert policy == "teraio"  # moves less than can be; below, there is room for all
        assert error.needed_bytes > error.available_bytes == budget[Tier.DEVICE]
        return
    assert plan.transfers or problem.fits or budget[Tier.DEVICE] >= most
