"""Copies that are late, blocks that are used again, and what only some classes of tensors do: each once gave wrong numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tieroff
from tests.accelerator import sim, target
from tests.support.models import GPT_WORKLOAD, MLP_WORKLOAD
from tests.support.parity import HOST, Tiers, Trainer, assert_equal, check_parity, config_for, run_plain

LATE_S = 0.003


class Sparse(nn.Module):
    """An embedding whose gradient is sparse, and so cannot move while its weight does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16, sparse=True)
        self.out = nn.Linear(16, 16)

    def forward(self, index: Tensor) -> Tensor:
        return torch.tanh(self.out(self.table(index)))


def step_of(trainer: Trainer) -> None:
    trainer.loss().backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def test_a_block_of_pinned_memory_is_not_used_again_under_a_late_copy(tmp_path: Path) -> None:
    """Host memory that is just enough: what one tensor leaves, another takes, while the copy before may not have begun."""
    sim.set_late_links(LATE_S)
    check_parity(MLP_WORKLOAD, replace(HOST, host_bytes=256 << 10), target.backend, tmp_path)


@pytest.mark.parametrize("cover", [["parameters"], ["activations"], ["optimizer"], ["parameters", "gradients"]], ids="-".join)
def test_only_what_is_covered_moves(cover: list[str], tmp_path: Path) -> None:
    """Gradients that stay are summed, clipped and stepped beside parameters that move: all of it on the device."""
    plain = run_plain(GPT_WORKLOAD, target.device())
    trainer = Trainer(GPT_WORKLOAD, target.device())
    config = config_for(HOST, tmp_path)
    config["plan"]["cover"] = cover
    tieroff.wrap(trainer.model, trainer.optimizer, config, backend=target.backend())
    for index in range(GPT_WORKLOAD.steps):
        trainer.run(index)
    stats = tieroff.engine(trainer.model).stats()
    tieroff.unwrap(trainer.model)
    assert (stats.phase, stats.fallbacks) == ("planned", 0)
    assert_equal(plain, trainer.finish())


def test_a_sparse_gradient_of_a_parameter_that_moves(tmp_path: Path) -> None:
    def build(**wrapping: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = Sparse().to(target.device())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if wrapping:
            tieroff.wrap(model, optimizer, **wrapping)
        seen = []
        for index in range(6):
            torch.manual_seed(index)
            loss = model(torch.randint(32, (8,)).to(target.device())).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach().cpu())
        if wrapping:
            assert tieroff.engine(model).stats().phase == "planned"
            tieroff.unwrap(model)
        return [*seen, *(p.detach().cpu() for p in model.parameters())]

    assert all(map(torch.equal, build(), build(config=config_for(HOST, tmp_path), backend=target.backend())))


@pytest.mark.parametrize("late_s", [0, LATE_S], ids=["prompt", "late"])
def test_writes_of_user_code_between_steps_are_what_the_next_step_reads(late_s: float, tmp_path: Path) -> None:
    def write(trainer: Trainer) -> None:
        step_of(trainer)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(0.99)
                parameter.data.add_(1e-3)

    sim.set_late_links(late_s)
    workload = replace(MLP_WORKLOAD, step=write)
    tiers: Tiers = HOST
    check_parity(workload, tiers, target.backend, tmp_path)


def test_the_host_may_be_far_ahead_of_the_device(tmp_path: Path) -> None:
    """Nothing in the loop waits for the device: steps are issued before the first copy of the first one has moved a byte."""

    def run(trainer: Trainer) -> list[Tensor]:
        for _ in range(6):
            torch.manual_seed(3)
            step_of(trainer)
        return [parameter.detach().cpu() for parameter in trainer.model.parameters()]

    plain = run(Trainer(MLP_WORKLOAD, target.device()))
    trainer = Trainer(MLP_WORKLOAD, target.device())
    tieroff.wrap(trainer.model, trainer.optimizer, config_for(HOST, tmp_path), backend=target.backend())
    sim.set_late_links(LATE_S)
    wrapped = run(trainer)
    tieroff.unwrap(trainer.model)
    assert all(map(torch.equal, plain, wrapped))
