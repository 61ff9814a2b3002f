"""Traces: what is refused at the entrance, and steps in a row as one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tieroff.core.io.json_files import load_trace_json, save_trace
from tieroff.core.tensor import Tensor, TensorClass
from tieroff.core.trace import Op, Queue, Trace, validate, with_waits
from tieroff.errors import CaptureError

_TRACE = Trace(
    ops=(Op("a", 10, (1,), (0,)), Op("b", 20, (0,), (2,)), Op("c", 30, (2,), (1,), transient_bytes=4)),
    tensors=(
        Tensor("x", 5, TensorClass.ACTIVATION, holds=((0, 2),)),
        Tensor("w", 7, TensorClass.PARAMETER, is_persistent=True, holds=((1, 2),)),
        Tensor("g", 7, TensorClass.GRADIENT, owner=1, lives_until=3),
    ),
    name="net",
)


def _op(**changes: object) -> Trace:
    return replace(_TRACE, ops=(*_TRACE.ops[:2], replace(_TRACE.ops[2], **changes)))  # type: ignore[arg-type]


def _tensor(**changes: object) -> Trace:
    return replace(_TRACE, tensors=(*_TRACE.tensors[:2], replace(_TRACE.tensors[2], **changes)))  # type: ignore[arg-type]


def test_sound_trace_passes() -> None:
    validate(_TRACE)


@pytest.mark.parametrize(
    ("trace", "part"),
    [
        (replace(_TRACE, ops=()), "expected at least one op"),
        (_op(reads=(3,)), r"ops\[2\] \(c\): expected tensors 0 to 2, got 3"),
        (_op(writes=(-1,)), r"ops\[2\] \(c\): expected tensors 0 to 2, got -1"),
        (_op(duration_ns=-1), r"ops\[2\] \(c\): .* >= 0, got -1 and 4"),
        (_op(transient_bytes=-4), r"ops\[2\] \(c\): .* >= 0, got 30 and -4"),
        (_tensor(size_bytes=0), r"tensors\[2\] \(g\): expected size_bytes > 0, got 0"),
        (_tensor(size_bytes=-7), r"tensors\[2\] \(g\): expected size_bytes > 0, got -7"),
        (_tensor(name="w"), r"tensors\[2\] \(w\): expected names that are unique"),
        (_tensor(owner=3), r"tensors\[2\] \(g\): expected owner to be -1 or a tensor below 3, got 3"),
        (_tensor(owner=-2), r"tensors\[2\] \(g\): expected owner to be -1 or a tensor below 3, got -2"),
        (_tensor(owner=2), r"tensors\[2\] \(g\): expected owners without a cycle"),
        (_tensor(lives_until=4), r"tensors\[2\] \(g\): expected lives_until to be -1 or at most 3, got 4"),
        (_tensor(lives_until=-2), r"tensors\[2\] \(g\): expected lives_until to be -1 or at most 3, got -2"),
        (_tensor(holds=((0, 4),)), r"tensors\[2\] \(g\): expected holds .* within 0 to 3, got \(0, 4\) after 0"),
        (_tensor(holds=((-1, 1),)), r"expected holds .* got \(-1, 1\) after 0"),
        (_tensor(holds=((1, 1),)), r"expected holds .* got \(1, 1\) after 0"),
        (_tensor(holds=((1, 3), (0, 1))), r"expected holds .* got \(0, 1\) after 3"),
        (_tensor(holds=((0, 2), (1, 3))), r"expected holds .* got \(1, 3\) after 2"),
    ],
)
def test_trace_that_cannot_be_is_refused_with_its_place(trace: Trace, part: str) -> None:
    with pytest.raises(CaptureError, match="net.json: " + part if part.startswith("ops") else part):
        validate(trace, "net.json")


def test_owners_that_own_each_other_are_refused_however_long_the_chain() -> None:
    tensors = tuple(Tensor(f"t{i}", 1, TensorClass.GRADIENT, owner=i - 1) for i in range(5))
    validate(Trace((Op("a", 1),), tensors))
    ring = (replace(tensors[0], owner=4), *tensors[1:])
    with pytest.raises(CaptureError, match="without a cycle"):
        validate(Trace((Op("a", 1),), ring))
    tail = (replace(tensors[0], owner=2), *tensors[1:])
    with pytest.raises(CaptureError, match="without a cycle"):
        validate(Trace((Op("a", 1),), tail))


def _communicating(*changes: tuple[int, dict[str, object]]) -> Trace:
    """Gathers weights beside a product, which the second product needs; the last op waits for the reduced gradient."""
    tensors = (
        Tensor("shard", 2, TensorClass.PARAMETER, is_persistent=True),
        Tensor("weights", 4, TensorClass.ACTIVATION),
        Tensor("gradient", 4, TensorClass.ACTIVATION),
        Tensor("reduced", 2, TensorClass.GRADIENT),
    )
    ops = [
        Op("gather", 30, (0,), (1,), queue=Queue.COMMUNICATION),
        Op("first", 20),
        Op("second", 10, (1,), (2,), awaits=0),
        Op("reduce", 50, (2,), (3,), queue=Queue.COMMUNICATION),
        Op("third", 5),
        Op("update", 5, (3, 0), (0,), awaits=3),
    ]
    for index, change in changes:
        ops[index] = replace(ops[index], **change)  # type: ignore[arg-type]
    return Trace(tuple(ops), tensors, name="net")


def test_communication_runs_beside_compute_until_it_is_awaited() -> None:
    trace = _communicating()
    validate(trace)
    assert trace.starts_ns == (0, 0, 30, 40, 40, 90, 95)
    assert (trace.ideal_ns, sum(trace.compute_ns)) == (95, 40)
    assert trace.done_at == (2, 2, 3, 5, 5, 6)
    assert [life.required for life in trace.lifetimes] == [((0, 2), (5, 6)), ((0, 3),), ((2, 5),), ((3, 6),)]
    assert trace.lifetimes[3].writes == (3, 4)


def test_communication_that_nothing_awaits_ends_with_the_step() -> None:
    trace = _communicating((5, {"reads": (0,), "awaits": -1}))
    validate(trace)
    assert trace.ideal_ns == 90 and trace.done_at[3] == 6


def test_queues_are_part_of_the_structure_and_survive_a_file(tmp_path: Path) -> None:
    trace = _communicating()
    save_trace(trace, tmp_path / "trace.json")
    assert load_trace_json(tmp_path / "trace.json") == trace
    assert trace.digest != _communicating((4, {"awaits": 0})).digest
    plain = replace(trace, ops=tuple(replace(op, queue=Queue.COMPUTE, awaits=-1) for op in trace.ops))
    assert (
        plain.digest == "fbe62bf3ff9ace491c745bf95eab281b"
    )  # of a trace without communication, as before there was a second queue


def test_waits_are_found_where_data_needs_them() -> None:
    trace = _communicating()
    assert with_waits(replace(op, awaits=-1) for op in trace.ops) == trace.ops
    written = _communicating((4, {"writes": (2,)}))
    assert [op.awaits for op in with_waits(written.ops)] == [-1, -1, 0, -1, 3, -1]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ((1, {"awaits": 2}), r"ops\[1\] \(first\): expected awaits to be -1 or an op of communication before it, got 2"),
        ((5, {"awaits": 4}), r"ops\[5\] \(update\): expected awaits .* got 4"),
        ((3, {"awaits": 0}), r"ops\[3\] \(reduce\): expected communication that awaits nothing"),
        ((3, {"transient_bytes": 1}), r"ops\[3\] \(reduce\): expected communication .* transient_bytes = 1"),
        ((1, {"reads": (1,)}), r"ops\[1\] \(first\): .* touches tensor 1 \(weights\), which is awaited at op 2 only"),
        ((4, {"writes": (2,)}), r"ops\[4\] \(third\): .* touches tensor 2 \(gradient\), which is awaited at op 5 only"),
    ],
)
def test_waits_that_data_contradicts_are_refused(change: tuple[int, dict[str, object]], part: str) -> None:
    with pytest.raises(CaptureError, match=part):
        validate(_communicating(change), "net.json")
