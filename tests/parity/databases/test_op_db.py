"""Every differentiable operator in PyTorch's database, inside a wrapped module with everything moved out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_map

from tests.support.databases import check_step_parity, quiet, tensors_in
from tests.support.parity import BACKENDS, SEED

DTYPES = (torch.float64, torch.float32, torch.complex128, torch.bfloat16)

# Operators that do not compute the same, and why. A line whose operator does fails the test.
LEFT_OUT = {"prod": "traced step only: under any dispatch mode torch's backward takes another formula, whose last bit differs"}


class Applied(nn.Module):
    """Applies an operator twice: each input that requires grad is once a parameter and once an intermediate result."""

    def __init__(self, op: Any, sample: Any) -> None:
        super().__init__()
        self.op, self.sample = op, sample
        self.values = nn.ParameterList(
            nn.Parameter(tensor.detach().clone()) for tensor in tensors_in(self.arguments) if tensor.requires_grad
        )

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.sample.input, self.sample.args, self.sample.kwargs

    def forward(self) -> list[Any]:
        return [self.apply_op(parity) for parity in (0, 1)]

    def apply_op(self, parity: int) -> Any:
        position = -1

        def replace(leaf: Any) -> Any:
            nonlocal position
            if not (isinstance(leaf, Tensor) and leaf.requires_grad):
                return leaf.clone() if isinstance(leaf, Tensor) else leaf
            position += 1
            value = self.values[position]
            return value if position % 2 == parity else value * 1

        value, args, kwargs = tree_map(replace, self.arguments)
        return self.sample.output_process_fn_grad(self.op(value, *args, **kwargs))


def dtype_for(op: Any) -> torch.dtype | None:
    supported = op.supported_backward_dtypes(torch.device("cpu").type)
    return next((dtype for dtype in DTYPES if dtype in supported), None)


def first_sample(op: Any) -> Any:
    """Returns the first sample with bytes to move, or None."""
    torch.manual_seed(SEED)
    for sample in op.sample_inputs("cpu", dtype_for(op), requires_grad=True):
        if any(t.requires_grad and t.numel() for t in tensors_in((sample.input, sample.args, sample.kwargs))):
            return sample
    return None


def check_operator(op: Any, backend: str, folder: Path) -> None:
    with quiet():
        sample = first_sample(op)
        assert sample is not None, "no sample has an input to move"

        def build() -> tuple[nn.Module, nn.Module]:
            model = Applied(op, sample)
            return model, model

        moved = check_step_parity(build, BACKENDS[backend](), folder)
    assert moved["parameter"] > 0


OPERATORS = [op for op in op_db if op.supports_autograd and dtype_for(op) is not None]


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.formatted_name)
def test_operator_computes_the_same_wrapped(op: Any, backend: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    if op.formatted_name not in LEFT_OUT:
        check_operator(op, backend, folder)
        return
    with pytest.raises(AssertionError, match="differs"):
        check_operator(op, backend, folder)


def test_what_is_left_out_exists() -> None:
    assert LEFT_OUT.keys() <= {op.formatted_name for op in OPERATORS}
