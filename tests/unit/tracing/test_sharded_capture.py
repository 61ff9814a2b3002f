"""The graph of a step, with the ways to split its ops as DTensor gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter

from tests.support import sharded
from tieroff.core.sharding.graph import PARTIAL, REPLICATED, OpSplit, StepGraph
from tieroff.errors import CaptureError
from tieroff.partition.dtensor_strategies import DTensorSplits, runs_on_parts
from tieroff.study.sharding.capture import capture_step

aten = torch.ops.aten


def splits_of(func: Any, *shapes: tuple[int, ...], **kwargs: Any) -> tuple[OpSplit, ...]:
    with FakeTensorMode():
        args = tuple(torch.empty(shape) for shape in shapes)
        out = func(*args, **kwargs)
    found = DTensorSplits().of(func, args, kwargs, out)
    assert found is not None
    return found


def test_a_product_is_split_by_rows_columns_and_terms() -> None:
    found = splits_of(aten.mm.default, (8, 4), (4, 6))
    assert {OpSplit((0, -1), (0,)), OpSplit((-1, 1), (1,)), OpSplit((1, 0), (PARTIAL,))} <= set(found)


def test_an_elementwise_op_is_split_along_any_dimension() -> None:
    found = splits_of(aten.add.Tensor, (8, 4), (8, 4))
    assert {OpSplit((0, 0), (0,)), OpSplit((1, 1), (1,)), OpSplit((-1, -1), (-1,))} <= set(found)
    # One operand is broadcast along the first dimension: it is whole where that is cut.
    assert OpSplit((0, REPLICATED), (0,)) in splits_of(aten.add.Tensor, (8, 4), (4,))


def test_attention_on_the_cpu_is_split_by_batch_and_heads() -> None:
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    found = splits_of(attention, (2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16))
    assert set(found) == {OpSplit((0, 0, 0), (0, 0)), OpSplit((1, 1, 1), (1, 1))}


def cut(value: torch.Tensor, placement: int) -> list[torch.Tensor]:
    """Returns what each of two groups has of a tensor."""
    if placement == PARTIAL:
        first = torch.rand_like(value)
        return [first, value - first]
    return [value, value] if placement == REPLICATED else list(value.chunk(2, placement))


def joined(parts: list[torch.Tensor], placement: int) -> torch.Tensor:
    if placement == REPLICATED:
        assert torch.allclose(parts[0], parts[1])
        return parts[0]
    return parts[0] + parts[1] if placement == PARTIAL else torch.cat(parts, placement)


def check_on_parts(func: Any, args: tuple[Any, ...], bias_sizes: int | None = None) -> int:
    """Runs an operator on the parts of every split that it has, and compares with the whole; returns how many there are."""
    flat = [value for value in args if isinstance(value, torch.Tensor)]
    results = [value for value in tree_iter(func(*args)) if isinstance(value, torch.Tensor)]
    splits = DTensorSplits().of(func, args, {}, func(*args)) or ()
    for split in splits:
        assert runs_on_parts(func)
        parts = list(zip(*map(cut, flat, split.inputs[: len(flat)]), strict=True))
        made = []
        for own in parts:
            rest = iter(own)
            local = [next(rest) if isinstance(value, torch.Tensor) else value for value in args]
            if bias_sizes is not None:
                local[bias_sizes] = [local[0].shape[1]]
            made.append([value for value in tree_iter(func(*local)) if isinstance(value, torch.Tensor)])
        for place, result in enumerate(results):
            assert torch.allclose(joined([own[place] for own in made], split.outputs[place]), result, atol=1e-9), split
    return len(splits)


def test_convolutions_and_attention_on_parts_make_the_whole() -> None:
    torch.manual_seed(1)
    x, w, b = (torch.randn(shape, dtype=torch.float64) for shape in ((4, 6, 5, 5), (8, 6, 3, 3), (8,)))
    rest: tuple[Any, ...] = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert check_on_parts(aten.convolution.default, (x, w, b, *rest)) == 3
    gradient = torch.randn(4, 8, 5, 5, dtype=torch.float64)
    backward = aten.convolution_backward.default
    assert check_on_parts(backward, (gradient, x, w, [8], *rest, [True, True, True]), bias_sizes=3) == 3
    heads = [torch.randn(2, 4, 8, 16, dtype=torch.float64) for _ in range(3)]
    assert check_on_parts(aten._scaled_dot_product_flash_attention_for_cpu.default, tuple(heads)) == 2


@pytest.mark.parametrize("factory", [sharded.small_gpt, sharded.small_mlp, sharded.small_resnet])
def test_every_op_of_a_model_is_known_and_its_splits_fit(factory: Any) -> None:
    graph = capture_step(factory, sharded.MACHINE)
    assert graph.unknown_ops == ()
    for op in graph.ops:
        for split in op.splits:
            pairs = zip((*op.inputs, *op.outputs), (*split.inputs, *split.outputs), strict=True)
            assert all(PARTIAL <= p < len(graph.tensors[t].shape) for t, p in pairs), op.name
    parameters = [i for i, tensor in enumerate(graph.tensors) if tensor.kind == "parameter"]
    assert sorted(tensor.owner for tensor in graph.tensors if tensor.owner >= 0) == parameters


def test_results_of_modules_are_named() -> None:
    graph = capture_step(sharded.small_mlp, sharded.MACHINE)
    shapes = {name: graph.tensors[index].shape for name, index in graph.outputs_of}
    assert shapes == {"up": (16, 64), "down": (16, 32), "": (16, 32)}


def test_an_op_that_nobody_knows_runs_whole_and_is_named() -> None:
    graph: StepGraph = capture_step(sharded.unusual, sharded.MACHINE)
    assert graph.unknown_ops == ("tieroff_tests.doubled.default",)
    op = next(op for op in graph.ops if not op.is_known)
    assert op.splits == (OpSplit((REPLICATED,), (REPLICATED,)),)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y if y.sum() > 0 else -y


def test_a_step_that_depends_on_values_is_refused() -> None:
    with pytest.raises(CaptureError, match="depends on values"):
        capture_step(lambda: (Branching(), (torch.randn(2, 4),)), sharded.MACHINE)
