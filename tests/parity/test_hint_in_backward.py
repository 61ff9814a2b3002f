"""`explain()` names updates in backward to loops that could have them, and to no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import tieroff
from tests.parity.in_backward import Use, config, make, train
from tieroff.core import describe
from tieroff.runtime.backend import CpuBackend, DelayedBackend

STEPS = 4


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def read(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


def backward_again(model: nn.Module) -> None:
    model(torch.zeros(2, 32, dtype=torch.long)).sum().backward()


def is_named(folder: Path, backend: CpuBackend, *, use: Use | None = None, hook: bool = False, is_on: bool = False) -> bool:
    model, optimizer = make()
    chosen = config(folder)
    chosen["plan"]["update_in_backward"] = is_on
    if hook:
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: None)
    tieroff.wrap(model, optimizer, chosen, backend=backend)
    train(model, optimizer, STEPS, use)
    said = tieroff.engine(model).explain()
    tieroff.unwrap(model)
    return "update_in_backward" in said


@pytest.mark.parametrize("backend", [CpuBackend, DelayedBackend])
def test_loops_that_leave_gradients_alone_are_told(
    backend: Callable[[], CpuBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(describe, "_WAITING", -1.0)
    assert is_named(tmp_path, backend())
    assert not is_named(tmp_path, backend(), is_on=True)
    assert not is_named(tmp_path, backend(), hook=True)
    for use in (clip, read, backward_again):
        assert not is_named(tmp_path, backend(), use=use), use.__name__
