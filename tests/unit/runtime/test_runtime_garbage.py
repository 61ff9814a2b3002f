"""Steps that move tensors leave no cycles: memory goes back when its last user is done, not when the collector comes by."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import tieroff


@pytest.mark.parametrize("foreach", [False, True])
def test_planned_steps_make_no_cycles(foreach: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A library of another test sets it. With it, a PyTorch for CUDA that finds no driver loads NVML anew in each call of an
    # optimizer since torch 2.14, and each try leaves a class of ctypes.
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    config: dict[str, Any] = {
        "device": "cpu",
        "budget": {"device": "50%", "host": "64MiB", "nvme": "64MiB"},
        "nvme": {"dirs": [str(tmp_path)]},
        "plan": {"min_bytes": 0},
    }
    tieroff.wrap(model, optimizer, config)

    def step() -> None:
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(12):  # beyond the plans that are made again while the first ones settle
        step()
    gc.disable()
    try:
        gc.collect()
        step()  # what an earlier test left until now is gone with it
        gc.collect()
        for _ in range(8):
            step()
        stats = tieroff.engine(model).stats()
        assert gc.collect() == 0
    finally:
        gc.enable()
    assert stats.phase == "planned"
    assert sum(stats.moved_bytes.values()) > 0
    tieroff.unwrap(model)


def _sparse(x: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 2]]), x[0, :2] * 2, (8, 8), check_invariants=True)


def _of_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, len(x)])).exp()


def _of_a_subclass(x: torch.Tensor) -> torch.Tensor:
    return TwoTensor(x, x).exp()


@pytest.mark.parametrize("make", [_sparse, _of_rows, _of_a_subclass])
def test_a_result_of_any_layout_dies_with_a_graph_of_which_no_backward_runs(
    make: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    """An evaluation that forgot `no_grad`, or what a checkpoint computed again: the op that made it saves it."""
    made: list[weakref.ref[torch.Tensor]] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            hidden = self.first(x)
            result = make(hidden)
            made.append(weakref.ref(result))
            return self.last(hidden)

    model = Net()
    config: dict[str, Any] = {"device": "cpu", "budget": {"device": "50%", "host": "64MiB"}, "plan": {"min_bytes": 0}}
    tieroff.wrap(model, torch.optim.SGD(model.parameters()), config)
    for _ in range(5):
        model(torch.randn(8, 8))
        gc.collect()
        assert made.pop()() is None
    tieroff.unwrap(model)
