"""Parts of what can move, moved alone; and tensors that a loss outside the model saves."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tieroff

STEPS = 6
KINDS = {"activations": "activation", "parameters": "parameter", "gradients": "gradient", "optimizer": "optimizer"}


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, context: Any = contextlib.nullcontext) -> list[Tensor]:
    seen = []
    for step in range(STEPS):
        torch.manual_seed(step)
        with context():
            loss = model(torch.randn(32, 16)).softmax(-1).square().sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen += [loss.detach().clone(), *(p.detach().clone() for p in model.parameters())]
        optimizer.zero_grad()
    return seen


def wrapped(folder: Path, cover: list[str]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = make()
    tieroff.wrap(
        model,
        optimizer,
        {
            "device": "cpu",
            "budget": {"device": "1GiB", "host": 0, "nvme": "8MiB"},
            "nvme": {"dirs": [str(folder)]},
            "plan": {"policy": "floor", "min_bytes": 0, "cover": cover},
        },
    )
    return model, optimizer


@pytest.mark.parametrize(
    "cover",
    [["activations"], ["parameters"], ["optimizer"], ["parameters", "gradients"], ["activations", "optimizer"], list(KINDS)],
    ids=lambda cover: "-".join(cover),
)
def test_only_what_is_covered_moves(cover: list[str], tmp_path: Path) -> None:
    expected = train(*make())
    model, optimizer = wrapped(tmp_path, cover)
    found = train(model, optimizer)
    stats = tieroff.engine(model).stats()
    tieroff.unwrap(model)
    assert all(map(torch.equal, expected, found))
    assert stats.phase == "planned"
    moved = {kind for kind, size_bytes in stats.moved_bytes_by_class.items() if size_bytes}
    assert moved == {KINDS[name] for name in cover}


def test_a_scope_moves_what_the_loss_outside_the_model_saves(tmp_path: Path) -> None:
    expected = train(*make())
    moved = []
    for is_scoped in (False, True):
        model, optimizer = wrapped(tmp_path, ["activations"])
        found = train(model, optimizer, (lambda model=model: tieroff.scope(model)) if is_scoped else contextlib.nullcontext)
        moved.append(tieroff.engine(model).stats().moved_bytes_by_class["activation"])
        tieroff.unwrap(model)
        assert all(map(torch.equal, expected, found))
    assert moved[1] > moved[0] > 0
