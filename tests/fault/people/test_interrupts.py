"""Ctrl-C and alarms: an exception before any line of the engine's code leaves a state from which the next step is right."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.support.covering import in_turn
from tests.support.injector import Injector
from tests.support.recipes.alike import WIDTH, Recipe
from tests.support.twins import Setting, copied, equal, sgd
from tieroff.recomputation import hooks_here

# An interrupt may come while the engine has a file open, which is closed when its frame is gone.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

STEPS_AFTER = 10
# Where one interrupt follows the other for thousands of steps, whatever one leaves behind meets those that follow.
STEPS_BETWEEN = 3
SAMPLED = 24
SEED = 17


class Layers(nn.Module):
    """Layers with dropout, whose masks show a generator that went astray."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.1)
        return x


class Tied(nn.Module):
    """A weight that is used twice, a normalization with buffers, and a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.norm = nn.BatchNorm1d(8)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(torch.relu(x @ self.weight) @ self.weight.T)
        return out


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    yield
    gc.collect()


def layers() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Layers()
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def tied() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Tied()
    return model, sgd(model)


def step(model: Any, optimizer: Any, index: int) -> torch.Tensor:
    torch.manual_seed(1000 + index)
    optimizer.zero_grad()
    loss: torch.Tensor = model(torch.randn(16, 8)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach().clone()


def values_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": copied(dict(model.state_dict())), "state": copied(optimizer.state_dict()["state"])}


class Interrupted:
    """A wrapped model whose steps are interrupted one after the other, and what they should have done."""

    def __init__(self, make: Any, setting: Setting) -> None:
        self._make, self._setting = make, setting
        self._index = 4
        self.model, self.optimizer = make()
        setting.wrap(self.model, self.optimizer)
        for index in range(self._index):
            step(self.model, self.optimizer, index)
        self.injector = Injector()

    def count(self) -> None:
        """Runs a step and counts its lines."""
        self._index += 1
        assert not self.injector.run(lambda: step(self.model, self.optimizer, self._index))
        assert tieroff.engine(self.model).stats().phase == "planned"

    def twin(self) -> tuple[Any, Any]:
        """Returns a plain model and optimizer with the same values."""
        model, optimizer = self._make()
        model.load_state_dict(self.model.state_dict())
        optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return model, optimizer

    def interrupt(self, at: int, steps_after: int = STEPS_AFTER) -> None:
        """Interrupts a step before its line of this number; asserts that nothing is lost and that the next steps are right."""
        self._index += 1
        old, (plain, plain_optimizer) = values_of(self.model, self.optimizer), self.twin()
        step(plain, plain_optimizer, self._index)
        new = values_of(plain, plain_optimizer)
        was_out = self.injector.run(lambda: step(self.model, self.optimizer, self._index), at)
        where = f"interrupted before line {at} of the step, {self.injector.where}"
        assert was_out or not self.injector.where, f"{where}: the interrupt was swallowed"
        assert torch.is_grad_enabled() and torch._C._is_torch_function_enabled() and hooks_here() is None, where
        self._check_values(old, new, values_of(self.model, self.optimizer), where)
        whole = [len(group["params"]) for group in self.optimizer.param_groups]
        assert whole == [len(list(self.model.parameters()))], where
        plain, plain_optimizer = self.twin()
        for _ in range(steps_after):
            self._index += 1
            losses = step(self.model, self.optimizer, self._index), step(plain, plain_optimizer, self._index)
            assert equal(*losses), where
            assert equal(values_of(self.model, self.optimizer), values_of(plain, plain_optimizer)), where
        self._check_accounts(where)

    def _check_values(self, old: Any, new: Any, now: Any, where: str) -> None:
        """Asserts that each parameter is the old or the new one, and its state with it."""
        for number, name in enumerate(name for name, _ in self.model.named_parameters()):
            is_old, is_new = (equal(now["model"][name], then["model"][name]) for then in (old, new))
            assert is_old or is_new, f"{where}: {name} is neither the old nor the new one"
            states = [then["state"].get(number) for then, holds in ((old, is_old), (new, is_new)) if holds]
            assert any(equal(now["state"].get(number), state) for state in states), f"{where}: state of {name}"

    def _check_accounts(self, where: str) -> None:
        executor = tieroff.engine(self.model).executor
        executor.activations.drain()
        executor.gradients.sweep()
        items = [*executor.homes, *executor.activations]
        assert list(executor.activations) == [], where
        assert torch._C._is_torch_function_enabled(), where
        assert executor.traffic.device_bytes == sum(item.size_bytes for item in items if item.device is not None), where

    def unwrap(self) -> None:
        before = values_of(self.model, self.optimizer)
        tieroff.unwrap(self.model)
        assert torch._C._is_torch_function_enabled()
        assert equal(before, values_of(self.model, self.optimizer))
        plain, plain_optimizer = self.twin()
        assert equal(step(self.model, self.optimizer, 0), step(plain, plain_optimizer, 0))


MODELS = {"layers": layers, "tied": tied}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_interrupted_anywhere_in_a_planned_step(make: Any, each_setting: Setting) -> None:
    run = Interrupted(make, each_setting)
    run.count()
    for at in sorted(random.Random(SEED).sample(range(run.injector.seen), SAMPLED)):
        run.interrupt(at)
    run.unwrap()


class InForward(Injector):
    """Counts only lines of the files that put modes in force round the model's forward: in each step the same."""

    def is_watched(self, file: str) -> bool:
        return file.endswith(("runtime/engine.py", "hooks/forward/walk.py"))


@pytest.mark.timeout(120)
def test_interrupted_at_each_entry_and_exit_of_a_mode_round_the_forward(setting: Setting) -> None:
    """Also at the second time of a `with`, as its body has ended: an exception there leaves the exit out."""
    run = Interrupted(layers, setting)
    run.injector = InForward()
    run.count()
    assert run.injector.seen > 50
    for at in range(run.injector.seen):
        run.interrupt(at, STEPS_BETWEEN)
    run.unwrap()


# Each model, backend, policy and budget, and not their product, which would take an hour.
MANY_LINES: dict[str, tuple[Any, dict[str, Any]]] = {
    "layers-cpu-floor": (layers, {"nvme": True}),
    "tied-delayed-auto-80": (tied, {"policy": "auto", "device": "80%", "delayed": True}),
}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", MANY_LINES)
def test_interrupted_before_every_line_that_a_planned_step_runs(case: str, tmp_path: Path) -> None:
    """Each line of the source that the step runs, at the first time that it does: some 1,800."""
    make, options = MANY_LINES[case]
    run = Interrupted(make, Setting(tmp_path, **options))
    run.count()
    for at in run.injector.places(1):
        run.interrupt(at, STEPS_BETWEEN)
    run.unwrap()


_FINALIZER: Any = weakref.finalize.__call__


class Anywhere(Injector):
    """Acts also before lines of what the engine calls, of torch say. Not in finalizers of Python, which none leaves."""

    def is_watched(self, file: str) -> bool:
        return file != __file__

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        codes = (frame.f_code, frame.f_back and frame.f_back.f_code)
        return None if _FINALIZER.__code__ in codes else super()._enter(frame, event, argument)


# Torch's own reference to a storage may be half made.
@pytest.mark.filterwarnings("ignore:.*StorageWeakRef:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(120)
def test_interrupted_anywhere_in_a_pass_between_steps(tmp_path: Path) -> None:
    recipe = Recipe()
    model: Any = recipe.build(4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    Setting(tmp_path, policy="auto", device="50%", nvme=True).wrap(model, optimizer)
    for index in range(6):
        recipe.step(model, optimizer, index, torch.device("cpu"))

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = model(torch.ones(2, WIDTH))
            return out

    injector, expected, parameters = Anywhere(), evaluate(), list(model.parameters())
    injector.run(evaluate)
    for number, at in enumerate(random.Random(3).choices(range(injector.seen), k=400)):
        injector.run(evaluate, at)
        torch.set_grad_enabled(True)  # the interrupt may have come in the end of `no_grad` itself
        parameters[number % 8].data.add_(0)
        assert equal(evaluate(), expected), injector.where
    tieroff.unwrap(model)
    assert equal(evaluate(), expected)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("part", "each_setting"), in_turn(range(0, 100, 7), ("cpu", "delayed")), indirect=["each_setting"])
def test_unwrap_right_after_an_interrupt(part: int, each_setting: Setting) -> None:
    run = Interrupted(layers, each_setting)
    run.count()
    at = run.injector.seen * part // 100
    assert run.injector.run(lambda: step(run.model, run.optimizer, 77), at)
    run.unwrap()
