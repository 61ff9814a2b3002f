"""Passes without gradients in a step: equal to the plain run's bit for bit, a layer at a time, and no matter how many come."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tieroff
from tests.support.oracles.bytes.device import DeviceBytes
from tests.support.parity import machine_file
from tests.support.recipes.alike import RECIPES, ROWS, WIDTH, Recipe
from tieroff.core.tensor import Tier
from tieroff.runtime.engine import Engine

CPU = torch.device("cpu")
STEPS = 7
GROWTH = 1.1

Passes = Callable[[nn.Module, int], Tensor | None]


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, budget: str) -> Engine:
    plan = {"min_bytes": 0, "machine": str(machine_file(folder))}
    config = {"plan": plan, "nvme": {"dirs": [str(folder)]}, "budget": {"nvme": "64MiB"}}
    tieroff.wrap(model, optimizer, config, budget=budget)
    return tieroff.engine(model)


def train(recipe: Recipe, count: int, folder: Path, budget: str = "") -> tuple[list[Tensor], int]:
    """Returns what the steps computed, and the peak of their plan; 0 of a plain run."""
    model = recipe.build(count)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine = wrap(model, optimizer, folder, budget) if budget else None
    seen = [recipe.step(model, optimizer, index, CPU) for index in range(STEPS)]
    peak_bytes = 0
    if engine is not None:
        assert (engine.stats().phase, engine.stats().fallbacks) == ("planned", 0)
        peak_bytes = engine.plan.peak_bytes[Tier.DEVICE]
        tieroff.unwrap(model)
    return [*seen, *(p.detach().clone() for p in model.parameters())], peak_bytes


@pytest.mark.parametrize("budget", ["80%", "min"])
@pytest.mark.parametrize("name", [name for name in RECIPES if "pass" in name])
def test_a_pass_in_each_step_is_planned_and_equal(name: str, budget: str, tmp_path: Path) -> None:
    plain, _ = train(RECIPES[name], 3, tmp_path)
    wrapped, _ = train(RECIPES[name], 3, tmp_path, budget)
    assert all(map(torch.equal, plain, wrapped))


@pytest.mark.parametrize(("when", "held"), [("before", 1), ("between", 1), ("after", 2)])
def test_a_pass_needs_a_layer_at_a_time(when: str, held: int, tmp_path: Path) -> None:
    _, without = train(Recipe(is_frozen=True), 6, tmp_path, "min")
    _, within = train(Recipe(is_frozen=True, passes=frozenset({when})), 6, tmp_path, "min")
    held_bytes = held * 4 * ROWS * WIDTH  # the program has the batch until its last pass, and the outputs
    assert within - held_bytes <= GROWTH * without


def run(passes: Passes, folder: Path, budget: str = "") -> tuple[list[Tensor], list[tuple[str, int]]]:
    """Trains with these passes between forward and backward; returns what came out, and phase and fallbacks of each step."""
    model = Recipe().build(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine = wrap(model, optimizer, folder, budget) if budget else None
    seen, phases = list[Tensor](), list[tuple[str, int]]()
    for index in range(STEPS):
        y = model(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index)))
        with torch.no_grad():
            target = passes(model, index)
        loss = (y - (1 if target is None else target)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
        if engine is not None:
            phases.append((engine.stats().phase, engine.stats().fallbacks))
    if engine is not None:
        tieroff.unwrap(model)
    return [*seen, *(p.detach().clone() for p in model.parameters())], phases


def now_and_then(model: nn.Module, index: int) -> Tensor | None:
    """An evaluation, once in a while."""
    return model(torch.ones(2, WIDTH)).mean() if index in (4, 6) else None


def at_first(model: nn.Module, index: int) -> Tensor | None:
    """A look at what the model says, while one still looks."""
    return model(torch.ones(2, WIDTH)).mean() if index < 4 else None


def ever_more(model: nn.Module, index: int) -> Tensor | None:
    """Text of no fixed length is generated."""
    x = torch.ones(2, WIDTH)
    for _ in range(12 + 3 * index):
        x = model(x)
    return x.mean()


@pytest.mark.parametrize("budget", ["50%", "min"])
@pytest.mark.parametrize(("passes", "leaves"), [(now_and_then, False), (at_first, True), (ever_more, False)])
def test_passes_that_come_irregularly(passes: Passes, leaves: bool, budget: str, tmp_path: Path) -> None:
    plain, _ = run(passes, tmp_path)
    wrapped, phases = run(passes, tmp_path, budget)
    assert all(map(torch.equal, plain, wrapped))
    assert any(fallbacks for _, fallbacks in phases) == leaves
    assert phases[3] == ("planned", 0)


def moved_bytes(engine: Engine) -> int:
    return sum(engine.executor.traffic.counts.moved_bytes.values())


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_passes_between_steps_read_once_what_fits_and_stay_within_the_budget(
    without: Callable[[], AbstractContextManager[object]], tmp_path: Path
) -> None:
    recipe = Recipe()
    model = recipe.build(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine = wrap(model, optimizer, tmp_path, "60%")
    moved, counted = list[int](), list[int]()
    for index in range(STEPS):
        recipe.step(model, optimizer, index, CPU)
        with without():
            for _ in range(3):
                before = moved_bytes(engine)
                model(torch.ones(2, WIDTH))
                moved.append(moved_bytes(engine) - before)
                counted.append(engine.device_bytes)
    assert engine.stats().phase == "planned"
    budget_bytes, weights = engine.plan.budget_bytes[Tier.DEVICE], sum(p.nbytes for p in model.parameters())
    tieroff.unwrap(model)
    assert max(counted) <= budget_bytes
    assert moved[-1] == moved[-2] <= weights // 4


class AddedTo(nn.Module):
    """A frozen weight to which a product of small ones is added: backward does not need it, and no op keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH, requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight + self.up @ self.down)


def test_passes_leave_room_for_frozen_weights_that_backward_does_not_need(tmp_path: Path) -> None:
    held = DeviceBytes(CPU)
    model = nn.Sequential(*(AddedTo() for _ in range(8)))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine = wrap(model, optimizer, tmp_path, "min")
    for _ in range(STEPS):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.stats().phase == "planned"
    held.begin()
    with torch.no_grad():
        for _ in range(2):
            model(torch.ones(2, WIDTH))
    budget_bytes, peak_bytes = engine.plan.budget_bytes[Tier.DEVICE], held.peak_bytes
    tieroff.unwrap(model)
    assert peak_bytes <= budget_bytes


def write_nothing(_: nn.Parameter) -> None:
    """The control arm."""


def write_in_place(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.mul_(1.5)


def write_data(p: nn.Parameter) -> None:
    p.data.mul_(1.5)


def assign_data(p: nn.Parameter) -> None:
    p.data = p.data * 1.5


def write_by_numpy(p: nn.Parameter) -> None:
    p.detach().numpy()[:] *= 1.5


WRITES = [write_nothing, write_in_place, write_data, assign_data, write_by_numpy]


@pytest.mark.parametrize("budget", ["80%", "min"])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_what_is_written_between_two_passes_counts(write: Callable[[nn.Parameter], None], budget: str, tmp_path: Path) -> None:
    def values(budget: str = "") -> list[Tensor]:
        recipe = Recipe()
        model = recipe.build(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        if budget:
            wrap(model, optimizer, tmp_path, budget)
        seen = list[Tensor]()
        for index in range(STEPS):
            seen.append(recipe.step(model, optimizer, index, CPU))
            with torch.no_grad():
                for at in range(3):
                    seen.append(model(torch.ones(2, WIDTH)))
                    write(list(model.parameters())[(index + at) % 4])
        seen += [p.detach().clone() for p in model.parameters()]
        if budget:
            tieroff.unwrap(model)
        return seen

    assert all(map(torch.equal, values(), values(budget)))
