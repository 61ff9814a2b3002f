"""Updates on the host: which buckets the CPU can run, what they take and bring, and what is left to plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tieroff.core.buckets import UPDATED_ON_DEVICE, UPDATED_ON_HOST
from tieroff.core.check.plan import check
from tieroff.core.io.json_files import load_trace_json
from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR, RUNTIME_EXECUTOR, Capabilities, HostUpdate, Plan, Repeat, Residency, Transfer
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.errors import InvalidPlanError
from tieroff.planner.auto.floor import plan_floor
from tieroff.planner.auto.portfolio import GENERATORS, plan_auto, plan_with
from tieroff.planner.extended.buckets import find_buckets
from tieroff.planner.extended.host_updates import update, updated_problems
from tieroff.planner.make_plan import default_capabilities
from tieroff.planner.problem.assemble import build_plan, plan_from
from tieroff.planner.problem.problem import Problem, live_bytes, make_problem

DEVICE, HOST = Tier.DEVICE, Tier.HOST
_MACHINE = Machine(d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9, cpu_update_bytes_per_s=5 * 10**9)
_TENSORS = (
    Tensor("w", 10, TensorClass.PARAMETER, is_persistent=True),
    Tensor("a", 100, TensorClass.ACTIVATION),
    Tensor("g", 10, TensorClass.GRADIENT, owner=0),
    Tensor("m", 100, TensorClass.OPTIMIZER, is_persistent=True),
)
_OPS = (
    Op("forward", 50, (0,), (1,), phase="forward"),
    Op("backward", 50, (0, 1), (2,), phase="backward"),
    Op("update", 10, (0, 2, 3), (0, 3), phase="optimizer"),
)
_CASE = Trace(_OPS, _TENSORS)


def _problem(
    trace: Trace = _CASE, *, host_bytes: int = 1000, caps: Capabilities = IDEAL_EXECUTOR, machine: Machine = _MACHINE
) -> Problem:
    return make_problem(trace, machine, {DEVICE: 130, HOST: host_bytes, Tier.NVME: 0}, caps)


def _changed(tensor: int, **changes: object) -> Trace:
    tensors = list(_TENSORS)
    tensors[tensor] = replace(tensors[tensor], **changes)  # type: ignore[arg-type]
    return Trace(_OPS, tuple(tensors))


def test_the_cpu_updates_where_that_is_faster_by_an_exact_amount() -> None:
    """The state does not fit beside the activation: 100 ns out and 100 ns back, against 10 out, 20 on the CPU and 10 back."""
    without = plan_with(_problem(), GENERATORS - {"updated"})
    plan = plan_auto(_problem())
    check(plan, _CASE, IDEAL_EXECUTOR)
    assert (without.step_ns, without.host_updates) == (50 + 50 + 10 + 100 + 100, ())
    assert (plan.step_ns, plan.host_updates) == (50 + 50 + 10 + 20 + 10, (HostUpdate(2, 2, 3, 20),))
    assert sorted((t.tensor, t.source) for t in plan.transfers) == [(0, HOST), (2, DEVICE)]
    assert plan.peak_bytes == {DEVICE: 120, HOST: 120, Tier.NVME: 0}


@pytest.mark.parametrize(("optimizer", "updates"), [("", False), ("AdamW", True)])
def test_a_step_is_planned_for_a_cpu_that_updates_where_its_optimizer_has_kernels(optimizer: str, updates: bool) -> None:
    trace = replace(_CASE, origin="dry", meta={UPDATED_ON_HOST: optimizer} if optimizer else {})
    can = default_capabilities(trace)
    assert (can.updates_on_host, can.updates_cross) == (updates, updates)
    assert replace(can, updates_on_host=False, updates_cross=False) == RUNTIME_EXECUTOR
    assert bool(find_buckets(_problem(trace, caps=replace(can, min_bytes=0)))) is updates


def test_the_device_updates_what_a_trace_says_that_it_does() -> None:
    name = next(tensor.name for tensor in _TENSORS if tensor.kind is TensorClass.PARAMETER)
    assert find_buckets(_problem(replace(_CASE, meta={UPDATED_ON_DEVICE: "another"})))
    assert not find_buckets(_problem(replace(_CASE, meta={UPDATED_ON_DEVICE: f"another\n{name}"})))


def test_the_device_updates_beside_a_frozen_parameter_that_only_stays_or_leaves_within_a_step() -> None:
    """The update finds it, as it has state from before; a plan with it in both places all the time is no valid one."""
    frozen = Tensor("f", 10, TensorClass.PARAMETER, is_persistent=True)
    ops = (replace(_OPS[0], reads=(0, 4)), _OPS[1], replace(_OPS[2], reads=(0, 2, 3, 4)))
    trace = Trace(ops, (*_TENSORS, frozen))
    can = replace(RUNTIME_EXECUTOR, updates_on_host=True, updates_cross=True, min_bytes=0)
    assert find_buckets(_problem(trace)) and find_buckets(_problem(caps=can))
    assert not find_buckets(_problem(trace, caps=can))


def test_gradients_leave_at_once_where_the_device_has_no_room_for_what_waits_for_a_link() -> None:
    """Both gradients would be there while the first one's copy is under way, for 60 ns of which backward has 2."""
    tensors = [Tensor(f"w{i}", 10, TensorClass.PARAMETER, is_persistent=True) for i in range(2)]
    tensors += [Tensor(f"g{i}", 60, TensorClass.GRADIENT, owner=i, lives_until=5) for i in range(2)]
    tensors += [Tensor(f"m{i}", 100, TensorClass.OPTIMIZER, is_persistent=True) for i in range(2)]
    ops = [Op("forward", 1, (0, 1), (), phase="forward")]
    ops += [Op(f"backward{i}", 1, (i,), (2 + i,), phase="backward") for i in (1, 0)]
    ops += [Op(f"update{i}", 1, (i, 2 + i, 4 + i), (i, 4 + i), phase="optimizer") for i in range(2)]
    trace = Trace(tuple(ops), tuple(tensors))
    can = replace(RUNTIME_EXECUTOR, updates_on_host=True, updates_cross=True, min_bytes=0, granule_bytes=1)
    for device_bytes, at_once in ((80, True), (150, False)):
        problem = make_problem(trace, _MACHINE, {DEVICE: device_bytes, HOST: 1000, Tier.NVME: 0}, can)
        plan = plan_auto(problem)
        check(plan, trace, can)
        assert len(plan.host_updates) == 2
        assert plan.peak_bytes[DEVICE] <= device_bytes
        copies = [t for t in plan.transfers if t.tensor == 3]
        assert [t.issue_at == t.ready_by for t in copies] == [at_once]


@pytest.mark.parametrize("caps", [RUNTIME_EXECUTOR, IDEAL_EXECUTOR])
def test_a_gradient_that_two_backwards_add_to_lies_in_the_host_between_them(caps: Capabilities) -> None:
    """The second forward takes 200 bytes for itself: the gradient of 60 has no room beside that."""
    tensors = (
        *_TENSORS[:2],
        replace(_TENSORS[2], size_bytes=60, lives_until=5),
        _TENSORS[3],
        Tensor("b", 100, TensorClass.ACTIVATION),
    )
    ops = (
        *_OPS[:2],
        Op("again", 50, (0,), (4,), transient_bytes=100, phase="forward"),
        Op("add", 50, (0, 2, 4), (2,), phase="backward"),
        _OPS[2],
    )
    trace = Trace(ops, tensors)
    can = replace(caps, updates_on_host=True, updates_cross=True, min_bytes=0, granule_bytes=1)
    slow = replace(_MACHINE, d2h_bytes_per_s=10**8, h2d_bytes_per_s=10**8)
    for device_bytes, moves in ((215, True), (280, False)):
        problem = make_problem(trace, slow, {DEVICE: device_bytes, HOST: 1000, Tier.NVME: 0}, can)
        plan = plan_auto(problem)
        check(plan, trace, can)
        assert len(plan.host_updates) == 1
        assert plan.peak_bytes[DEVICE] <= device_bytes
        loads = [t for t in plan.transfers if t.tensor == 2 and t.target is DEVICE]
        assert bool(loads) is moves
        (stay,) = (r for r in plan.residencies if r.tensor == 2 and r.tier is HOST)
        assert (stay.start < 3) is moves


@pytest.mark.parametrize("caps", [RUNTIME_EXECUTOR, IDEAL_EXECUTOR])
def test_a_gradient_that_outlives_the_step_is_loaded_after_its_update_and_before_backward_adds_to_it(
    caps: Capabilities,
) -> None:
    ops = (Op("data", 100), _OPS[0], replace(_OPS[1], reads=(0, 1, 2)), replace(_OPS[2], writes=(0, 2, 3)))
    trace = Trace(ops, (*_TENSORS[:2], replace(_TENSORS[2], is_persistent=True), _TENSORS[3]))
    can = replace(caps, updates_on_host=True, updates_cross=True, min_bytes=0, granule_bytes=1)
    problem = _problem(trace, caps=can, machine=_SLOW_CPU)
    plan = plan_auto(problem)
    check(plan, trace, can)
    assert plan.host_updates == (HostUpdate(3, 3, 4 + 1, 100),)
    moves = sorted((t.source, t.issue_at, t.ready_by) for t in plan.transfers if t.tensor == 2)
    assert moves == [(DEVICE, 3, 3), (HOST, 1, 2)]
    assert sorted((r.tier, r.start, r.stop) for r in plan.residencies if r.tensor == 2) == [(DEVICE, 1, 3), (HOST, 0, 4)]
    assert plan.step_ns == 100 + 50 + 50 + 10 + 10


def test_it_is_loaded_where_it_is_awaited_if_the_device_has_no_room_before() -> None:
    ops = (replace(_OPS[0], transient_bytes=20), replace(_OPS[1], reads=(0, 1, 2)), _OPS[2])
    trace = Trace(ops, (*_TENSORS[:2], replace(_TENSORS[2], is_persistent=True), _TENSORS[3]))
    can = replace(RUNTIME_EXECUTOR, updates_on_host=True, updates_cross=True, min_bytes=0, granule_bytes=1)
    plan = plan_auto(_problem(trace, caps=can))
    check(plan, trace, can)
    assert plan.host_updates
    assert [(t.issue_at, t.ready_by) for t in plan.transfers if (t.tensor, t.target) == (2, DEVICE)] == [(1, 1)]


def test_the_device_updates_where_the_cpu_is_slower_than_the_links() -> None:
    machine = replace(_MACHINE, cpu_update_bytes_per_s=10**9 // 2)
    assert [bucket.cpu_ns for bucket in find_buckets(_problem(machine=machine))] == [200]
    assert plan_auto(_problem(machine=machine)).host_updates == ()


def test_a_bucket_is_made_of_state_parameters_and_gradients() -> None:
    (bucket,) = find_buckets(_problem())
    assert (bucket.op, bucket.state, bucket.parameters, bucket.gradients) == (2, (3,), (0,), (2,))
    assert (bucket.cpu_ns, bucket.moved_ns) == (20, 100)


def test_what_is_left_has_no_state_and_ends_gradients_with_their_copy() -> None:
    (updated,) = updated_problems(_problem(), 5)
    rest = updated.problem
    assert updated.origin == (0, 1, 2)
    assert (rest.trace.ops[2].duration_ns, rest.trace.ops[2].reads, rest.trace.ops[2].writes) == (0, (), ())
    assert rest.budget[HOST] == 1000 - 10 - 10 - 100
    assert rest.live.tolist() == [110, 120, 10]
    assert not rest.trace.tensors[2].is_movable
    assert not rest.capabilities.updates_on_host


@pytest.mark.parametrize(
    ("trace", "reason"),
    [
        (_changed(3, is_movable=False), "state that cannot move"),
        (_changed(0, is_movable=False), "a parameter that cannot move"),
        (_changed(2, kind=TensorClass.INPUT), "an input"),
        (_changed(2, is_persistent=True), ""),
        (_changed(2, is_persistent=True, holds=((2, 4),)), "a gradient that lasts and is wanted from the update on"),
        (_changed(0, holds=((2, 3),)), ""),
        (_changed(3, is_persistent=False), "state that is born in the update"),
        (replace(_CASE, ops=(*_OPS, Op("log", 1, (2,)))), "a gradient that is read later"),
        (replace(_CASE, ops=(*_OPS, Op("clamp", 1, (0,), (0,)))), "a parameter that another op writes"),
        (replace(_CASE, ops=(*_OPS, Op("again", 1, (3,), (3,), phase="optimizer"))), "state of two updates"),
        (replace(_changed(0, holds=((2, 4),)), ops=(*_OPS, Op("log", 1))), "a parameter that is wanted from the update on"),
        (replace(_CASE, ops=(*_OPS[:2], replace(_OPS[2], phase="backward"))), "an op that is not the optimizer's"),
        (_changed(3, kind=TensorClass.ACTIVATION), "no state that the CPU's speed is known for"),
    ],
)
def test_which_buckets_the_cpu_can_update(trace: Trace, reason: str) -> None:
    assert len(find_buckets(_problem(trace))) == (not reason), reason


@pytest.mark.parametrize(
    "caps",
    [
        replace(IDEAL_EXECUTOR, updates_on_host=False),
        replace(IDEAL_EXECUTOR, wraps=False, updates_cross=False),
        replace(IDEAL_EXECUTOR, tiers=(Tier.NVME,)),
        RUNTIME_EXECUTOR,
    ],
)
def test_no_bucket_where_the_executor_cannot(caps: Capabilities) -> None:
    assert find_buckets(_problem(caps=caps)) == []


def test_no_bucket_where_the_cpu_speed_is_unknown() -> None:
    assert find_buckets(_problem(machine=replace(_MACHINE, cpu_update_bytes_per_s=0))) == []


def test_a_bucket_with_a_tiny_tensor_is_updated_only_where_tiny_ones_may_move() -> None:
    ops = (*_OPS[:2], replace(_OPS[2], reads=(0, 2, 3, 4), writes=(0, 3, 4)))
    trace = Trace(ops, (*_TENSORS, Tensor("step", 4, TensorClass.OPTIMIZER, is_persistent=True)))
    assert find_buckets(_problem(trace, caps=replace(IDEAL_EXECUTOR, min_bytes=5))) == []
    plan = plan_auto(_problem(trace))
    check(plan, trace, IDEAL_EXECUTOR)
    assert plan.host_updates and Residency(4, HOST, 0, 3) in plan.residencies


def test_state_that_the_program_holds_keeps_its_room_on_the_device() -> None:
    trace = _changed(3, size_bytes=10, holds=((0, 3),))
    updated = update(_problem(trace), find_buckets(_problem(trace)) or pytest.fail("expected a bucket"))
    plan = updated.plan(plan_floor(updated.problem))
    assert plan is not None
    check(plan, trace, IDEAL_EXECUTOR)
    held = [(r.tier, r.start, r.stop) for r in plan.residencies if r.tensor == 3]
    assert sorted(held) == [(DEVICE, 0, 3), (HOST, 0, 3)]


def _two_buckets() -> Trace:
    ops = (
        Op("forward", 50, (0, 4), (1,), phase="forward"),
        Op("backward", 50, (0, 1, 4), (2, 5), phase="backward"),
        Op("update 0", 10, (0, 2, 3), (0, 3), phase="optimizer"),
        Op("update 1", 10, (4, 5, 6), (4, 6), phase="optimizer"),
    )
    return Trace(ops, (*_TENSORS, *(replace(_TENSORS[i], name=f"{_TENSORS[i].name}1") for i in (0, 2, 3))))


def test_buckets_that_the_host_has_no_room_for_stay_on_the_device() -> None:
    trace = _two_buckets()
    assert [[b.op for b in u.buckets] for u in updated_problems(_problem(trace, host_bytes=240), 5)] == [[2, 3], [2]]
    assert [[b.op for b in u.buckets] for u in updated_problems(_problem(trace, host_bytes=239), 5)] == [[2]]
    assert list(updated_problems(_problem(trace, host_bytes=119), 5)) == []


def test_an_update_is_awaited_while_the_cpu_runs_the_next_one() -> None:
    problem = make_problem(_two_buckets(), _MACHINE, {DEVICE: 200, HOST: 1000, Tier.NVME: 0}, IDEAL_EXECUTOR)
    plan = plan_auto(problem)
    check(plan, problem.trace, IDEAL_EXECUTOR)
    # Backward, two gradients out one after the other, two updates, and the load of the second parameter: 10 ns each.
    assert [(u.issue_at, u.ready_by) for u in plan.host_updates] == [(2, 3), (3, 4)]
    assert plan.step_ns == 100 + 10 + 20 + 20 + 10


# Its parameter is used late, so that the update has the begin of the next step to end in.
_LATE = Trace((Op("data", 100), *_OPS), _TENSORS)
_SLOW_CPU = replace(_MACHINE, cpu_update_bytes_per_s=10**9)
_CROSSING = replace(IDEAL_EXECUTOR, wraps=False, splits=False)


@pytest.mark.parametrize("caps", [IDEAL_EXECUTOR, _CROSSING, replace(_CROSSING, gradient_follows_parameter=True)])
def test_an_update_may_end_in_the_next_step(caps: Capabilities) -> None:
    """The gradient goes out in 10 ns, the CPU updates beside the next step's first op, the parameter comes back in 10 ns."""
    plan = plan_auto(_problem(_LATE, caps=caps, machine=_SLOW_CPU))
    check(plan, _LATE, caps)
    assert plan.host_updates == (HostUpdate(3, 3, 4 + 1, 100),)
    assert plan.step_ns == 100 + 50 + 50 + 10 + 10
    assert Residency(2, HOST, 3, 4 + 1) in plan.residencies
    within = replace(caps, updates_cross=False, wraps=True)
    assert plan_auto(_problem(_LATE, caps=within, machine=_SLOW_CPU)).step_ns > plan.step_ns + 50


def _refused(plan: Plan, caps: Capabilities) -> str:
    with pytest.raises(InvalidPlanError) as caught:
        check(plan, _LATE, caps)
    return str(caught.value.rule)


def test_a_gradient_whose_room_is_given_away_before_its_update_ends_is_refused() -> None:
    plan = plan_auto(_problem(_LATE, caps=_CROSSING, machine=_SLOW_CPU))

    def with_gradient_until(stop: int) -> Plan:
        found = [replace(r, stop=stop) if (r.tensor, r.tier) == (2, HOST) else r for r in plan.residencies]
        return replace(plan, residencies=tuple(found))

    check(with_gradient_until(5), _LATE, _CROSSING)
    assert _refused(with_gradient_until(4), _CROSSING) == "host_update"
    assert _refused(with_gradient_until(6), _CROSSING) == "range"  # nothing reads it any more
    assert _refused(plan, replace(_CROSSING, updates_cross=False)) == "range"
    assert _refused(plan, replace(_CROSSING, updates_on_host=False)) == "capability"


def test_only_what_an_update_wrote_may_come_back_across_the_end() -> None:
    plan = plan_auto(_problem(_LATE, caps=_CROSSING, machine=_SLOW_CPU))
    across = Transfer(0, DEVICE, HOST, 3, 5, 0)
    assert _refused(replace(plan, transfers=(*plan.transfers, across)), _CROSSING) == "capability"


def test_what_updates_take_beside_copies_decides_their_share_and_not_their_duration() -> None:
    machine = replace(_MACHINE, host_memory_bytes_per_s=13 * 10**9)
    (bucket,) = find_buckets(_problem(machine=machine))
    assert (bucket.cpu_ns, bucket.beside_ns) == (20, 31)  # 17.5 and 1 each way want 19.5 of 13 GB/s, rounded up
    plan = plan_auto(_problem(machine=machine))
    check(plan, _CASE, IDEAL_EXECUTOR)
    assert plan.host_updates == (HostUpdate(2, 2, 3, 20),)
    assert plan.step_ns == 50 + 50 + 10 + 27 + 10  # nothing is copied meanwhile: 20 ns at 13 of 17.5 GB/s


def test_a_parameter_with_another_gradient_stays_where_gradients_follow() -> None:
    tensors = (*_TENSORS, Tensor("g, too", 10, TensorClass.GRADIENT, owner=0))
    ops = (_OPS[0], replace(_OPS[1], writes=(2, 4)), _OPS[2], Op("log", 1, (4,)))
    assert len(find_buckets(_problem(Trace(ops, tensors)))) == 1
    assert find_buckets(_problem(Trace(ops, tensors), caps=replace(_CROSSING, gradient_follows_parameter=True))) == []


def test_parts_of_a_parameter_are_loaded_after_its_update_alone() -> None:
    ops = (_OPS[0], _OPS[1], _OPS[2], Op("log", 5))
    problem = _problem(Trace(ops, _TENSORS))
    updated = update(problem, find_buckets(problem))
    rest = updated.problem
    residencies = [r for r in build_plan(rest, "hand", [], {}).residencies if r.tensor != 0]
    residencies += [Residency(0, DEVICE, 2, 6, 0, 4), Residency(0, DEVICE, 0, 4, 4, 10), Residency(0, HOST, 0, 4, 0, 4)]
    # The first 4 bytes would be loaded from tick 2 on, while the CPU writes them.
    drafted = plan_from(rest, "hand", residencies, [Transfer(0, HOST, DEVICE, 2, 4, 0, 0, 4)])
    check(drafted, rest.trace, rest.capabilities)
    plan = updated.plan(drafted)
    assert plan is not None
    check(plan, problem.trace, IDEAL_EXECUTOR)
    loads = sorted((t.first_byte, t.stop_byte, t.issue_at, t.ready_by) for t in plan.transfers if t.tensor == 0)
    assert loads == [(0, 4, 3, 4), (4, 0, 3, 4)]
    assert Residency(0, DEVICE, 3, 6, 0, 4) in plan.residencies


def test_a_repeat_that_would_read_what_was_updated_gives_no_plan() -> None:
    trace = replace(_CASE, ops=(*_OPS, Op("log", 1, (1,))))
    problem = _problem(trace)
    updated = update(problem, find_buckets(problem))
    plan = build_plan(updated.problem, "hand", [], {})
    assert updated.plan(replace(plan, repeats=(Repeat(0, 3),))) is None
    assert updated.plan(replace(plan, repeats=(Repeat(0, 1),))) is not None


def test_updates_on_the_host_make_a_recorded_step_faster(project: Path) -> None:
    trace = load_trace_json(project / "tests/data/traces/lstm.json")
    peak = int(live_bytes(trace).max())
    machine = replace(_MACHINE, duplex_share=0.75)
    problem = make_problem(trace, machine, {DEVICE: peak // 2, HOST: 4 * peak, Tier.NVME: 0}, IDEAL_EXECUTOR)
    plan, without = plan_auto(problem), plan_with(problem, GENERATORS - {"updated"})
    check(plan, trace, IDEAL_EXECUTOR)
    assert plan.host_updates and plan.step_ns < 0.95 * without.step_ns
