"""What every plan of every policy must hold, on random traces, machines, budgets and executors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.covering import examples
from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.plan import Capabilities, Plan
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.errors import InfeasiblePlanError
from tieroff.planner.bounds.bounds import lower_bound_ns
from tieroff.planner.make_plan import make_plan
from tieroff.planner.problem.problem import live_bytes, make_problem
from tieroff.planner.simulate.simulator import simulate

_KINDS = (
    *(TensorClass.ACTIVATION,) * 3,
    *(TensorClass.PARAMETER,) * 3,
    *(TensorClass.GRADIENT,) * 2,
    TensorClass.OPTIMIZER,
    TensorClass.INPUT,
)


@st.composite
def traces(draw: st.DrawFn, max_ops: int = 12, max_tensors: int = 8) -> Trace:
    """Returns a trace in which a gradient's owner, if any, is a parameter."""
    op_count = draw(st.integers(1, max_ops) | st.just(max_ops))
    tensor_count = draw(st.integers(1, max_tensors) | st.just(max_tensors))
    reads: list[set[int]] = [set() for _ in range(op_count)]
    writes: list[set[int]] = [set() for _ in range(op_count)]
    tensors: list[Tensor] = []
    op = st.integers(0, op_count - 1)
    for index in range(tensor_count):
        kind = draw(st.sampled_from(_KINDS))
        is_persistent = kind in (TensorClass.PARAMETER, TensorClass.OPTIMIZER) or draw(st.integers(0, 9)) == 9
        for use in draw(st.sets(op, min_size=1, max_size=3) if draw(st.integers(0, 9)) < 9 else st.just(set())):
            reads[use].add(index)
        for use in draw(st.sets(op, max_size=2)):
            writes[use].add(index)
        holds: tuple[tuple[int, int], ...] = ()
        if draw(st.integers(0, 5)) == 5:
            start = draw(op)
            holds = ((start, draw(st.integers(start + 1, op_count))),)
        owners = [i for i, t in enumerate(tensors) if t.kind is TensorClass.PARAMETER]
        owner = draw(st.sampled_from(owners)) if kind is TensorClass.GRADIENT and owners else -1
        tensors.append(
            Tensor(
                f"t{index}",
                draw(st.integers(1, 100)),
                kind,
                is_persistent=is_persistent,
                is_movable=draw(st.integers(0, 11)) < 11,
                holds=holds,
                owner=owner,
                lives_until=draw(st.sampled_from((-1, -1, op_count, draw(st.integers(0, op_count))))),
            )
        )
    ops = tuple(
        Op(
            f"op{i}",
            draw(st.integers(0, 50)),
            tuple(sorted(reads[i])),
            tuple(sorted(writes[i])),
            transient_bytes=draw(st.sampled_from((0, 0, 20))),
        )
        for i in range(op_count)
    )
    return Trace(ops, tuple(tensors), name="random")


@st.composite
def machines(draw: st.DrawFn, *, is_plain: bool = False) -> Machine:
    """Returns a machine whose transfers take about as long as the ops of `traces`."""
    rate = st.integers(10**9, 50 * 10**9)
    return Machine(
        name="random",
        device_bytes=1000,
        host_bytes=10_000,
        nvme_bytes=10_000,
        d2h_bytes_per_s=draw(rate),
        h2d_bytes_per_s=draw(rate),
        nvme_write_bytes_per_s=draw(rate),
        nvme_read_bytes_per_s=draw(rate),
        d2h_latency_s=draw(st.integers(0, 5)) * 1e-9,
        h2d_latency_s=draw(st.integers(0, 5)) * 1e-9,
        duplex_share=1.0 if is_plain else draw(st.sampled_from((1.0, 0.7, 0.5))),
        nvme_shares_host_link=False if is_plain else draw(st.booleans()),
        host_memory_bytes_per_s=0 if is_plain else draw(st.just(0) | rate),
        device_type=draw(st.sampled_from(("", "cpu"))),
    )


@st.composite
def capabilities(draw: st.DrawFn) -> Capabilities:
    """Returns an executor's capabilities."""
    return Capabilities(
        tiers=draw(st.sampled_from(((Tier.HOST,), (Tier.NVME,), (Tier.HOST, Tier.NVME)))),
        wraps=draw(st.booleans()),
        late_evictions=draw(st.booleans()),
        gradient_follows_parameter=draw(st.booleans()),
        min_bytes=draw(st.sampled_from((0, 0, 30))),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Trace, dict[Tier, int]]:
    """Returns a trace and budgets, the device's between hopeless and ample for it."""
    trace = draw(traces())
    peak = int(live_bytes(trace).max())
    return trace, {
        Tier.DEVICE: max(1, peak * draw(st.integers(50, 100)) // 100),
        Tier.HOST: draw(st.sampled_from((10_000, 10_000, 300, 100, 0))),
        Tier.NVME: draw(st.sampled_from((10_000, 200, 0))),
    }


_settings = settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)


def _plan(
    trace: Trace, machine: Machine, budget: dict[Tier, int], policy: str, caps: Capabilities | None = None
) -> Plan | None:
    try:
        return make_plan(trace, machine, budget, policy, capabilities=caps)
    except InfeasiblePlanError as error:
        assert error.needed_bytes > error.available_bytes == budget[Tier.DEVICE]
        return None


@pytest.mark.parametrize("policy", ["floor", "floor_mixed", "greedy"])
@_settings
@given(case=cases(), machine=machines(), caps=capabilities())
def test_plan_is_valid_and_within_budget(
    policy: str, case: tuple[Trace, dict[Tier, int]], machine: Machine, caps: Capabilities
) -> None:
    trace, budget = case
    plan = _plan(trace, machine, budget, policy, caps)
    if plan is None:
        return
    check(plan, trace, caps)
    timeline = simulate(plan, trace, machine)
    assert timeline == simulate(plan, trace, machine)
    assert timeline.step_ns == plan.step_ns >= trace.ideal_ns
    assert timeline.step_ns >= lower_bound_ns(make_problem(trace, machine, budget, caps))
    if timeline.cycle == 1:
        assert timeline.step_ns == timeline.compute_ns + timeline.recompute_ns + timeline.stall_ns
    for tier, peak in plan.peak_bytes.items():
        assert peak == max(timeline.memory[tier])
        assert peak <= (budget[tier] if tier is Tier.DEVICE or tier in caps.tiers else 0)


@_settings
@given(case=cases(), machine=machines(), caps=capabilities())
def test_greedy_is_feasible_when_floor_is_and_never_slower(
    case: tuple[Trace, dict[Tier, int]], machine: Machine, caps: Capabilities
) -> None:
    trace, budget = case
    floor = _plan(trace, machine, budget, "floor", caps)
    greedy = _plan(trace, machine, budget, "greedy", caps)
    assert floor is None or greedy is not None
    if floor is not None and greedy is not None and not machine.nvme_shares_host_link and machine.duplex_share == 1:
        assert greedy.step_ns <= floor.step_ns


@_settings
@given(case=cases(), machine=machines(is_plain=True), caps=capabilities(), factor=st.integers(2, 8), data=st.data())
def test_simulate_is_never_slower_with_a_faster_link(
    case: tuple[Trace, dict[Tier, int]], machine: Machine, caps: Capabilities, factor: int, data: st.DataObject
) -> None:
    trace, budget = case
    plan = _plan(trace, machine, budget, "greedy", caps)
    if plan is None:
        return
    key = data.draw(st.sampled_from(("d2h", "h2d", "nvme_write", "nvme_read"))) + "_bytes_per_s"
    faster = replace(machine, **{key: getattr(machine, key) * factor})
    assert simulate(plan, trace, faster).step_ns <= plan.step_ns


@_settings
@given(trace=traces(), machine=machines())
def test_floor_is_feasible_exactly_when_every_op_fits(trace: Trace, machine: Machine) -> None:
    """The required bytes are counted here op by op, without the planner's intervals."""
    needed = 0
    for index, op in enumerate(trace.ops):
        used = op.transient_bytes
        for tensor, t in enumerate(trace.tensors):
            busy = [i for i, o in enumerate(trace.ops) if tensor in o.reads + o.writes]
            busy += [i for start, stop in t.holds for i in range(start, stop)]
            stays = not t.is_movable or t.kind is TensorClass.INPUT
            is_always = not busy or (stays and t.is_persistent)
            if is_always or index in busy or (stays and min(busy) <= index < max(max(busy) + 1, t.lives_until)):
                used += t.size_bytes
        needed = max(needed, used)
    budget = {Tier.HOST: 10_000, Tier.NVME: 0}
    assert _plan(trace, machine, {**budget, Tier.DEVICE: needed}, "floor") is not None
    if needed:
        assert _plan(trace, machine, {**budget, Tier.DEVICE: needed - 1}, "floor") is None
