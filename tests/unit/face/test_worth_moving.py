"""Shares that could save next to nothing: nothing moves, and the person is told how to have it moved."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import tieroff
from tieroff.errors import BudgetWarning


def train(
    folder: Path, budget: str = "", min_bytes: str = "64KiB", *, is_strict: bool = False
) -> tuple[list[float], str, list[str]]:
    """Trains a model whose step takes some 3 MiB; returns losses, what its last step was, and what was said."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    losses, phase = [], ""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", BudgetWarning)
        if budget:
            config = {"device": "cpu", "nvme": {"dirs": [str(folder)]}, "plan": {"min_bytes": min_bytes}}
            tieroff.wrap(model, optimizer, {**config, "budget": {"nvme": "64MiB", "strict": is_strict}}, budget=budget)
        for _ in range(6):
            optimizer.zero_grad()
            loss = model(torch.randn(32, 256)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if budget:
            phase = tieroff.engine(model).stats().phase
            tieroff.unwrap(model)
    return losses, phase, [str(one.message) for one in said if one.category is BudgetWarning]


def test_a_share_that_saves_next_to_nothing_moves_nothing_and_says_so(tmp_path: Path) -> None:
    plain, _, _ = train(tmp_path)
    losses, phase, said = train(tmp_path, "70%")
    assert losses == plain
    assert phase == "nothing moved"
    assert len(said) == 1
    assert "less than 2.00 MiB is not worth its time: nothing moves" in said[0]


@pytest.mark.parametrize(
    ("budget", "min_bytes", "is_strict"),
    [("min", "64KiB", False), ("2000KiB", "64KiB", False), ("70%", "64KiB", True), ("70%", "8KiB", False)],
)
def test_what_the_message_names_has_it_moved(budget: str, min_bytes: str, is_strict: bool, tmp_path: Path) -> None:
    losses, phase, said = train(tmp_path, budget, min_bytes, is_strict=is_strict)
    assert losses == train(tmp_path)[0]
    assert phase == "planned"
    assert [message for message in said if "not worth" in message] == []
