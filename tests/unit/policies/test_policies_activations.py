"""The policies that move activations by rule: vDNN, TFLMS, FlashNeuron, SSDTrain, Capuchin, and Sentinel.

All work on one step of ten ops. Forward takes 5 ms an op, the rest 10 ms; sizes are in MiB:

    tick      0     1     2     3     4  |  5     6     7     8  |  9
    op        embed conv  relu  conv  relu  relu' conv' relu' conv'  update
    reads     w     x     a     b     c     c d   b g   a g   x g    w g
    writes    x     a     b     c     d     g     g     g     g      w
    live      5     9     17    21    25    26    18    10    6      2

w (1) persists; x, a, c, d (4), b (8) and g (1) do not. x waits over ticks 2 to 8, a over 3 to 7, b over 4 to 6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.outside import published_trace
from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR, RUNTIME_EXECUTOR, AllocationKind, Capabilities, Plan, Repeat
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.planner.problem.problem import Problem, make_problem
from tieroff.planner.simulate.simulator import simulate
from tieroff.study.policies.activations import capuchin
from tieroff.study.policies.activations.capuchin import plan_capuchin
from tieroff.study.policies.activations.flashneuron import plan_flashneuron
from tieroff.study.policies.activations.ssdtrain import plan_ssdtrain
from tieroff.study.policies.activations.tflms import plan_tflms
from tieroff.study.policies.activations.vdnn import plan_vdnn_all, plan_vdnn_conv, plan_vdnn_dyn
from tieroff.study.policies.online import sentinel
from tieroff.study.policies.online.sentinel import plan_sentinel
from tieroff.study.policies.shared.reading import Phase, is_weighted, layers, phases, saved_slots
from tieroff.units import GIB, MIB

Moves = set[tuple[str, str, int, int]]

_NS_PER_MS = 1_000_000
_OPS = (
    ("embed_forward", "w", "x"),
    ("conv_forward", "x", "a"),
    ("relu_forward", "a", "b"),
    ("conv_forward", "b", "c"),
    ("relu_forward", "c", "d"),
    ("relu_backward", "cd", "g"),
    ("conv_backward", "bg", "g"),
    ("relu_backward", "ag", "g"),
    ("conv_backward", "xg", "g"),
    ("apply_grad", "wg", "w"),
)
_SIZES = {"w": 1, "x": 4, "a": 4, "b": 8, "c": 4, "d": 4, "g": 1}
_NAMES = "".join(_SIZES)
_ALL = (plan_vdnn_all, plan_vdnn_conv, plan_vdnn_dyn, plan_tflms, plan_flashneuron, plan_ssdtrain, plan_capuchin, plan_sentinel)


def small_trace() -> Trace:
    tensors = tuple(
        Tensor(name, size * MIB, TensorClass.PARAMETER if name == "w" else TensorClass.ACTIVATION, name == "w")
        for name, size in _SIZES.items()
    )
    ops = tuple(
        Op(name, (5 if index < 5 else 10) * _NS_PER_MS, tuple(map(_NAMES.index, reads)), (_NAMES.index(write),))
        for index, (name, reads, write) in enumerate(_OPS)
    )
    return Trace(ops, tensors, name="small")


def small_problem(
    device_mib: float, *, nvme_mib: int = 0, gb_per_s: float = 1.0, capabilities: Capabilities = IDEAL_EXECUTOR
) -> Problem:
    rate = round(gb_per_s * 10**9)
    machine = Machine(
        name="small", d2h_bytes_per_s=rate, h2d_bytes_per_s=rate, nvme_write_bytes_per_s=rate, nvme_read_bytes_per_s=rate
    )
    budget = {Tier.DEVICE: round(device_mib * MIB), Tier.HOST: 64 * MIB, Tier.NVME: nvme_mib * MIB}
    return make_problem(small_trace(), machine, budget, capabilities)


def moves_of(plan: Plan, problem: Problem) -> Moves:
    """Returns name, direction, issue and deadline of every transfer of a plan that passes the checker."""
    check(plan, problem.trace, problem.capabilities)
    return {(_NAMES[t.tensor], "in" if t.target is Tier.DEVICE else "out", t.issue_at, t.ready_by) for t in plan.transfers}


_X_A_B_BESIDE_LAYERS = {("x", "out", 1, 2), ("a", "out", 2, 3), ("b", "out", 3, 4), ("b", "in", 5, 6), ("a", "in", 6, 7)}


def test_trace_is_as_its_table_says() -> None:
    problem = small_problem(20)
    assert (problem.live // MIB).tolist() == [5, 9, 17, 21, 25, 26, 18, 10, 6, 2]
    assert [(_NAMES[s.tensor], s.start, s.stop) for s in saved_slots(problem)] == [("x", 2, 8), ("a", 3, 7), ("b", 4, 6)]
    assert phases(problem.trace) == (*[Phase.FORWARD] * 5, *[Phase.BACKWARD] * 4, Phase.OPTIMIZER)
    assert layers(problem.trace) == (0, 1, 2, 3, 4, 4, 3, 2, 1, 1)
    assert [i for i, found in enumerate(is_weighted(problem.trace)) if found] == [1, 3, 6, 8]


def test_phases_of_a_trace_that_tells_nothing_turn_where_most_bytes_are() -> None:
    trace = small_trace()
    silent = replace(trace, ops=tuple(replace(op, name=f"op{i}") for i, op in enumerate(trace.ops)))
    assert phases(silent) == (*[Phase.FORWARD] * 6, *[Phase.BACKWARD] * 4)
    modular = replace(trace, ops=tuple(replace(op, module="ab"[i // 2 % 2]) for i, op in enumerate(trace.ops)))
    assert layers(modular)[:5] == (0, 0, 1, 1, 2)


@pytest.mark.parametrize("policy", _ALL)
@pytest.mark.parametrize("capabilities", [IDEAL_EXECUTOR, RUNTIME_EXECUTOR])
def test_nothing_moves_when_everything_fits(policy: Callable[[Problem], Plan], capabilities: Capabilities) -> None:
    problem = small_problem(26, nvme_mib=64, capabilities=capabilities)
    assert policy(problem).moves_nothing
    assert not policy(small_problem(25, nvme_mib=64, capabilities=capabilities)).moves_nothing


def test_vdnn_all_sends_inputs_beside_their_last_layer_and_fetches_one_layer_ahead() -> None:
    problem = small_problem(20)
    assert moves_of(plan_vdnn_all(problem), problem) == _X_A_B_BESIDE_LAYERS | {("x", "in", 7, 8)}


def test_vdnn_conv_sends_inputs_of_convolutions_and_fetches_over_other_layers() -> None:
    """x is looked for from layer 3, since layer 2 is no convolution; it is awaited at the layer's end, before its use."""
    problem = small_problem(22)
    expected = {("x", "out", 1, 2), ("b", "out", 3, 4), ("b", "in", 5, 6), ("x", "in", 6, 7)}
    assert moves_of(plan_vdnn_conv(problem), problem) == expected


def test_vdnn_search_ends_at_a_convolution_whose_inputs_are_not_to_be_fetched() -> None:
    """With a convolution in place of tick 2's op, and its input pinned, backward finds nothing below it in time."""
    trace = small_trace()
    ops = tuple(replace(op, name="conv_forward") if index == 2 else op for index, op in enumerate(trace.ops))
    tensors = tuple(replace(tensor, is_movable=tensor.name != "a") for tensor in trace.tensors)
    base = small_problem(24)
    problem = make_problem(replace(trace, ops=ops, tensors=tensors), base.machine, base.budget, IDEAL_EXECUTOR)
    expected = {("x", "out", 1, 2), ("b", "out", 3, 4), ("b", "in", 5, 6), ("x", "in", 7, 8)}
    assert moves_of(plan_vdnn_conv(problem), problem) == expected


def test_vdnn_dyn_takes_the_smallest_set_that_fits() -> None:
    for device_mib, same in ((22, plan_vdnn_conv), (20, plan_vdnn_all)):
        problem = small_problem(device_mib)
        assert plan_vdnn_dyn(problem).transfers == same(problem).transfers
    assert plan_vdnn_conv(small_problem(20)).peak_bytes[Tier.DEVICE] == 22 * MIB


def test_tflms_moves_what_is_consumed_most_levels_away_and_fetches_as_early_as_fits() -> None:
    """0.9 of 24 MiB and w make 22.6: threshold 7 moves x alone, 8 nothing. A load at tick 5 would make 26, at 6 18."""
    problem = small_problem(25)
    assert moves_of(plan_tflms(problem), problem) == {("x", "out", 1, 3), ("x", "in", 6, 8)}


def test_tflms_makes_swap_outs_synchronous_where_nothing_else_fits() -> None:
    """0.9 of 14 MiB and w make 13.6: a swap-out that takes an op leaves 17 at tick 2, one that takes none 13."""
    problem = small_problem(15)
    plan = plan_tflms(problem)
    leaves = {("x", "out", 2, 2), ("a", "out", 3, 3), ("b", "out", 4, 4)}
    assert moves_of(plan, problem) == leaves | {("b", "in", 6, 6), ("a", "in", 7, 7), ("x", "in", 8, 8)}
    assert plan.peak_bytes[Tier.DEVICE] == 13 * MIB


def test_tflms_takes_the_order_of_a_recorded_step_for_its_levels() -> None:
    """With what joins the ops left out, as a recorded step leaves it, no consumer is more than a level away."""
    base = small_problem(12)
    ops = list(base.trace.ops)
    for index, op in enumerate(ops[:9]):
        ops[index] = replace(op, reads=() if index < 5 else op.reads[:1], writes=op.writes if index < 6 else ())
    parted = replace(base.trace, ops=tuple(ops))
    plans = {
        origin: plan_tflms(make_problem(replace(parted, origin=origin), base.machine, base.budget, IDEAL_EXECUTOR))
        for origin in ("file", "step")
    }
    assert plans["file"].moves_nothing
    assert {_NAMES[t.tensor] for t in plans["step"].transfers} == {"x", "a", "b", "g"}


def test_flashneuron_sends_the_first_activations_from_the_right_end_of_the_arena() -> None:
    """Of 20 that cross the end of forward, 25.5 - w - 12 (the ops at ticks 2 and 3) = 12.5 may stay: x and a leave.

    No stretch is ever more than 12 wider than the next one to fetch, so both are fetched when they are wanted.
    """
    problem = small_problem(25.5, nvme_mib=64)
    plan = plan_flashneuron(problem)
    assert moves_of(plan, problem) == {("x", "out", 2, 3), ("a", "out", 3, 4), ("a", "in", 7, 7), ("x", "in", 8, 8)}
    assert {t.target for t in plan.transfers} == {Tier.DEVICE, Tier.NVME}
    assert plan.allocation.kind is AllocationKind.ADDRESSES
    held = zip(plan.residencies, plan.allocation.addresses, strict=True)
    found = {(_NAMES[r.tensor], r.start): address / MIB for r, address in held if r.tier is Tier.DEVICE}
    expected = {("w", 0): 0.0, ("x", 0): 21.5, ("a", 1): 17.5, ("b", 2): 1.0, ("c", 3): 9.0, ("d", 4): 13.0}
    assert found == {**expected, ("g", 5): 17.0, ("a", 7): 21.5, ("x", 8): 21.5}


def test_ssdtrain_keeps_the_last_modules_that_the_drive_cannot_hide() -> None:
    """Forward takes 25 ms. At 0.45 GB/s x (8.4 MB in 75 ms) and a (12.6 in 65) are hidden, b (25.2 in 55) is not."""
    problem = small_problem(25, nvme_mib=64, gb_per_s=0.45)
    plan = plan_ssdtrain(problem)
    assert moves_of(plan, problem) == {("x", "out", 1, 3), ("a", "out", 2, 5), ("a", "in", 6, 7), ("x", "in", 7, 8)}
    assert plan.transfers[0].target is Tier.NVME


def test_ssdtrain_forwards_what_is_still_being_written() -> None:
    """At 0.25 GB/s x and a still pass (8.4 MB in 75 ms, 12.6 in 65); a's copy ends at 38.6 ms, its fetch is due at 35."""
    problem = small_problem(25, nvme_mib=64, gb_per_s=0.25)
    assert {name for name, *_ in moves_of(plan_ssdtrain(problem), problem)} == {"x"}


def test_capuchin_swaps_the_longest_free_time_and_loads_as_late_as_hides() -> None:
    """x is idle for 45 ms, 8.4 of which are copies. Back at 55 ms, it is triggered by the op that holds 50.8 ms."""
    problem = small_problem(25)
    plan = plan_capuchin(problem)
    assert moves_of(plan, problem) == {("x", "out", 2, 3), ("x", "in", 7, 8)}
    assert simulate(plan, problem.trace, problem.machine, capuchin.OPTIONS).step_ns == problem.trace.ideal_ns


def test_capuchin_recomputes_the_most_bytes_per_time_where_swaps_would_wait() -> None:
    """At 0.1 GB/s no copy hides; each lineage is one op of 5 ms, and b is the largest."""
    problem = small_problem(25, gb_per_s=0.1)
    plan = plan_capuchin(problem)
    assert moves_of(plan, problem) == set()
    assert plan.repeats == (Repeat(2, 6),)


def test_capuchin_swaps_all_the_same_where_ops_cannot_be_repeated() -> None:
    problem = small_problem(25, gb_per_s=0.1, capabilities=RUNTIME_EXECUTOR)
    plan = plan_capuchin(problem)
    assert {name for name, *_ in moves_of(plan, problem)} == {"x"}


def test_capuchin_triggers_what_was_late_earlier() -> None:
    """50.8 ms less 10 lie within the op before."""
    problem = small_problem(25)
    choice = capuchin.SwapChoice(problem)
    choice.run()
    late = choice.plan({_NAMES.index("x"): 10 * _NS_PER_MS})
    assert moves_of(late, problem) == {("x", "out", 2, 3), ("x", "in", 6, 8)}


def test_sentinel_cuts_where_room_and_time_say() -> None:
    """With 17 only intervals of one layer fit: two layers would hold a, b, c, d and g at tick 5.

    What the next layer does not use leaves at a layer's end, w too, and comes back one layer ahead of its use.
    """
    problem = small_problem(17)
    expected = {("w", "out", 0, 2), ("w", "in", 7, 9), ("x", "out", 2, 3), ("x", "in", 7, 8), ("a", "out", 3, 4)}
    assert moves_of(plan_sentinel(problem), problem) == expected | {("a", "in", 6, 7), ("b", "out", 4, 4), ("b", "in", 5, 6)}
    assert sentinel.OPTIONS.writes_clean


def test_sentinel_keeps_away_at_the_end_of_the_step_what_may_not_cross_it() -> None:
    problem = small_problem(17, capabilities=RUNTIME_EXECUTOR)
    plan = plan_sentinel(problem)
    moves = moves_of(plan, problem)
    assert {("w", "out", 10, 10), ("w", "in", 0, 0)} <= moves


@pytest.mark.parametrize("policy", [p for p in _ALL if p not in (plan_ssdtrain, plan_flashneuron)])
def test_published_trace_is_planned_between_the_ideal_and_demand_paging(policy: Callable[[Problem], Plan]) -> None:
    problem = _published_problem("VIT-b1024", nvme_bytes=0)
    plan = policy(problem)
    check(plan, problem.trace, problem.capabilities)
    step_ns = simulate(plan, problem.trace, problem.machine).step_ns
    assert problem.trace.ideal_ns <= step_ns < 14.97e9  # the published step of demand paging with least recently used


def test_ssdtrain_leaves_a_published_trace_over_its_budget_whose_forward_is_short() -> None:
    """Backward of VIT 1024 takes 6.5 times as long as forward, not twice: what it hides is too little."""
    problem = _published_problem("VIT-b1024", nvme_bytes=1024 * GIB)
    assert plan_ssdtrain(problem).peak_bytes[Tier.DEVICE] > problem.device_bytes
    hidden = _published_problem("ResNet152-b1024", nvme_bytes=1024 * GIB)
    plan = plan_ssdtrain(hidden)
    check(plan, hidden.trace, hidden.capabilities)
    assert hidden.trace.ideal_ns <= simulate(plan, hidden.trace, hidden.machine).step_ns < 378e9


def _published_problem(name: str, *, nvme_bytes: int) -> Problem:
    rate, drive = round(15.754 * GIB), round(3.2 * GIB)
    machine = Machine(
        name="g10",
        d2h_bytes_per_s=rate,
        h2d_bytes_per_s=rate,
        nvme_write_bytes_per_s=drive,
        nvme_read_bytes_per_s=drive,
        nvme_shares_host_link=True,
    )
    budget = {Tier.DEVICE: 40 * GIB, Tier.HOST: 128 * GIB, Tier.NVME: nvme_bytes}
    return make_problem(published_trace(name), machine, budget, IDEAL_EXECUTOR)


def test_vdnn_also_moves_what_only_the_program_holds_before_backward() -> None:
    """Nobody uses h before its slot begins: it is held, as memory of an op that the trace does not show."""
    held = Tensor("h", 1, TensorClass.ACTIVATION, holds=((0, 1),))
    trace = Trace((Op("a", 1), Op("b", 1, reads=(1,)), Op("c", 1, reads=(0,))), (held, Tensor("x", 1, TensorClass.ACTIVATION)))
    machine = Machine("", "", d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9)
    problem = make_problem(trace, machine, {Tier.DEVICE: 1, Tier.HOST: 100, Tier.NVME: 0}, IDEAL_EXECUTOR)
    plan = plan_vdnn_all(problem)
    check(plan, trace, IDEAL_EXECUTOR)
    assert {move.tensor for move in plan.transfers} == {0}
