"""Parts of a shared budget that change while plans are made beside training: no step follows a plan above its part."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

import tieroff
from tests.support.parity import HOST, config_for
from tieroff.core.tensor import Tier
from tieroff.planner.problem.problem import live_bytes
from tieroff.runtime.executor import Executor
from tieroff.runtime.hooks.parameters.access import QuietDict
from tieroff.runtime.process_memory import ProcessMemory
from tieroff.session import workshop
from tieroff.session.shared import Budget

PLAN_TIMEOUT_S = 12


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(48, 48), nn.GELU())))
    return model, torch.optim.Adam(model.parameters(), 1e-3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> torch.Tensor:
    torch.manual_seed(index)
    loss = model(torch.randn(32, 48)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def is_bypassed(model: nn.Module) -> bool:
    return all(type(module.__dict__["_parameters"]) is QuietDict for module in model.modules())


@pytest.fixture
def budgets() -> list[Budget]:
    """Those whose steps are looked at."""
    return []


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch, budgets: list[Budget]) -> list[tuple[int, int]]:
    """What plans need on the device, and the part of the budget, as each step with a plan begins."""
    seen: list[tuple[int, int]] = []

    def look(executor: Executor) -> None:
        for part in (part for budget in budgets for part in budget.parts):
            kind = executor.state.kind
            if part.engine is not None and part.engine.executor is executor and kind is not None:
                plan = getattr(kind.stage, "plan", None)
                if plan is not None:
                    seen.append((plan.peak_bytes[Tier.DEVICE], part.limit_bytes()))

    for name in ("begin", "begin_bypassed"):

        def begin(self: Executor, *args: object, inner: object = getattr(Executor, name), **options: object) -> None:
            inner(self, *args, **options)  # type: ignore[operator]
            look(self)

        monkeypatch.setattr(Executor, name, begin)
    return seen


def peak_of(tmp_path: Path) -> int:
    model, optimizer = made()
    tieroff.wrap(model, optimizer, config_for(HOST, tmp_path, policy="auto"), budget="100%")
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    return int(live_bytes(tieroff.engine(model).trace).max())


@pytest.mark.parametrize("waits", [True, False])
def test_a_model_that_joins_is_noticed_where_the_engine_stands_aside(
    tmp_path: Path, budgets: list[Budget], followed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    size_bytes = int(1.7 * peak_of(tmp_path))
    monkeypatch.setattr(ProcessMemory, "overhead_bytes", lambda *_: 0)  # else up to half of so little pays for the process
    monkeypatch.setattr(workshop, "steps_wait", waits)
    plain, plain_optimizer = made()
    model, optimizer = made()
    budget = tieroff.Budget(size_bytes)
    budgets.append(budget)
    config = config_for(HOST, tmp_path, policy="auto")
    tieroff.wrap(model, optimizer, config, budget=budget)
    count = 0

    def both() -> None:
        nonlocal count
        assert torch.equal(step(model, optimizer, count), step(plain, plain_optimizer, count))
        count += 1

    end = time.monotonic() + PLAN_TIMEOUT_S
    while not is_bypassed(model) and time.monotonic() < end:
        both()
    assert is_bypassed(model)
    both()
    assert is_bypassed(model)
    other, other_optimizer = made()
    tieroff.wrap(other, other_optimizer, config, budget=budget)
    before = len(followed)
    for _ in range(6):
        step(other, other_optimizer, count)
        both()
    assert not is_bypassed(model) and not tieroff.engine(model).plan.moves_nothing
    assert len(followed) > before and all(needed <= part for needed, part in followed)
    tieroff.sleep(other)
    end = time.monotonic() + PLAN_TIMEOUT_S
    while not is_bypassed(model) and time.monotonic() < end:
        both()
    assert is_bypassed(model), "the part of a sleeping model is the others'"
    tieroff.sleep(model)
    assert not is_bypassed(model) and tieroff.engine(model).device_bytes == 0
    model(torch.randn(32, 48)).sum()  # a step begins that nothing ends: it wakes the model
    assert not tieroff.engine(model).is_asleep
    optimizer.zero_grad()
    assert all(needed <= part for needed, part in followed)


def test_one_optimizer_of_two_models_that_neither_knows(tmp_path: Path) -> None:
    plain, wrapped = [[made()[0] for _ in range(2)] for _ in range(2)]
    for model in wrapped:
        tieroff.wrap(model, config=config_for(HOST, tmp_path, policy="auto"), budget="1GiB")
    for models in plain, wrapped:
        optimizer = torch.optim.Adam([parameter for model in models for parameter in model.parameters()], 1e-3)
        for index in range(4):
            torch.manual_seed(index)
            torch.stack([model(torch.randn(32, 48)).square().mean() for model in models]).sum().backward()
            optimizer.step()  # torch still goes over its hooks as both find that they have nothing more to watch
            optimizer.zero_grad()
    for ours, theirs in zip(wrapped, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
        tieroff.unwrap(ours)
