"""Programs of which no tensor is worth moving: the engine says so, and stands aside without planning."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import tieroff
from tieroff.errors import BudgetWarning
from tieroff.planner.beside.client import planner

Program = Callable[[Callable[..., object]], tuple[nn.Module, list[str]]]
LENGTHS = (7, 3, 9, 4, 6, 8, 5, 11)


def episodes(wrap: Callable[..., object]) -> tuple[nn.Module, list[str]]:
    """A forward for each move of an episode, an update after it: no two episodes are of one length."""
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    wrap(policy, optimizer)
    losses = []
    for length in LENGTHS:
        state, chances = torch.randn(1, 4), []
        for _ in range(length):
            chances.append(policy(state).log_softmax(1)[0, 0])
            state = state * 0.9 + 0.1 * torch.randn(1, 4)
        loss = -torch.stack(chances).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.item()).hex())
    return policy, losses


def by_hand(wrap: Callable[..., object]) -> tuple[nn.Module, list[str]]:
    """A line fitted without an optimizer."""
    torch.manual_seed(0)
    line = nn.Linear(4, 1)
    wrap(line)
    losses = []
    for _ in range(6):
        x = torch.randn(32, 4)
        line.zero_grad()
        loss = nn.functional.smooth_l1_loss(line(x), x.sum(1, keepdim=True))
        loss.backward()
        for parameter in line.parameters():
            assert parameter.grad is not None
            parameter.data.add_(-0.1 * parameter.grad)
        losses.append(float(loss.item()).hex())
    return line, losses


@pytest.mark.parametrize("program", [episodes, by_hand])
def test_a_program_of_small_tensors_goes_on_as_it_is(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a machine is measured, or a process asked for a plan, for a step in which nothing can move")

    monkeypatch.setattr("tieroff.session.links.measure_apart", work)
    monkeypatch.setattr(planner(), "ask", work)
    config = {"device": "cpu", "nvme": {"dirs": [str(tmp_path)]}, "budget": {"nvme": "1MiB"}}

    plain, losses = program(lambda *_arguments: None)
    with pytest.warns(BudgetWarning, match="no tensor that could move is there"):
        wrapped, found = program(partial(tieroff.wrap, config=config, budget="50%"))
    assert found == losses
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True))
    assert tieroff.engine(wrapped).stats().phase == "nothing moved"
    tieroff.unwrap(wrapped)
