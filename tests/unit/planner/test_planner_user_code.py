"""What user code does to gradients between backward and update, as uses that a plan provides for."""

from __future__ import annotations

from tieroff.core.tensor import Tensor, TensorClass
from tieroff.core.trace import Op, Trace
from tieroff.planner.user_code import bring_back

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
