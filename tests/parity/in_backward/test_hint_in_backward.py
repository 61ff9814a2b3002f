"""`explain()` names updates in backward to loops that could have them, and to no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import tieroff
from tests.support.delayed import DelayedBackend
from tests.support.in_backward import Use, backward_again, clip, config, make, read, train
from tieroff.core.explain import describe
from tieroff.runtime.backend.cpu import CpuBackend

STEPS = 4


def wrapped(folder: Path, backend: CpuBackend, *, is_on: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = make()
    chosen = config(folder)
    chosen["plan"]["update_in_backward"] = is_on
    tieroff.wrap(model, optimizer, chosen, backend=backend)
    return model, optimizer


def is_named(model: nn.Module) -> bool:
    said = tieroff.engine(model).explain()
    tieroff.unwrap(model)
    return "update_in_backward" in said


@pytest.fixture(params=[CpuBackend, DelayedBackend])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], CpuBackend]:
    monkeypatch.setattr(describe, "STALLED_SHARE", -1.0)
    made: Callable[[], CpuBackend] = request.param
    return made


@pytest.mark.parametrize("use", [None, clip, read, backward_again])
def test_loop_that_leaves_gradients_alone_is_told(use: Use | None, backend: Callable[[], CpuBackend], tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, backend())
    train(model, optimizer, STEPS, use)
    assert is_named(model) == (use is None)


@pytest.mark.parametrize("use", [None, clip, read])
def test_loop_whose_gradients_stay_on_the_device(use: Use | None, backend: Callable[[], CpuBackend], tmp_path: Path) -> None:
    """As under LoRA, where each gradient is small: what the loop does with them counts wherever they lie."""
    model, optimizer = make()
    chosen = config(tmp_path, "80%")
    chosen["plan"] |= {"update_in_backward": False, "cover": ["activations", "parameters", "optimizer"]}
    tieroff.wrap(model, optimizer, chosen, backend=backend())
    train(model, optimizer, STEPS, use)
    assert is_named(model) == (use is None)


def test_loop_that_has_it_or_cannot_have_it_is_not_told(backend: Callable[[], CpuBackend], tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, backend(), is_on=True)
    train(model, optimizer, STEPS)
    assert not is_named(model)
    model, optimizer = wrapped(tmp_path, backend())
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: None)
    train(model, optimizer, STEPS)
    assert not is_named(model)


def test_gradients_that_are_kept_or_summed_are_not_left_alone(backend: Callable[[], CpuBackend], tmp_path: Path) -> None:
    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        x = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(step))
        loss: torch.Tensor = model(x).square().mean()
        return loss

    for micro_batches, sets_to_none in ((2, True), (1, False)):
        model, optimizer = wrapped(tmp_path, backend())
        for step in range(STEPS + 2):
            for _ in range(micro_batches):
                loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=sets_to_none)
        assert not is_named(model)
