"""Calls on the device that get tensors of several wrapped models, whose bytes may lie below, or of one that was unwrapped."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tieroff
from tests.accelerator import target
from tests.accelerator.users.loops import ROWS, SEED, STEPS, WIDTH, Net, adamw
from tests.support.parity import HOST, assert_accounts, config_for, copy_of


def batch(index: int) -> Tensor:
    torch.manual_seed(SEED + index)
    return torch.randn(ROWS, WIDTH).to(target.device())


def run(folder: Path | None, unwrapped: str | None = None) -> list[Tensor]:
    """Trains a model through another one, with an average of the first in a third; returns all that came out.

    Each is wrapped where there is a folder, and one of them is unwrapped in mid-training.
    """
    torch.manual_seed(SEED)
    first, second = Net().to(target.device()), Net().to(target.device())
    mean = copy.deepcopy(first).requires_grad_(False)
    optimizers = [adamw(first), adamw(second)]
    models = {"first": first, "second": second, "mean": mean}
    if folder is not None:
        for model, optimizer in zip(models.values(), [*optimizers, None], strict=True):
            tieroff.wrap(model, optimizer, config_for(HOST, folder, policy="floor"), backend=target.backend())
    seen: list[Tensor] = []
    for index in range(STEPS):
        if index == STEPS // 2 and unwrapped is not None and folder is not None:
            tieroff.unwrap(models.pop(unwrapped))
        loss = second(first(batch(index))).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_([*first.parameters(), *second.parameters()], 0.01)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for average, value in zip(mean.parameters(), first.parameters(), strict=True):
                average.lerp_(value, 0.1)
            torch._foreach_add_([*second.fourth.parameters()], [*mean.first.parameters()], alpha=0.1)
            seen += [copy_of(loss), copy_of(norm), copy_of(mean(batch(index)))]
        for model in models.values() if folder is not None else ():
            assert_accounts(tieroff.engine(model))
    for model in models.values() if folder is not None else ():
        tieroff.unwrap(model)
    seen += [copy_of(p) for model in (first, second, mean) for p in model.parameters()]
    return seen


@pytest.mark.parametrize("unwrapped", [None, "first", "second", "mean"])
def test_calls_that_get_tensors_of_several_models(unwrapped: str | None, tmp_path: Path) -> None:
    plain, wrapped = run(None), run(tmp_path, unwrapped)
    assert [i for i, (a, b) in enumerate(zip(plain, wrapped, strict=True)) if not torch.equal(a, b)] == []
