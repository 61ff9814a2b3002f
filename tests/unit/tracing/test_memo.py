"""A call answered from the memo of equal calls has the results that PyTorch's fake tensors would have given."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tieroff.tracing.memo import Memo
from tieroff.tracing.recording.arguments import tensors_in

aten = torch.ops.aten

ANSWERED: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "product": (aten.mm.default, lambda: (torch.empty(3, 4), torch.empty(4, 5))),
    "product_transposed": (aten.mm.default, lambda: (torch.empty(4, 3).t(), torch.empty(4, 5))),
    "view": (aten.transpose.int, lambda: (torch.empty(3, 4, 5)[1:], 0, 2)),
    "several_views": (aten.split.Tensor, lambda: (torch.empty(7, 4), 3)),
    "in_place": (aten.mul_.Tensor, lambda: (torch.empty(3, 4), torch.empty(4))),
    "several_results": (aten.native_layer_norm.default, lambda: (torch.empty(3, 4), [4], torch.empty(4), None, 1e-5)),
    "list": (aten.cat.default, lambda: ([torch.empty(3, 4), torch.empty(2, 4)],)),
    "lists_in_place": (aten._foreach_add_.List, lambda: ([torch.empty(3), torch.empty(2)], [torch.empty(3), torch.empty(2)])),
    "unsafe_view": (aten._unsafe_view.default, lambda: (torch.empty(3, 4), [12])),
}


def geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    size_bytes = tensor.untyped_storage().nbytes()
    return type(tensor), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, size_bytes


def shared(out: Any, args: Any) -> list[list[tuple[bool, bool]]]:
    """Per result and argument: is it the same object, has it the same memory."""
    given = list(tensors_in(args))
    return [[(o is t, o.untyped_storage()._cdata == t.untyped_storage()._cdata) for t in given] for o in tensors_in((out,))]


def asked(memo: Memo, func: Any, args: tuple[Any, ...], **kwargs: Any) -> Any:
    """Returns a call's results from the memo, None where it has none; then the call is run and noted."""
    call = memo.call_of(func, args, kwargs)
    known = memo.find(call) if call is not None else None
    if known is not None:
        assert known[1] == 7
        return known[0]
    out = func(*args, **kwargs)
    if call is not None:
        memo.note(call, func, args, kwargs, out, 7)
    return None


@pytest.mark.parametrize("name", sorted(ANSWERED))
def test_answer_has_the_geometry_and_the_memory_of_the_op_s_own_results(name: str) -> None:
    func, make = ANSWERED[name]
    with FakeTensorMode():
        memo = Memo()
        asked(memo, func, make())
        given = make()
        found = asked(memo, func, given)
        fresh = make()
        expected = func(*fresh)
    assert type(found) is type(expected)
    assert [geometry(t) for t in tensors_in((found,))] == [geometry(t) for t in tensors_in((expected,))]
    assert shared(found, given) == shared(expected, fresh)
    results = {t.untyped_storage()._cdata for t in tensors_in((found,))}
    assert len(results) == len({t.untyped_storage()._cdata for t in tensors_in((expected,))})


@pytest.mark.parametrize(
    ("first", "second"),
    [((torch.int64, 2), (torch.int64, 2.0)), ((torch.int64, 1), (torch.int64, True)), ((torch.float32, 2), (torch.float64, 2))],
)
def test_calls_that_promote_otherwise_are_told_apart(first: tuple[Any, Any], second: tuple[Any, Any]) -> None:
    with FakeTensorMode():
        memo = Memo()
        for dtype, factor in (first, second):
            args = (torch.empty(3, dtype=dtype), factor)
            assert asked(memo, aten.mul.Scalar, args) is None
        assert asked(memo, aten.mul.Scalar, (torch.empty(3, dtype=second[0]), second[1])) is not None


def test_default_dtype_tells_calls_apart() -> None:
    with FakeTensorMode():
        memo = Memo()
        asked(memo, aten.mul.Scalar, (torch.empty(3, dtype=torch.int64), 0.5))
        torch.set_default_dtype(torch.float64)
        try:
            assert asked(memo, aten.mul.Scalar, (torch.empty(3, dtype=torch.int64), 0.5)) is None
        finally:
            torch.set_default_dtype(torch.float32)


def test_calls_that_change_their_arguments_geometry_are_not_answered() -> None:
    with FakeTensorMode():
        memo = Memo()
        for _ in range(2):
            turned, grown = torch.empty(3, 4), torch.empty(0)
            assert asked(memo, aten.t_.default, (turned,)) is None
            assert asked(memo, aten.add.out, (torch.empty(3), torch.empty(3)), out=grown) is None
            assert turned.shape == (4, 3) and grown.shape == (3,)


def test_tensors_whose_values_are_known_are_not_answered() -> None:
    with FakeTensorMode():
        memo = Memo()
        for _ in range(2):
            constant = torch.tensor(2.0)
            assert isinstance(constant, FakeTensor) and constant.constant is not None
            assert asked(memo, aten.mul.Tensor, (constant, constant)) is None


def test_answered_view_lies_in_the_memory_of_its_own_base() -> None:
    with FakeTensorMode():
        memo = Memo()
        for _ in range(2):
            base = torch.empty(3, 4)
            view = asked(memo, aten.select.int, (base, 0, 1))
        assert view.untyped_storage()._cdata == base.untyped_storage()._cdata
        assert view.storage_offset() == 4
