"""The policies over three tiers: g10, teraio, zero-offload, zero-infinity and mlp-offload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.property.test_planner_properties import cases, machines
from tests.support.covering import examples
from tests.support.outside import published_trace
from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR, RUNTIME_EXECUTOR, Capabilities, HostUpdate, Plan
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.planner.problem.problem import Problem, live_bytes, make_problem
from tieroff.planner.simulate.simulator import simulate
from tieroff.study.policies.tiers.g10 import plan_g10
from tieroff.study.policies.tiers.mlp_offload import plan_mlp_offload
from tieroff.study.policies.tiers.teraio import plan_teraio
from tieroff.study.policies.tiers.zero import plan_zero_infinity, plan_zero_offload
from tieroff.units import GIB, TIB

MS = 10**6
ACTIVATION, PARAMETER = TensorClass.ACTIVATION, TensorClass.PARAMETER
GRADIENT, OPTIMIZER = TensorClass.GRADIENT, TensorClass.OPTIMIZER
POLICIES = (plan_g10, plan_teraio, plan_zero_offload, plan_zero_infinity, plan_mlp_offload)


def machine(host_bytes_per_s: int = 10**6, nvme_bytes_per_s: int = 10**5, **more: int) -> Machine:
    """Returns one on which 1000 bytes take an op of 10 ms to the NVMe, and 1 ms to the host."""
    host = {f"{name}_bytes_per_s": host_bytes_per_s for name in ("d2h", "h2d")}
    nvme = {f"{name}_bytes_per_s": nvme_bytes_per_s for name in ("nvme_write", "nvme_read")}
    return Machine(name="round", **host, **nvme, **more)  # type: ignore[arg-type]


def planned(
    plan_policy: Callable[[Problem], Plan],
    trace: Trace,
    device_bytes: int,
    on: Machine | None = None,
    capabilities: Capabilities = IDEAL_EXECUTOR,
) -> Plan:
    """Returns the plan, checked, with lower tiers that hold everything."""
    budget = {Tier.DEVICE: device_bytes, Tier.HOST: 10**9, Tier.NVME: 10**9}
    plan = plan_policy(make_problem(trace, on or machine(), budget, capabilities))
    check(plan, trace, capabilities)
    assert plan.peak_bytes[Tier.DEVICE] <= device_bytes
    return plan


def moves(plan: Plan) -> set[tuple[int, Tier, Tier, int, int]]:
    return {(t.tensor, t.source, t.target, t.issue_at, t.ready_by) for t in plan.transfers}


def ops(count: int, uses: dict[int, tuple[tuple[int, ...], tuple[int, ...]]], **fields: str) -> tuple[Op, ...]:
    """Returns ops of 10 ms; `uses` gives what some of them read and write."""
    return tuple(Op(f"op{i}", 10 * MS, *uses.get(i, ((), ())), **fields) for i in range(count))  # type: ignore[arg-type]


def nested(z_bytes: int = 1000) -> Trace:
    """x over ops 0 to 11, y over ops 1 to 10, and z at ops 5 and 6."""
    uses = {0: ((), (0,)), 1: ((), (1,)), 5: ((), (2,)), 6: ((2,), ()), 10: ((1,), ()), 11: ((0,), ())}
    sizes = {"x": 3000, "y": 1000, "z": z_bytes}
    return Trace(ops(12, uses), tuple(Tensor(name, size, ACTIVATION) for name, size in sizes.items()))


def test_g10_takes_the_most_bytes_times_time_and_times_them_by_the_links() -> None:
    """x relieves 3000 bytes at both ops, y 1000. It is out by op 3 and would be read from op 8, but there is room from 7."""
    plan = planned(plan_g10, nested(), 4100)
    assert moves(plan) == {(0, Tier.DEVICE, Tier.NVME, 1, 4), (0, Tier.NVME, Tier.DEVICE, 7, 11)}


def test_g10_weighs_time_by_bytes() -> None:
    """Ops 5 to 9 are over. x relieves 3000 bytes at two of them, y, which would do alone, 1000 at all five."""
    uses = {0: ((), (0,)), 1: ((), (1,)), 5: ((), (2,)), 9: ((0,), ()), 10: ((2,), ()), 11: ((1,), ())}
    sizes = {"x": 3000, "y": 1000, "z": 1000}
    trace = Trace(ops(12, uses), tuple(Tensor(name, size, ACTIVATION) for name, size in sizes.items()))
    written = {(t.tensor, t.target) for t in planned(plan_g10, trace, 4100).transfers if t.source is Tier.DEVICE}
    assert written == {(0, Tier.NVME), (1, Tier.HOST)}


def test_teraio_takes_the_most_pressure_per_time_of_transfers() -> None:
    """900 bytes are too many; x and y each relieve them all, and y takes a third of the time."""
    plan = planned(plan_teraio, nested(), 4100)
    assert {(t.tensor, t.source, t.target) for t in plan.transfers} == {
        (1, Tier.DEVICE, Tier.NVME),
        (1, Tier.NVME, Tier.DEVICE),
    }


@pytest.mark.parametrize(("plan_policy", "tensor"), [(plan_g10, 0), (plan_teraio, 1)])
def test_host_takes_what_the_ssd_has_no_time_for(plan_policy: Callable[[Problem], Plan], tensor: int) -> None:
    plan = planned(plan_policy, nested(), 4100, machine(nvme_bytes_per_s=10**4))
    assert {t.tensor for t in plan.transfers} == {tensor}
    assert plan.peak_bytes[Tier.NVME] == 0 < plan.peak_bytes[Tier.HOST]


def test_g10_goes_to_the_host_where_an_earlier_choice_fills_the_ssd() -> None:
    """x leaves over ops 1 to 3, all that the SSD can write there; y would be out within op 2 if it were alone."""
    plan = planned(plan_g10, nested(3600), 4100)
    assert moves(plan) == {
        (0, Tier.DEVICE, Tier.NVME, 1, 4),
        (0, Tier.NVME, Tier.DEVICE, 7, 11),
        (1, Tier.DEVICE, Tier.HOST, 2, 3),
        (1, Tier.HOST, Tier.DEVICE, 7, 10),
    }


def test_g10_pages_out_the_least_recently_used_where_the_greedy_finds_no_gap() -> None:
    """No gap is longer than the transfers, so the run time makes room at op 3: a, used before b, waits for its copy."""
    uses = {0: ((), (0,)), 1: ((), (1,)), 3: ((), (2,)), 4: ((2, 1), ()), 5: ((0,), ())}
    trace = Trace(ops(6, uses), tuple(Tensor(name, 1000, ACTIVATION) for name in "abc"))
    slow = machine(host_bytes_per_s=10**4, nvme_bytes_per_s=10**4)
    plan = planned(plan_g10, trace, 2000, slow)
    assert moves(plan) == {(0, Tier.DEVICE, Tier.HOST, 1, 3), (0, Tier.HOST, Tier.DEVICE, 5, 5)}


def updated() -> Trace:
    """A parameter of 100 bytes, its gradient and state of 200: made at op 2 and used by the update at op 4."""
    made = ops(4, {1: ((0,), ()), 2: ((0,), (1,))})
    update = Op("update", 10 * MS, (0, 1, 2), (0, 2), phase="optimizer")
    tensors = (
        Tensor("w", 100, PARAMETER, is_persistent=True),
        Tensor("g", 100, GRADIENT, owner=0),
        Tensor("m", 200, OPTIMIZER, is_persistent=True),
    )
    return Trace((*made, update), tensors)


def test_zero_offload_updates_on_the_host_and_copies_gradients_out_and_parameters_back() -> None:
    plan = planned(plan_zero_offload, updated(), 250, machine(cpu_update_bytes_per_s=10**4))
    assert plan.host_updates == (HostUpdate(4, 4, 5, 20 * MS),)
    assert moves(plan) == {(1, Tier.DEVICE, Tier.HOST, 3, 4), (0, Tier.HOST, Tier.DEVICE, 0, 1)}
    assert [r.tier for r in plan.residencies if r.tensor == 2] == [Tier.HOST]
    assert plan.peak_bytes[Tier.DEVICE] == 200


def test_zero_offload_brings_state_to_the_device_where_the_executor_updates_there() -> None:
    """An activation of 150 bytes at op 1 stands beside the parameter there, and state that waits for op 5 does not fit."""
    other, trace = Op("other", 10 * MS, (), (3,)), updated()
    trace = Trace((trace.ops[0], other, *trace.ops[1:]), (*trace.tensors, Tensor("a", 150, ACTIVATION)))
    capabilities = replace(RUNTIME_EXECUTOR, min_bytes=0)
    plan = planned(plan_zero_offload, trace, 449, capabilities=capabilities)
    assert not plan.host_updates
    assert {t.tensor for t in plan.transfers} == {2}
    assert [(r.start, r.stop) for r in plan.residencies if r.tensor == 2 and r.tier is Tier.DEVICE] == [(5, 6)]


def stack(count: int = 4, size_bytes: int = 10**6) -> Trace:
    """Layers with a parameter each, forwards and backwards, and one small parameter that the first op reads."""
    order = [*range(count), *reversed(range(count))]
    made = ops(2 * count, {i: ((layer, *([count] if i == 0 else [])), ()) for i, layer in enumerate(order)})
    tensors = [Tensor(f"w{i}", size_bytes, PARAMETER, is_persistent=True) for i in range(count)]
    return Trace(made, (*tensors, Tensor("b", 100, PARAMETER, is_persistent=True)))


def test_zero_infinity_keeps_small_parameters_and_releases_those_that_are_not_used_again_soon() -> None:
    """Halved ten times, the reuse bound is below the bytes of four layers, and the bucket below those of one.

    So w0 and w1 leave between forward and backward, w2 and w3 between backward and forward, each an op after its module
    for the copy, and all come back at their use.
    """
    plan = planned(plan_zero_infinity, stack(), 2_500_000, machine(10**9, 10**9))
    assert all(Tier.NVME in (t.source, t.target) for t in plan.transfers)
    held = {r.tensor: (r.start, r.stop) for r in plan.residencies if r.tier is Tier.DEVICE}
    assert held == {0: (7, 10), 1: (6, 11), 2: (2, 7), 3: (3, 6), 4: (0, 8)}


def test_mlp_offload_splits_state_by_bandwidth_and_keeps_what_is_updated_last() -> None:
    """Six updates; the host is half as fast again as the NVMe. Three at a time are on the device, so five move."""
    tensors = tuple(Tensor(f"m{i}", 200, OPTIMIZER, is_persistent=True) for i in range(6))
    updates = tuple(Op(f"update{i}", 10 * MS, (i,), (i,), phase="optimizer") for i in range(6))
    trace = Trace((*ops(4, {}), *updates), tensors)
    plan = planned(plan_mlp_offload, trace, 850, machine(150_000, 100_000))
    host, nvme = Tier.HOST, Tier.NVME
    written = {t.tensor: t.target for t in plan.transfers if t.source is Tier.DEVICE}
    assert written == {0: host, 1: nvme, 2: host, 3: host, 4: nvme}


_EXECUTORS = st.sampled_from((IDEAL_EXECUTOR, replace(RUNTIME_EXECUTOR, min_bytes=0, granule_bytes=1)))


@pytest.mark.parametrize("plan_policy", POLICIES)
@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(case=cases(), on=machines(), capabilities=_EXECUTORS, is_ample=st.booleans())
def test_plan_is_valid_but_for_the_device_and_always_the_same(
    plan_policy: Callable[[Problem], Plan],
    case: tuple[Trace, dict[Tier, int]],
    on: Machine,
    capabilities: Capabilities,
    is_ample: bool,
) -> None:
    trace, budget = case
    if is_ample:
        budget = {**budget, Tier.HOST: 10_000, Tier.NVME: 10_000}
    # A thousand times a thousand slower, so that a latency of microseconds does not hide the links.
    trace = trace.with_durations([op.duration_ns * MS for op in trace.ops])
    links = ("d2h", "h2d", "nvme_write", "nvme_read")
    on = replace(on, **{f"{link}_bytes_per_s": getattr(on, f"{link}_bytes_per_s") // MS for link in links})
    problem = make_problem(trace, on, budget, capabilities)
    plan = plan_policy(problem)
    assert plan == plan_policy(problem)
    check(replace(plan, budget_bytes={**plan.budget_bytes, Tier.DEVICE: 10**9}), trace, capabilities)
    memory = simulate(plan, trace, on).memory
    assert {tier: max(line) for tier, line in memory.items()} == plan.peak_bytes
    if problem.fits:
        assert plan.moves_nothing
    moves_all = plan_policy in (plan_g10, plan_teraio)
    if moves_all and is_ample and int(problem.base.max()) <= budget[Tier.DEVICE]:
        assert plan.peak_bytes[Tier.DEVICE] <= budget[Tier.DEVICE]


@st.composite
def training_steps(draw: st.DrawFn) -> Trace:
    """Returns a step in which each parameter has a gradient and state, and an update at the end that uses all three."""
    count, length = draw(st.integers(1, 4)), draw(st.integers(2, 8))
    uses: list[tuple[set[int], set[int]]] = [(set(), set()) for _ in range(length + count)]
    tensors: list[Tensor] = []
    op = st.integers(0, length - 1)
    for place in draw(st.permutations(range(count))):
        w, g, m = range(len(tensors), len(tensors) + 3)
        sizes = [draw(st.integers(1, 100)) for _ in range(3)]
        holds = draw(st.sampled_from(((), ((length - 1, length),))))
        tensors.append(Tensor(f"w{w}", sizes[0], PARAMETER, is_persistent=True))
        tensors.append(Tensor(f"g{w}", sizes[1], GRADIENT, owner=w, holds=holds))
        tensors.append(Tensor(f"m{w}", sizes[2], OPTIMIZER, is_persistent=True))
        for index in draw(st.sets(op, min_size=1, max_size=3)):
            uses[index][0].add(w)
        for index in draw(st.sets(op, min_size=1, max_size=2)):
            uses[index][1].add(g)
        uses[length + place][0].update((w, g, m))
        uses[length + place][1].update((w, m))
    made = [
        Op(f"op{i}", 10 * MS, tuple(sorted(r)), tuple(sorted(w)), phase="optimizer" if i >= length else "")
        for i, (r, w) in enumerate(uses)
    ]
    return Trace((*made, *ops(draw(st.integers(0, 2)), {}, module="end")), tuple(tensors))


def named_once(trace: Trace) -> Trace:
    return replace(trace, ops=tuple(replace(op, name=f"op{i}") for i, op in enumerate(trace.ops)))


@pytest.mark.parametrize("plan_policy", [plan_zero_offload, plan_zero_infinity, plan_mlp_offload])
@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(trace=training_steps(), percent=st.integers(40, 100), host=st.sampled_from((300, 10**6)), capabilities=_EXECUTORS)
def test_plan_of_a_step_with_updates_is_valid_but_for_the_device(
    plan_policy: Callable[[Problem], Plan], trace: Trace, percent: int, host: int, capabilities: Capabilities
) -> None:
    trace = named_once(trace)
    device = max(1, int(live_bytes(trace).max()) * percent // 100)
    budget = {Tier.DEVICE: device, Tier.HOST: host, Tier.NVME: 10**6}
    on = machine(cpu_update_bytes_per_s=10**5)
    plan = plan_policy(make_problem(trace, on, budget, capabilities))
    check(replace(plan, budget_bytes={**budget, Tier.DEVICE: 10**6}), trace, capabilities)
    assert simulate(plan, trace, on).step_ns >= trace.ideal_ns * (not plan.host_updates)


_MACHINE = Machine(
    name="g10",
    d2h_bytes_per_s=round(15.754 * GIB),
    h2d_bytes_per_s=round(15.754 * GIB),
    nvme_write_bytes_per_s=round(3.2 * GIB),
    nvme_read_bytes_per_s=round(3.2 * GIB),
    nvme_shares_host_link=True,
)


@pytest.mark.parametrize("plan_policy", [plan_g10, plan_teraio, plan_zero_infinity])
def test_step_of_a_published_trace_lies_between_the_ideal_and_demand_paging(plan_policy: Callable[[Problem], Plan]) -> None:
    """Demand paging took 14.9723 s as published."""
    trace = published_trace("VIT-b1024")
    budget = {Tier.DEVICE: 40 * GIB, Tier.HOST: 128 * GIB, Tier.NVME: 16 * TIB}
    plan = plan_policy(make_problem(trace, _MACHINE, budget, IDEAL_EXECUTOR))
    check(plan, trace, IDEAL_EXECUTOR)
    assert plan.transfers and plan.peak_bytes[Tier.DEVICE] <= budget[Tier.DEVICE]
    assert trace.ideal_ns < simulate(plan, trace, _MACHINE).step_ns < 14.9723e9


@pytest.mark.parametrize("plan_policy", [plan_zero_offload, plan_mlp_offload])
def test_policy_of_state_alone_leaves_a_trace_without_state_over_the_budget(plan_policy: Callable[[Problem], Plan]) -> None:
    trace = published_trace("VIT-b1024")
    budget = {Tier.DEVICE: 40 * GIB, Tier.HOST: 128 * GIB, Tier.NVME: 16 * TIB}
    plan = plan_policy(make_problem(trace, _MACHINE, budget, IDEAL_EXECUTOR))
    assert plan.peak_bytes[Tier.DEVICE] > budget[Tier.DEVICE]
