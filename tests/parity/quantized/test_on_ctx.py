"""Tensors on a ctx beside a moved weight: they leave until their node runs, and backward finds what it finds in a plain run.

How many bytes of them are up is counted by the Function that keeps them, from the storages that it gets.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tieroff
from tests.support.parity import HOST, NVME, Outcome, Trainer, Workload, assert_equal, config_for, run_plain
from tests.support.recipes.quantized import INPUTS, Block, SquaresOf4bit
from tieroff.errors import StateError
from tieroff.runtime.backend.cpu import CpuBackend
from tieroff.runtime.hooks.forward import on_ctx

WIDTH, LAYERS, ROWS = 64, 4, 32
CHECKPOINTS = ("none", "reentrant", "non-reentrant")


class Net(nn.Module):
    def __init__(self, checkpoints: str = "none") -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(Block(SquaresOf4bit, WIDTH) for _ in range(LAYERS))
        self.checkpoints = checkpoints
        self.total = torch.zeros(ROWS, WIDTH)  # no buffer

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(True)
        for block in self.blocks:
            plain = self.checkpoints == "none"
            x = block(x) if plain else checkpoint(block, x, use_reentrant=self.checkpoints == "reentrant")
            if block.base.gives:
                block.base.given.add_(1)  # nobody has it after this
                block.base.given = None
        return x

    def bases(self) -> list[SquaresOf4bit]:
        return [block.base for block in self.blocks]


def plainly(trainer: Trainer) -> None:
    for _ in range(2):
        (trainer.loss() / 2).backward()
    trainer.update()


def written(trainer: Trainer) -> None:
    """The program writes in place what Functions keep, and nobody else has it afterwards."""
    _give(trainer)
    plainly(trainer)


def _give(trainer: Trainer) -> None:
    for base in _net(trainer).bases():
        base.gives = True


def halved(trainer: Trainer) -> None:
    """Backward writes what it finds; a second one of the same graph finds that."""

    def halve(ctx: Any, grad: Tensor) -> None:
        with torch.no_grad():
            ctx.tensors[0].mul_(0.5)

    _twice(trainer, halve)


def replaced(trainer: Trainer) -> None:
    """Backward puts something else on its ctx; a second one of the same graph finds that."""

    def replace(ctx: Any, grad: Tensor) -> None:
        ctx.tensors = [torch.ones_like(ctx.tensors[0]), ctx.tensors[1].clone()]

    _twice(trainer, replace)


def summed(trainer: Trainer) -> None:
    """Backward adds to a tensor that all of them keep, and that the program reads."""
    net = _net(trainer)
    net.total.zero_()

    def add(ctx: Any, grad: Tensor) -> None:
        ctx.tensors[0].sum().item()
        total.add_(grad)

    total = net.total
    for base in net.bases():
        base.hook = add
    plainly(trainer)
    trainer.note(total)


def shared(trainer: Trainer) -> None:
    """The same, by what is on the ctx."""
    net = _net(trainer)
    net.total.zero_()
    for base in net.bases():
        base.kept = net.total
        base.hook = _add_to_kept
    plainly(trainer)
    trainer.note(net.total)


def _add_to_kept(ctx: Any, grad: Tensor) -> None:
    ctx.kept.add_(grad)


def penalized(trainer: Trainer) -> None:
    """The loss has the gradient by the inputs in it, so that backward is differentiated, too."""
    net = _net(trainer)
    x = trainer.batch()[0].requires_grad_(True)
    loss = net(x).square().mean()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    trainer.note(loss + grad.square().sum()).backward()
    trainer.update()


def _twice(trainer: Trainer, hook: Callable[[Any, Tensor], None]) -> None:
    for base in _net(trainer).bases():
        base.hook = hook
    loss = trainer.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    trainer.update()


def _net(trainer: Trainer) -> Net:
    assert isinstance(trainer.model, Net)
    return trainer.model


def workload(step: Callable[[Trainer], None] = plainly, checkpoints: str = "none") -> Workload:
    return Workload("on ctx", lambda: Net(checkpoints), lambda: (torch.randn(ROWS, WIDTH),), step=step)


def run(work: Workload, folder: Path) -> tuple[Outcome, float]:
    """Runs wrapped, all moved; returns what it computed, and of how many inputs there was memory at once in the last step."""
    trainer = Trainer(work, torch.device("cpu"))
    config = config_for(NVME, folder, policy="floor", device="100%")
    tieroff.wrap(trainer.model, trainer.optimizer, config, backend=CpuBackend())
    for index in range(work.steps):
        INPUTS.clear()
        trainer.run(index)
    stats = tieroff.engine(trainer.model).stats()
    assert (stats.phase, stats.fallbacks) == ("planned", 0)
    outcome = trainer.finish()
    tieroff.unwrap(trainer.model)
    return outcome, INPUTS.most_bytes / (ROWS * WIDTH * 4)


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_tensors_on_a_ctx_leave_until_their_node_runs(checkpoints: str, tmp_path: Path) -> None:
    work = workload(checkpoints=checkpoints)
    plain = run_plain(work, torch.device("cpu"))
    outcome, most = run(work, tmp_path)
    assert_equal(plain, outcome)
    assert most <= 2.5, f"{most:.1f} of {LAYERS} inputs were up together"


def test_control_tensors_on_a_ctx_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ctx.OnCtx, "may_stand_for", lambda tensor, node: False)
    _, most = run(workload(), tmp_path)
    assert most > LAYERS - 0.5


STEPS = [written, halved, replaced, summed, shared, penalized]


@pytest.mark.parametrize("step", STEPS)
def test_backward_finds_what_it_finds_in_a_plain_run(step: Callable[[Trainer], None], tmp_path: Path) -> None:
    work = workload(step)
    plain = run_plain(work, torch.device("cpu"))
    outcome, _ = run(work, tmp_path)
    assert_equal(plain, outcome)


@pytest.mark.parametrize("step", [written, halved, shared])
def test_control_a_copy_as_it_was_saved_gives_other_numbers(
    step: Callable[[Trainer], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were what stands for a tensor a copy of it, as one may be of a saved tensor, these steps would compute something else."""

    class Copy:
        def __init__(self, pack: Any, tensor: Tensor) -> None:
            self.copy = tensor.detach().clone()

        def found(self, unpack: Any) -> Tensor:
            return self.copy.clone()

    monkeypatch.setattr(on_ctx, "Lasting", Copy)
    work = workload(step)
    outcome, _ = run(work, tmp_path)
    with pytest.raises(AssertionError):
        assert_equal(run_plain(work, torch.device("cpu")), outcome)


def test_a_write_that_no_recorded_step_had_is_an_error_where_its_memory_is_gone(tmp_path: Path) -> None:
    trainer = Trainer(workload(), torch.device("cpu"))
    config = config_for(NVME, tmp_path, policy="floor", device="100%")
    tieroff.wrap(trainer.model, trainer.optimizer, config, backend=CpuBackend())
    for index in range(5):
        trainer.run(index)
    _give(trainer)
    with pytest.raises(StateError, match=r"save it with ctx\.save_for_backward"):
        trainer.run(5)
    tieroff.unwrap(trainer.model)


def test_graphs_with_tensors_on_a_ctx_die_with_their_loss(tmp_path: Path) -> None:
    trainer = Trainer(workload(), torch.device("cpu"))
    config = config_for(NVME, tmp_path, policy="floor", device="100%")
    tieroff.wrap(trainer.model, trainer.optimizer, config, backend=CpuBackend())
    for index in range(4):
        trainer.run(index)
    gc.collect()
    gc.disable()
    try:
        loss = trainer.loss()
        assert any(True for _ in tieroff.engine(trainer.model).executor.activations)
        del loss
        trainer.outcome.losses.clear()
        tieroff.engine(trainer.model).executor.activations.drain()
        assert not any(True for _ in tieroff.engine(trainer.model).executor.activations)
    finally:
        gc.enable()
    tieroff.unwrap(trainer.model)


def test_steps_without_quiet_events_have_those_of_tensors_on_a_ctx(tmp_path: Path) -> None:
    """Where most stays on the device, few events are asked for; these are, since their parameter's own event may be quiet."""
    work = dataclasses.replace(workload(), steps=14)
    trainer = Trainer(work, torch.device("cpu"))
    config = config_for(HOST, tmp_path, policy="auto", device="85%")
    tieroff.wrap(trainer.model, trainer.optimizer, config, backend=CpuBackend())
    phases = []
    for index in range(work.steps):
        trainer.run(index)
        stats = tieroff.engine(trainer.model).stats()
        phases.append((stats.phase, stats.fallbacks))
    assert phases[-8:] == [("planned", 0)] * 8
    outcome = trainer.finish()
    tieroff.unwrap(trainer.model)
    assert_equal(run_plain(work, torch.device("cpu")), outcome)
