"""Policies that page: each one's rule on a trace worked out by hand, and what holds for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.property.test_planner_properties import capabilities, machines
from tests.property.test_planner_properties import traces as any_traces
from tests.support.covering import examples
from tests.support.outside import published_trace
from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR, RUNTIME_EXECUTOR, Capabilities, Plan, Repeat, Residency
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.planner.problem.problem import Problem, make_problem
from tieroff.planner.simulate.simulator import simulate
from tieroff.study.policies.activations.lms import plan_lms
from tieroff.study.policies.activations.oc_dnn import plan_oc_dnn
from tieroff.study.policies.activations.superneurons import plan_superneurons
from tieroff.study.policies.online.deepum import plan_deepum
from tieroff.study.policies.online.demand import plan_demand
from tieroff.study.policies.online.dragon import plan_dragon
from tieroff.study.policies.shared import paging
from tieroff.units import GIB

Policy = Callable[[Problem], Plan]

POLICIES: dict[str, Policy] = {
    "demand": plan_demand,
    "lms": plan_lms,
    "oc-dnn": plan_oc_dnn,
    "deepum": plan_deepum,
    "dragon": plan_dragon,
    "superneurons": plan_superneurons,
}
EVICTS_ALL = tuple(name for name in POLICIES if name != "superneurons")  # superneurons moves activations only

_MACHINE = Machine(
    name="unit", d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9, nvme_write_bytes_per_s=10**9, nvme_read_bytes_per_s=10**9
)
_RUNTIME = replace(RUNTIME_EXECUTOR, min_bytes=0, granule_bytes=4)


def make_trace(sizes: dict[str, int], ops: Sequence[tuple[str, str, str]], persistent: str = "") -> Trace:
    """Returns a trace of ops (name, tensors read, tensors written) of 10 ns; a tensor is a letter."""
    index = {name: k for k, name in enumerate(sizes)}
    return Trace(
        tuple(Op(name, 10, tuple(index[t] for t in reads), tuple(index[t] for t in writes)) for name, reads, writes in ops),
        tuple(
            Tensor(
                name,
                size,
                TensorClass.PARAMETER if name in persistent else TensorClass.ACTIVATION,
                is_persistent=name in persistent,
            )
            for name, size in sizes.items()
        ),
    )


def make(trace: Trace, policy: str, device: int, host: int = 1000, nvme: int = 0, caps: Capabilities = IDEAL_EXECUTOR) -> Plan:
    """Returns a policy's plan, checked."""
    budget = {Tier.DEVICE: device, Tier.HOST: host, Tier.NVME: nvme}
    plan = POLICIES[policy](make_problem(trace, _MACHINE, budget, caps))
    check(plan, trace, caps)
    return plan


def moves_of(plan: Plan, trace: Trace) -> list[str]:
    """Returns the transfers as text: tensor, tiers, and the ticks of issue and await, in order of tensor and issue."""
    names = {Tier.DEVICE: "dev", Tier.HOST: "host", Tier.NVME: "nvme"}
    found = sorted(plan.transfers, key=lambda t: (t.tensor, t.issue_at, t.ready_by))
    return [f"{trace.tensors[t.tensor].name} {names[t.source]}>{names[t.target]} {t.issue_at}-{t.ready_by}" for t in found]


# a leaves at op 2 for c; ops 3 to 5 leave room for it; a and b are read again at the end.
_ROOM_AGAIN = make_trace(
    {"a": 1, "b": 1, "c": 1},
    [
        ("w", "", "a"),
        ("w", "", "b"),
        ("w", "", "c"),
        ("-", "", ""),
        ("-", "", ""),
        ("-", "", ""),
        ("r", "a", ""),
        ("r", "b", ""),
    ],
)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("demand", ["a dev>host 2-2", "a host>dev 6-6"]),
        ("lms", ["a dev>host 1-2", "a host>dev 6-6"]),
        ("oc-dnn", ["a dev>host 1-2", "a host>dev 5-6"]),
        ("deepum", ["a dev>host 1-2", "a host>dev 3-6"]),
        ("dragon", ["a dev>host 2-2", "a host>dev 6-6"]),
    ],
)
def test_least_recently_used_leaves_and_comes_back_when_the_rule_looks_that_far(policy: str, expected: list[str]) -> None:
    assert moves_of(make(_ROOM_AGAIN, policy, 2), _ROOM_AGAIN) == expected


def test_demand_evicts_at_the_fault_and_fetches_at_the_use() -> None:
    trace = make_trace(
        {"a": 1, "b": 1, "c": 1}, [("w", "", "a"), ("w", "", "b"), ("w", "", "c"), ("r", "b", ""), ("r", "a", "")]
    )
    plan = make(trace, "demand", 2)
    assert moves_of(plan, trace) == ["a dev>host 2-2", "a host>dev 4-4"]
    assert [r for r in plan.residencies if r.tensor == 0 and r.tier is Tier.DEVICE] == [
        Residency(0, Tier.DEVICE, 0, 2),
        Residency(0, Tier.DEVICE, 4, 5),
    ]


_SIZES_DIFFER = make_trace(
    {"a": 1, "b": 3, "c": 2, "d": 2},
    [("w", "", "a"), ("w", "", "b"), ("w", "", "c"), ("w", "", "d"), ("r", "b", ""), ("r", "ac", "")],
)


def test_lms_evicts_the_first_that_alone_makes_room() -> None:
    assert moves_of(make(_SIZES_DIFFER, "lms", 6), _SIZES_DIFFER) == ["b dev>host 2-3", "b host>dev 4-4"]
    by_age = ["a dev>host 3-3", "a host>dev 5-5", "b dev>host 3-3", "b host>dev 4-4"]
    assert moves_of(make(_SIZES_DIFFER, "demand", 6), _SIZES_DIFFER) == by_age


def test_lms_evicts_everything_when_no_single_tensor_makes_room() -> None:
    trace = make_trace(
        {"a": 1, "b": 1, "c": 1, "d": 2}, [("w", "", "a"), ("w", "", "b"), ("w", "", "c"), ("w", "", "d"), ("r", "abc", "")]
    )
    assert {move[0] for move in moves_of(make(trace, "lms", 3), trace)} == {"a", "b", "c"}
    assert {move[0] for move in moves_of(make(trace, "demand", 3), trace)} == {"a", "b"}


def test_deepum_does_not_evict_for_a_prefetch_what_its_window_needs_but_a_fault_does() -> None:
    """At op 2 a fault takes a, which the window needs. b is needed by the window too, so a waits for c to go."""
    trace = make_trace(
        {"a": 1, "b": 1, "c": 1},
        [("w", "", "a"), ("w", "", "b"), ("w", "", "c"), ("r", "c", ""), ("r", "a", ""), ("r", "b", "")],
    )
    assert moves_of(make(trace, "deepum", 2), trace) == ["a dev>host 1-2", "a host>dev 4-4"]


def test_deepum_evicts_for_a_prefetch_what_its_window_does_not_need() -> None:
    """At op 3 the window ends with op 11: b, read by op 15, makes room for a; it comes back as op 15 enters the window."""
    idle = [("-", "", "")] * 9
    trace = make_trace(
        {"a": 1, "b": 1, "c": 1},
        [("w", "", "a"), ("w", "", "b"), ("w", "", "c"), ("r", "c", ""), ("-", "", ""), ("r", "a", ""), *idle, ("r", "bc", "")],
    )
    assert moves_of(make(trace, "deepum", 2), trace)[:4] == [
        "a dev>host 1-2",
        "a host>dev 3-5",
        "b dev>host 2-3",
        "b host>dev 7-15",
    ]


def test_oc_dnn_evicts_for_a_prefetch_and_keeps_what_the_next_op_needs() -> None:
    trace = make_trace(
        {"a": 1, "b": 1, "c": 1},
        [("w", "", "a"), ("w", "", "b"), ("w", "", "c"), ("-", "", ""), ("r", "a", ""), ("r", "bc", "")],
    )
    assert moves_of(make(trace, "oc-dnn", 2), trace) == ["a dev>host 1-2", "a host>dev 3-4", "b dev>host 2-3", "b host>dev 5-5"]


def test_dragon_keeps_in_the_page_cache_what_left_last_and_reads_ahead() -> None:
    trace = make_trace(
        {"a": 1, "b": 1, "c": 1, "d": 1},
        [("w", "", "a"), ("w", "", "b"), ("w", "", "c"), ("w", "c", "d"), ("-", "", ""), ("r", "a", ""), ("r", "b", "")],
    )
    found = moves_of(make(trace, "dragon", 2, host=1, nvme=100), trace)
    assert found == ["a dev>nvme 1-2", "a nvme>dev 5-5", "b dev>host 3-3", "b host>dev 5-6"]
    by_age = moves_of(make(trace, "demand", 2, host=1, nvme=100), trace)
    assert by_age == ["a dev>host 2-2", "a host>dev 5-5", "b dev>nvme 3-3", "b nvme>dev 6-6"]


_SEGMENT = make_trace(
    {"a": 4, "b": 1, "c": 2, "g": 1},
    [
        ("conv_forward", "", "a"),
        ("pool_forward", "a", "b"),
        ("conv_forward", "b", "c"),
        ("makeloss", "c", "g"),
        ("conv_backward", "gb", ""),
        ("pool_backward", "ab", ""),
    ],
)


def test_superneurons_recomputes_what_is_cheap_and_moves_nothing() -> None:
    plan = make(_SEGMENT, "superneurons", 7)
    assert plan.repeats == (Repeat(1, 4),)
    assert plan.transfers == ()
    assert [(r.start, r.stop) for r in plan.residencies if r.tensor == 1] == [(1, 3), (4, 6)]


def test_superneurons_caches_everything_where_ops_do_not_repeat() -> None:
    plan = make(_SEGMENT, "superneurons", 7, caps=_RUNTIME)
    assert plan.repeats == ()
    # a comes back beside op 4 for op 5: one tensor ahead, in backward.
    assert moves_of(plan, _SEGMENT) == ["a dev>host 3-3", "a host>dev 4-5"]


def test_superneurons_never_recomputes_a_checkpoint() -> None:
    ops = [replace(op, name=op.name.replace("pool", "linear")) for op in _SEGMENT.ops]
    trace = replace(_SEGMENT, ops=tuple(ops))
    plan = make(trace, "superneurons", 7)
    assert plan.repeats == ()
    assert moves_of(plan, trace) == ["a dev>host 3-3", "a host>dev 4-5"]


@pytest.mark.parametrize(("backward_bytes", "expected"), [(1, {(1, 5), (2, 5), (1, 6)}), (3, {(1, 5), (2, 5)})])
def test_superneurons_keeps_a_segment_if_the_largest_op_of_backward_is_as_large(
    backward_bytes: int, expected: set[tuple[int, int]]
) -> None:
    """The segment b, c has 6 bytes; the largest op of backward works on 3 + 1 bytes, or on 3 + 3."""
    trace = make_trace(
        {"a": 1, "b": 3, "c": 3, "d": 4, "g": backward_bytes},
        [
            ("conv_forward", "", "a"),
            ("pool_forward", "a", "b"),
            ("pool_forward", "b", "c"),
            ("conv_forward", "c", "d"),
            ("makeloss", "d", "g"),
            ("conv_backward", "gc", ""),
            ("pool_backward", "gb", ""),
            ("pool_backward", "a", ""),
        ],
    )
    plan = make(trace, "superneurons", 10)
    assert {(r.op, r.at) for r in plan.repeats} == expected
    held = [(r.start, r.stop) for r in plan.residencies if r.tensor == 1]
    assert held == ([(1, 3), (5, 6), (6, 7)] if len(expected) == 3 else [(1, 3), (5, 7)])


def test_persistent_tensor_pages_over_the_end_of_the_step_where_it_can() -> None:
    """w and v are read in turn, and only one fits: each leaves when the other comes. Clean, they are dropped."""
    trace = make_trace({"w": 3, "v": 3}, [("r", "w", ""), ("r", "v", "")], persistent="wv")
    for caps in (IDEAL_EXECUTOR, _RUNTIME):
        plan = make(trace, "demand", 3, caps=caps)
        assert moves_of(plan, trace) == ["w host>dev 0-0", "v host>dev 1-1"]
    plan = make(trace, "demand", 6)
    assert plan.moves_nothing


def test_a_tensor_that_is_written_each_step_is_copied_each_step() -> None:
    trace = make_trace({"w": 3, "v": 3}, [("r", "w", "w"), ("r", "v", "")], persistent="wv")
    assert moves_of(make(trace, "demand", 3), trace) == ["w host>dev 0-0", "w dev>host 1-1", "v host>dev 1-1"]


@st.composite
def nets(draw: st.DrawFn) -> Trace:
    """Returns the trace of a random chain with joins, forward, backward and optimizer."""
    tensors: list[Tensor] = []
    ops: list[Op] = []

    def new(kind: TensorClass, *, is_persistent: bool = False, owner: int = -1) -> int:
        tensors.append(Tensor(f"t{len(tensors)}", draw(st.integers(1, 40)), kind, is_persistent=is_persistent, owner=owner))
        return len(tensors) - 1

    def run(name: str, reads: set[int], writes: set[int]) -> None:
        transient = draw(st.sampled_from((0, 0, 15)))
        ops.append(Op(name, draw(st.integers(0, 30)), tuple(sorted(reads)), tuple(sorted(writes)), transient))

    outputs = [new(TensorClass.INPUT)]
    run("data_forward", set(), {outputs[0]})
    layers: list[tuple[str, set[int], set[int]]] = []
    for _ in range(draw(st.integers(1, 7))):
        name = draw(st.sampled_from(("relu", "pool", "conv", "linear", "add", "dropout", "batchnorm")))
        reads = {outputs[-1]} | ({draw(st.sampled_from(outputs))} if name == "add" else set())
        weights = {new(TensorClass.PARAMETER, is_persistent=True)} if name in ("conv", "linear") else set()
        is_in_place = name == "relu" and draw(st.booleans())
        count = 1 + (draw(st.integers(0, 4)) == 0)
        writes = {outputs[-1]} if is_in_place else {new(TensorClass.ACTIVATION) for _ in range(count)}
        run(f"{name}_forward", reads | weights, writes)
        layers.append((name, reads | draw(st.sampled_from((set(), writes))), weights))
        outputs.append(min(writes))
    gradient = new(TensorClass.ACTIVATION)
    run("makeloss", {outputs[-1]}, {gradient})
    for name, saved, weights in reversed(layers):
        below = new(TensorClass.ACTIVATION)
        own = {new(TensorClass.GRADIENT, owner=weight) for weight in weights}
        run(f"{name}_backward", {gradient} | weights | draw(st.sampled_from((saved, saved, set()))), own | {below})
        for weight in weights:
            run("apply_grad", own | {weight}, {weight})
        gradient = below
    return Trace(tuple(ops), tuple(tensors), name="net")


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(
    trace=nets() | any_traces(),
    machine=machines(),
    caps=st.sampled_from((IDEAL_EXECUTOR, _RUNTIME)) | capabilities(),
    share=st.integers(0, 100),
    lower=st.sampled_from(((10_000, 0), (0, 10_000), (10_000, 10_000), (100, 10_000), (100, 100))),
    rounds_max=st.sampled_from((1, 12)),
)
def test_plan_is_valid_and_the_same_each_time(
    policy: str, trace: Trace, machine: Machine, caps: Capabilities, share: int, lower: tuple[int, int], rounds_max: int
) -> None:
    budget = {Tier.HOST: lower[0], Tier.NVME: lower[1]}
    problem = make_problem(trace, machine, budget, caps)
    least, most = int(problem.base.max()), int(problem.live.max())
    budget[Tier.DEVICE] = least + (most - least) * share // 100
    problem = make_problem(trace, machine, budget, caps)
    with patch.object(paging, "ROUNDS_MAX", rounds_max):  # with 1 the steady state is closed by force
        plan = POLICIES[policy](problem)
        assert plan == POLICIES[policy](problem)
    assert plan.moves_nothing or not problem.fits
    peak = plan.peak_bytes[Tier.DEVICE]
    if policy in EVICTS_ALL and 10_000 in (problem.budget[tier] for tier in problem.tiers):
        assert peak <= budget[Tier.DEVICE]
    # A plan over the device's budget is reported by the caller; all else about it must hold.
    check(replace(plan, budget_bytes={**plan.budget_bytes, Tier.DEVICE: max(peak, budget[Tier.DEVICE])}), trace, caps)


_RATE = round(15.754 * GIB)
_G10_MACHINE = Machine(
    name="g10",
    d2h_bytes_per_s=_RATE,
    h2d_bytes_per_s=_RATE,
    nvme_write_bytes_per_s=round(3.2 * GIB),
    nvme_read_bytes_per_s=round(3.2 * GIB),
    nvme_shares_host_link=True,
)


@pytest.mark.parametrize("caps", [IDEAL_EXECUTOR, RUNTIME_EXECUTOR], ids=["ideal", "runtime"])
def test_published_trace_takes_between_the_ideal_and_demand(caps: Capabilities) -> None:
    trace = published_trace("VIT-b1024")
    problem = make_problem(trace, _G10_MACHINE, {Tier.DEVICE: 40 * GIB, Tier.HOST: 128 * GIB, Tier.NVME: 0}, caps)
    step_ns: dict[str, int] = {}
    for name, policy in POLICIES.items():
        plan = policy(problem)
        check(plan, trace, caps)
        step_ns[name] = simulate(plan, trace, _G10_MACHINE).step_ns
    assert all(trace.ideal_ns < step <= step_ns["demand"] for step in step_ns.values())
    assert step_ns["deepum"] < step_ns["oc-dnn"] < step_ns["demand"]
    assert len(set(step_ns.values())) == len(POLICIES)  # none is another one's plan
