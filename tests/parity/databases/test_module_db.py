"""Every module in PyTorch's database, wrapped with everything moved out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_map

from tests.support.databases import check_step_parity, quiet
from tests.support.parity import BACKENDS, SEED


class Surrounded(nn.Module):
    """A module behind a scale, so that what it saves is an intermediate result even if it has no parameters."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.full((1,), 0.5, dtype=torch.float64))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def scaled(leaf: Any) -> Any:
            is_float = isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_floating_point()
            return leaf * self.scale.to(leaf.dtype) if is_float else leaf

        args, kwargs = tree_map(scaled, (args, kwargs))
        return self.inner(*args, **kwargs)


def builder_for(info: Any, device: str = "cpu") -> Callable[[], tuple[nn.Module, Callable[[], Any]]]:
    """Returns what makes the module, on a device, from its first sample that has a forward."""
    dtype = torch.float64 if torch.float64 in info.dtypes else info.dtypes[0]

    def build() -> tuple[nn.Module, Callable[[], Any]]:
        torch.manual_seed(SEED)
        samples = info.module_inputs_func(info, device=device, dtype=dtype, requires_grad=True, training=True)
        sample = next(sample for sample in samples if sample.forward_input is not None)
        torch.manual_seed(SEED)
        constructed = sample.constructor_input
        inner = info.module_cls(*constructed.args, **constructed.kwargs).to(dtype).train()
        model = Surrounded(inner).to(device)
        given = sample.forward_input

        def run() -> Any:
            args, kwargs = tree_map(fresh, (tuple(given.args), dict(given.kwargs)))
            return model(*args, **kwargs)

        if any(is_lazy(parameter) for parameter in model.parameters()):
            run()  # as tieroff.wrap asks for
        return model, run

    return build


def fresh(leaf: Any) -> Any:
    """Returns a copy that a module may write in place."""
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.formatted_name)
def test_module_computes_the_same_wrapped(info: Any, backend: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    with quiet():
        moved = check_step_parity(builder_for(info), BACKENDS[backend](), tmp_path_factory.getbasetemp())
    assert moved["parameter"] > 0
