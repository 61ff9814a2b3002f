"""Ctrl-C before lines of `optimizer.step()` while the CPU updates: each bucket is updated whole or not at all."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.accelerator import target
from tests.accelerator.updates.late import Lateness
from tests.accelerator.updates.loop import SEED, WIDTH, config
from tests.support.injector import Injector
from tests.support.twins import copied, equal
from tieroff.updates.native import HAS_UPDATES

pytestmark = pytest.mark.skipif(not HAS_UPDATES, reason="built without updates in host memory")

STEPS_AFTER, STEPS_BETWEEN, SAMPLED = 10, 2, 16


class OfCalls(Injector):
    """Leaves finalizers alone, out of which no exception comes."""

    def is_watched(self, file: str) -> bool:
        return super().is_watched(file) and not file.endswith("backend/stamp.py")


class Run:
    """A wrapped model whose updates are interrupted one after the other, and what they should have done."""

    def __init__(self, folder: Path) -> None:
        self.model, self.optimizer = self.make()
        tieroff.wrap(self.model, self.optimizer, config(folder), backend=target.backend())
        self.index, self.injector = 0, OfCalls()
        for _ in range(5):
            self.step(self.model, self.optimizer)

    @staticmethod
    def make() -> tuple[Any, Any]:
        torch.manual_seed(SEED)
        layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
        model = nn.Sequential(*layers).to(target.device())
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def backward(self, model: Any) -> torch.Tensor:
        torch.manual_seed(SEED + self.index)
        loss: torch.Tensor = model(torch.randn(8, WIDTH).to(target.device())).square().mean()
        loss.backward()
        return loss.detach().cpu()

    def step(self, model: Any, optimizer: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = self.backward(model)
        optimizer.step()
        return loss

    def values(self, model: Any, optimizer: Any) -> dict[str, Any]:
        state = {key: {k: v.cpu() for k, v in entries.items()} for key, entries in optimizer.state_dict()["state"].items()}
        return copied({"model": {name: value.cpu() for name, value in model.state_dict().items()}, "state": state})

    def twin(self) -> tuple[Any, Any]:
        """Returns a plain model and optimizer with the same values."""
        model, optimizer = self.make()
        model.load_state_dict(self.model.state_dict())
        optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return model, optimizer

    def count(self) -> None:
        """Runs a step and counts the lines of its update."""
        self.optimizer.zero_grad()
        self.backward(self.model)
        self.injector.run(self.optimizer.step)
        stats = tieroff.engine(self.model).stats()
        assert stats.phase == "planned" and stats.host_updates >= 4

    def interrupt(self, at: int, steps_after: int) -> None:
        """Interrupts an update before its line of this number; asserts that nothing is lost and the next steps are right."""
        self.index += 1
        plain, plain_optimizer = self.twin()
        old = self.values(self.model, self.optimizer)
        self.step(plain, plain_optimizer)
        new = self.values(plain, plain_optimizer)
        self.optimizer.zero_grad()
        self.backward(self.model)
        was_out = self.injector.run(self.optimizer.step, at)
        where = f"interrupted before line {at} of the update, {self.injector.where}"
        assert was_out or not self.injector.where, f"{where}: the interrupt was swallowed"
        now = self.values(self.model, self.optimizer)
        for number, name in enumerate(old["model"]):
            then = next((then for then in (old, new) if equal(now["model"][name], then["model"][name])), None)
            assert then is not None, f"{where}: {name} is neither the old nor the new one"
            assert equal(now["state"][number], then["state"][number]), f"{where}: state of {name}"
        plain, plain_optimizer = self.twin()
        for _ in range(steps_after):
            self.index += 1
            losses = self.step(self.model, self.optimizer), self.step(plain, plain_optimizer)
            assert equal(*losses), where
        assert equal(self.values(self.model, self.optimizer), self.values(plain, plain_optimizer)), where


@pytest.mark.timeout(300)
def test_interrupted_before_sampled_lines_of_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lateness, run = Lateness(monkeypatch), Run(tmp_path)
    lateness.set(0.02)
    run.count()
    for at in sorted(random.Random(SEED).sample(run.injector.places(1), SAMPLED)):
        run.interrupt(at, STEPS_BETWEEN)
    run.interrupt(run.injector.seen // 2, STEPS_AFTER)
    tieroff.unwrap(run.model)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_interrupted_before_every_line_of_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of the source that an update runs, at the first time that it does and at the last."""
    lateness, run = Lateness(monkeypatch), Run(tmp_path)
    lateness.set(0.005)
    run.count()
    for at in run.injector.places(2):
        run.interrupt(at, STEPS_BETWEEN)
    run.interrupt(run.injector.seen // 2, STEPS_AFTER)
    tieroff.unwrap(run.model)
