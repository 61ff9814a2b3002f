"""Traces: what is refused at the entrance, and steps in a row as one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tieroff.core.tensor import Tensor, TensorClass
from tieroff.core.trace import Op, Trace, validate
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
