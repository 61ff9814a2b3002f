"""A traced step that never ends, as after an exception in a notebook, does not keep other models from their plans."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import tieroff


def wrapped(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    config: dict[str, Any] = {
        "device": "cpu",
        "budget": {"device": "60%", "host": "64MiB", "nvme": "64MiB"},
        "nvme": {"dirs": [str(folder)]},
        "plan": {"min_bytes": 0},
    }
    tieroff.wrap(model, optimizer, config)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 32)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("is_kept", [False, True], ids=["dropped", "kept"])
def test_the_next_model_is_planned(is_kept: bool, tmp_path: Path) -> None:
    stuck, stuck_optimizer = wrapped(tmp_path)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        stuck(torch.randn(8, 31))
    stuck(torch.randn(8, 32))  # and never a backward
    if not is_kept:
        del stuck, stuck_optimizer
    model, optimizer = wrapped(tmp_path)
    for _ in range(6):
        step(model, optimizer)
    assert tieroff.engine(model).stats().phase == "planned"
    assert _get_current_dispatch_mode_stack() == []
    if is_kept:  # what was given up is traced anew
        for _ in range(4):
            step(stuck, stuck_optimizer)
        assert tieroff.engine(stuck).stats().phase == "planned"
        tieroff.unwrap(stuck)
    tieroff.unwrap(model)


def test_a_model_that_waited_long_is_planned_like_any_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Steps that were not traced because another one was are no sign that the steps do not repeat."""
    caplog.set_level(logging.INFO, "tieroff")
    model, optimizer = wrapped(tmp_path)
    for _ in range(8):
        other, other_optimizer = wrapped(tmp_path)
        other(torch.randn(8, 32))
        step(model, optimizer)
        tieroff.unwrap(other)
        del other_optimizer
    for _ in range(4):
        step(model, optimizer)
    assert "this one's turn comes later" in caplog.text
    assert tieroff.engine(model).stats().phase == "planned"
    tieroff.unwrap(model)
