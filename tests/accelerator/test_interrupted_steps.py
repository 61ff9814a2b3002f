"""Ctrl-C in steps that have no plan, and in calls of user code between forward and update, also in what the engine calls."""

from __future__ import annotations

import copy
import functools
import random
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.accelerator import target
from tests.support.covering import in_turn
from tests.support.injector import Injector
from tests.support.twins import copied, equal
from tieroff.recomputation import hooks_here

WIDTH, LAYERS, SAMPLED = 64, 3, 6
# Where an interrupt leaves what only a repair puts right: half freed, between a mode's entry and its block, half brought up.
PLACES = {
    "as memory is freed": "tieroff/core/tensor.py",
    "in a mode's entry": "torch/autograd/grad_mode.py",
    "in a context's entry": "contextlib.py",
    "as a mode is put off": "torch/utils/_python_dispatch.py",
    "as a tensor comes or goes": "runtime/items/homes.py",
    "as bytes move": "runtime/items/traffic.py",
}
KINDS = {"recorded": ("auto", 0), "on demand": ("demand", 4)}  # the policy, and steps before
# Nothing that a finalizer raises comes out of it.
_FINALIZER: Any = weakref.finalize.__call__


class InFile(Injector):
    """Counts the lines of one file, and where its functions return: what they did is done then, and nobody knows yet."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file = file

    def is_watched(self, file: str) -> bool:
        return file.endswith(self._file)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        caller = frame.f_back
        codes = (frame.f_code, caller and caller.f_code)
        is_finalizer = _FINALIZER.__code__ in codes or any(code is not None and code.co_name == "__del__" for code in codes)
        return None if is_finalizer else super()._enter(frame, event, argument)

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        return super()._line(frame, "line" if event == "return" else event, argument)


def make() -> tuple[Any, Any]:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers).to(target.device())
    return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def wrapped(folder: Path, policy: str, steps: int) -> tuple[Any, Any]:
    model, optimizer = make()
    config = {
        "budget": {"device": "45%", "host": 16 << 20},
        "nvme": {"dirs": []},
        "plan": {"min_bytes": 0, "background": False, "policy": policy},
    }
    tieroff.wrap(model, optimizer, config, backend=target.backend())
    for index in range(steps):
        step(model, optimizer, index)
    return model, optimizer


def step(model: Any, optimizer: Any, index: int) -> float:
    torch.manual_seed(1000 + index)
    loss = model(torch.randn(16, WIDTH).to(target.device())).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def values_of(model: Any, optimizer: Any) -> dict[str, Any]:
    state = {key: {k: v.cpu() for k, v in entries.items()} for key, entries in optimizer.state_dict()["state"].items()}
    return copied({"model": {name: value.cpu() for name, value in model.state_dict().items()}, "state": state})


@pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("place", "kind"), in_turn(list(PLACES), list(KINDS)))
def test_interrupted_in_a_step_without_a_plan(place: str, kind: str, tmp_path: Path) -> None:
    policy, steps = KINDS[kind]
    model, optimizer = wrapped(tmp_path, policy, steps)
    injector = InFile(PLACES[place])
    injector.run(functools.partial(step, model, optimizer, 50))
    assert injector.seen > SAMPLED
    for number, at in enumerate(sorted(random.Random(3).sample(range(injector.seen), SAMPLED))):
        if not steps:
            tieroff.unwrap(model)
            model, optimizer = wrapped(tmp_path, policy, steps)
        was_out = injector.run(functools.partial(step, model, optimizer, 100 + number), at)
        where = f"interrupted before line {at}, {injector.where}"
        assert was_out or not injector.where, f"{where}: the interrupt was swallowed"
        torch.set_grad_enabled(True)  # the interrupt may have come in the end of the program's own `no_grad`
        assert torch._C._is_torch_function_enabled() and hooks_here() is None, where
        assert float(torch.ones(2).sum()) == 2, where  # no mode is half in force
        model.load_state_dict(model.state_dict())  # at once, before any step repairs
        plain, plain_optimizer = make()
        plain.load_state_dict(model.state_dict())
        plain_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.zero_grad()
        for index in range(2):
            losses = step(model, optimizer, index), step(plain, plain_optimizer, index)
            assert losses[0] == losses[1], where
        assert equal(values_of(model, optimizer), values_of(plain, plain_optimizer)), where
    tieroff.unwrap(model)
