"""What user code does to gradients between backward and update, and its largest call, as uses that a plan provides for."""

from __future__ import annotations

from dataclasses import replace

from tieroff.core.machine import Machine
from tieroff.core.plan import RUNTIME_EXECUTOR
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import LARGEST_CALL, Call, Op, Trace, largest_call
from tieroff.planner.least import infeasible, least
from tieroff.planner.problem.problem import Problem, make_problem
from tieroff.planner.user_code import bring_back, with_call, with_room

MS = 1_000_000
MIB = 2**20


def make(*gradient_mib: int, weight_mib: int = 10) -> Trace:
    """Gradient i is made in op i, user code runs in the op after them, and the updates are in the same order."""
    count = len(gradient_mib)
    tensors = [Tensor("weight", weight_mib * MIB, TensorClass.PARAMETER, True)]
    tensors += [Tensor(f"gradient {i}", size * MIB, TensorClass.GRADIENT) for i, size in enumerate(gradient_mib)]
    ops = [Op(f"backward {i}", MS, (0,), (i + 1,), phase="backward") for i in range(count)]
    ops.append(Op("user code", MS, transient_bytes=MIB, phase="backward"))
    ops += [Op(f"update {i}", MS, (i + 1,), phase="optimizer") for i in range(count)]
    return Trace(tuple(ops), tuple(tensors))


def test_what_finds_room_is_used_there_and_what_it_writes_is_written() -> None:
    trace = make(4, 4, 4)
    brought = bring_back(trace, 3, {1: True, 2: False, 3: True}, 100 * MIB, 0)
    assert brought.ops[3].reads == (1, 2, 3) and brought.ops[3].writes == (1, 3)
    assert [op for i, op in enumerate(brought.ops) if i != 3] == [op for i, op in enumerate(trace.ops) if i != 3]
    assert brought.lifetimes[1].required == ((0, 1), (3, 5)) and brought.lifetimes[1].writes == (0, 3)
    assert brought.lifetimes == Trace(brought.ops, brought.tensors).lifetimes
    assert brought.peak_bytes == trace.peak_bytes


def test_those_that_the_update_wants_first_come_first_and_a_fifth_of_the_room_stays_free() -> None:
    trace = make(4, 6, 3)
    # The weight is idle in that op, and can be away; of 10 + 1 (scratch) MiB, 8 may be filled.
    assert bring_back(trace, 3, {1: True, 2: True, 3: True}, 11 * MIB, 0).ops[3].reads == (1, 3)
    assert bring_back(trace, 3, {1: True, 2: True, 3: True}, 4 * MIB, 0) is trace


def test_what_is_there_anyway_takes_room_and_is_not_asked_for() -> None:
    trace = make(4, 4, 4, weight_mib=2)
    # Below 3 MiB nothing moves: the weight is there too.
    assert bring_back(trace, 3, {1: True, 2: True, 3: True}, 13 * MIB, 3 * MIB).ops[3].reads == (1, 2)
    assert bring_back(trace, 3, {0: True}, 100 * MIB, 3 * MIB) is trace
    assert bring_back(trace, 3, {}, 100 * MIB, 0) is trace


def test_a_tensor_that_is_dead_by_then_is_left_out() -> None:
    trace = make(4, 4)
    assert bring_back(trace, 0, {2: True}, 100 * MIB, 0) is trace


def problem_of(trace: Trace, device_bytes: int = 0) -> Problem:
    machine = Machine("made up", device_bytes=2**40, host_bytes=2**40, d2h_bytes_per_s=2**30, h2d_bytes_per_s=2**30)
    capabilities = replace(RUNTIME_EXECUTOR, tiers=(Tier.HOST,))
    return make_problem(trace, machine, {Tier.DEVICE: device_bytes, Tier.HOST: 2**40}, capabilities)


def calling(size_mib: int, *tensors: int) -> Trace:
    """One call in the op of user code uses these tensors, and needs so much."""
    trace = make(4, 4, 4)
    return replace(trace, meta={LARGEST_CALL: Call(3, size_mib * MIB, tensors).written()})


def test_a_call_is_read_as_it_was_written() -> None:
    assert largest_call({}) is None
    for call in (Call(3, 7), Call(3, 7, (1,)), Call(0, 7, (1, 5))):
        assert largest_call({LARGEST_CALL: call.written()}) == call


def test_a_call_that_needs_no_more_than_an_op_is_as_if_it_were_not() -> None:
    trace = calling(14, 1, 2, 3)
    assert least(problem_of(trace)) == least(problem_of(make(4, 4, 4)))
    assert with_call(trace, 14 * MIB) is trace and with_room(trace, 14 * MIB, 0) is trace


def test_what_a_call_uses_is_used_by_its_op_and_what_is_beside_it_is_transient() -> None:
    there = with_call(calling(20, 1, 2, 3), 14 * MIB).ops[3]
    assert there.reads == (1, 2, 3) and there.transient_bytes == 8 * MIB


def test_the_least_of_a_step_has_room_for_its_largest_call() -> None:
    trace = calling(20, 1, 2, 3)
    assert with_room(trace, 14 * MIB, 0).ops[3].transient_bytes == 20 * MIB
    assert least(problem_of(trace)).floor_bytes == 20 * MIB
    error = infeasible(problem_of(trace, 16 * MIB), "auto", 16 * MIB)
    assert error.needed_bytes == 20 * MIB and "user code" in error.why


def test_what_the_op_of_a_call_uses_itself_makes_way_for_it() -> None:
    trace = make(4, 4, 4)
    ops = (*trace.ops[:3], replace(trace.ops[3], reads=(0,)), *trace.ops[4:])
    trace = Trace(ops, trace.tensors, meta={LARGEST_CALL: Call(3, 20 * MIB, (1, 2, 3)).written()})
    assert least(problem_of(trace)).floor_bytes == 20 * MIB
    assert with_room(trace, 14 * MIB, 11 * MIB).ops[3].transient_bytes == 20 * MIB  # the weight is too small to move
