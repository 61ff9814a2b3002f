"""The graph of a step, with the ways to split its ops as DTensor gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support import sharded
from tieroff.core.sharding.graph import PARTIAL, REPLICATED, OpSplit, StepGraph
from tieroff.errors import CaptureError
from tieroff.tracing.sharded.capture import capture_step
from tieroff.tracing.sharded.dtensor_strategies import DTensorSplits

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


@pytest.mark.parametrize("factory", [sharded.small_gpt, sharded.small_mlp])
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


@torch.library.custom_op("tieroff_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, grad: grad * 2)


class Unusual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = doubled(self.linear(x))
        return result


def test_an_op_that_nobody_knows_runs_whole_and_is_named() -> None:
    graph: StepGraph = capture_step(lambda: (Unusual(), (torch.randn(4, 8),)), sharded.MACHINE)
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
