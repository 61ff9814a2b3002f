"""Loops whose events could depend on where a plan leaves a tensor: they follow plans that keep much, some or nothing."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator.users.loops import STEPS, WIDTH, Net, Program, Usage, check
from tests.support.covering import in_turn


class Cell(nn.Module):
    """Returns a hidden state, of which it has saved parts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(module for _ in range(4) for module in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden + self.net(hidden)
        return self.head(hidden), hidden


class Energy(nn.Module):
    """Returns the gradient of what it computes by its input, as force fields do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden = x.detach().requires_grad_()
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        energy = self.out(hidden)
        (force,) = torch.autograd.grad(-energy.sum(), x, create_graph=True)
        return energy, force


def state_returned(p: Program) -> None:
    p.wrap()
    for index in range(STEPS):
        hidden, loss = p.rows(index), torch.zeros(())
        for _ in range(4):
            out, hidden = p.model(hidden)
            loss = loss.to(out.device) + out.square().mean()
        loss.backward()
        p.update(loss)


def forces(p: Program) -> None:
    p.wrap()
    for index in range(STEPS):
        energy, force = p.model(p.rows(index))
        loss = energy.square().mean() + force.square().mean()
        loss.backward()
        p.update(loss)


def penalised(penalty: Callable[[Any], Tensor]) -> Usage:
    def usage(p: Program) -> None:
        p.wrap()
        for index in range(STEPS):
            loss = p.loss(index)
            loss = loss + 1e-2 * penalty(p.model)
            loss.backward()
            p.note(*[parameter.grad for parameter in p.parameters])
            p.update(loss)

    return usage


def of_all(model: Any) -> Tensor:
    return torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()


def of_some(model: Any) -> Tensor:
    return model.second.weight.norm() + model.fourth.weight.abs().sum()


def orthogonal(model: Any) -> Tensor:
    weight = model.third.weight
    return (weight @ weight.t() - torch.eye(len(weight), device=weight.device)).square().mean()


LOOPS: dict[str, tuple[Callable[[], nn.Module], Usage]] = {
    "state returned": (Cell, state_returned),
    "forces": (Energy, forces),
    "penalty on all": (Net, penalised(of_all)),
    "penalty on some": (Net, penalised(of_some)),
    "orthogonality": (Net, penalised(orthogonal)),
}


@pytest.mark.parametrize(("loop", "share"), in_turn(list(LOOPS), ["80%", "50%", "min"]))
def test_loops_follow_plans_of_every_budget(loop: str, share: str, tmp_path: Path) -> None:
    make, usage = LOOPS[loop]
    check(usage, tmp_path, make=make, policy="auto", device=share, planned=3)


@pytest.mark.parametrize("device", ["80%", "50%", "40%"])
def test_what_is_written_after_another_thread_evaluated_counts(device: str, tmp_path: Path) -> None:
    """What a pass between steps leaves on the device is the next one's, whoever reads it meanwhile."""

    def usage(p: Program) -> None:
        def evaluate(index: int) -> None:
            with torch.no_grad():
                p.note(p.model(p.rows(index)[:2]))

        p.wrap()
        for index in range(STEPS):
            p.step(index)
            evaluate(index)
            beside = threading.Thread(target=evaluate, args=(index + 1,))
            beside.start()
            beside.join()
            for parameter in p.parameters:
                parameter.data.mul_(1.25)
            evaluate(index + 2)

    check(usage, tmp_path, device=device, policy="auto")


@pytest.mark.parametrize(("device", "planned"), [("100%", 0), ("80%", 1), ("min", 1)])  # at 100 % nothing moves
def test_no_thread_counts_nodes_of_the_engine(device: str, planned: int, tmp_path: Path) -> None:
    """Backward runs nodes by their numbers, of which each thread has its own: they meet in a graph of gradients."""
    count = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]

    def usage(p: Program) -> None:
        counts: list[int] = []
        before = count()
        p.wrap()
        for index in range(STEPS):
            x = p.rows(index).requires_grad_()
            out = p.model(x)
            out.register_hook(lambda gradient: counts.append(count()))
            (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            gradients = torch.autograd.grad(slope.square().mean(), p.parameters)
            for parameter, gradient in zip(p.parameters, gradients, strict=True):
                parameter.grad = gradient
            p.update(out.sum())
        p.note(count() - before, *(later - first for first, later in itertools.pairwise(counts)))

    check(usage, tmp_path, device=device, policy="auto", planned=planned)
