"""Writes through `.data` by code that holds parameters itself, first made in steps that follow their plan: they count."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import tieroff
from tests.support.twins import Setting, adam, assert_same, follow, with_plans

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning")]
WIDTH, FIRST = 16, 6
Parameters = list[torch.Tensor]
WAYS: tuple[Callable[[Parameters], Any], ...] = (
    lambda held: [p.data.mul_(0.9) for p in held],
    lambda held: [p.data.clamp_(-0.1, 0.1) for p in held],
    lambda held: torch._foreach_mul_([p.data for p in held], 0.9),
    lambda held: [q.data.lerp_(p.data, 0.5) for p, q in zip(held[::4], held[2::4], strict=True)],
    lambda held: [p.data.copy_(torch.full_like(p.data, 0.03)) for p in held],
    lambda held: [p.data.numpy().__setitem__(..., 0.04) for p in held],
)
PLACES = ("in forward", "between", "in backward")
HOLDERS: dict[str, Callable[[Any, Any], Parameters]] = {
    "held": lambda model, optimizer: model.held,
    "listed": lambda model, optimizer: list(model.parameters()),
    "groups": lambda model, optimizer: optimizer.param_groups[0]["params"],
}


def nothing() -> None:
    """What happens in most steps."""


class Net(nn.Module):
    """Six layers; `inside` is called in the middle of forward, and `behind` in the middle of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.held = [p for layer in self.layers for p in layer.parameters()]
        self.inside: Callable[[], Any] = nothing
        self.behind: Callable[[], Any] = nothing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index == 3:
                self.inside()
                x.register_hook(lambda _: self.behind())
            x = functional.gelu(layer(x))
        return x


def made() -> tuple[Any, Any]:
    model = Net()
    return model, adam(model)


def loss_of(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(8, WIDTH)).square().mean()
    return loss


def step_with_write(
    model: Any, optimizer: Any, place: str, way: Callable[[Parameters], Any], held: Callable[[], Parameters]
) -> torch.Tensor:
    """Takes a step that writes in one of `PLACES`, or nowhere."""

    def write() -> None:
        way(held())

    optimizer.zero_grad()
    model.inside = write if place == "in forward" else nothing
    model.behind = write if place == "in backward" else nothing
    loss = loss_of(model)
    if place == "between":
        write()
    loss.backward()
    optimizer.step()
    return loss


def step_that_writes(holder: str) -> Callable[[Any, Any, int], torch.Tensor]:
    """Returns a step that writes all parameters, from the first one on that surely has a plan: each time in another way."""

    def step(model: Any, optimizer: Any, index: int) -> torch.Tensor:
        way, place = WAYS[index % len(WAYS)], PLACES[index % len(PLACES)] if index >= FIRST else ""
        return step_with_write(model, optimizer, place, way, lambda: HOLDERS[holder](model, optimizer))

    return step


@with_plans(holder=tuple(HOLDERS))
def test_what_is_written_through_a_parameter_that_is_held(holder: str, planned_setting: Setting) -> None:
    plain = follow(made, step_that_writes(holder), FIRST + len(WAYS) + 1)
    wrapped = follow(made, step_that_writes(holder), FIRST + len(WAYS) + 1, planned_setting)
    assert_same(plain.seen, wrapped.seen)
    assert wrapped.phase in ("planned", "nothing moved")


@pytest.mark.parametrize("place", PLACES)
def test_each_way_and_place_alone(place: str, tmp_path: Path) -> None:
    for number, way in enumerate(WAYS):

        def step(model: Any, optimizer: Any, index: int, way: Any = way) -> torch.Tensor:
            return step_with_write(model, optimizer, place if index == FIRST else "", way, lambda: model.held)

        folder = tmp_path / str(number)
        folder.mkdir()
        assert_same(follow(made, step, FIRST + 2).seen, follow(made, step, FIRST + 2, Setting(folder)).seen)


def test_what_is_written_between_two_backwards_of_a_step(planned_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss_of(model).backward()
        if index >= FIRST:
            WAYS[index % len(WAYS)](model.held)
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        return loss

    assert_same(follow(made, step, 10).seen, follow(made, step, 10, planned_setting).seen)


def test_an_alias_that_is_written_while_a_copy_of_it_is_made(planned_setting: Setting) -> None:
    """It is taken before the forward, written in the middle of it and of backward, and given up before the update."""

    def step(model: Any, optimizer: Any, index: int) -> torch.Tensor:
        optimizer.zero_grad()
        model.inside = model.behind = nothing
        aliases: list[torch.Tensor] = []
        if index >= FIRST:
            aliases = [p.data for p in model.held[::2]]

            def write() -> None:
                for alias in aliases:
                    alias.mul_(0.9)

            model.inside = model.behind = write
        loss = loss_of(model)
        loss.backward()
        aliases.clear()
        optimizer.step()
        return loss

    assert_same(follow(made, step, 9).seen, follow(made, step, 9, planned_setting).seen)


def test_copies_made_in_a_step_are_parameters(setting: Setting) -> None:
    model, optimizer = made()
    setting.wrap(model, optimizer)
    made_copies: list[Any] = []

    def copy_all() -> None:
        buffer = io.BytesIO()
        torch.save(model.held, buffer)
        buffer.seek(0)
        classes: list[Any] = [nn.Parameter]
        with torch.serialization.safe_globals(classes):
            made_copies.append(torch.load(buffer, weights_only=True))
        made_copies.append(copy.deepcopy(model.held))

    for index in range(FIRST + 1):
        optimizer.zero_grad()
        model.inside = copy_all if index == FIRST else nothing
        loss_of(model).backward()
        assert all(isinstance(p, nn.Parameter) for p in model.held)
        optimizer.step()
        assert {type(p) for p in model.held} == {nn.Parameter}
    assert tieroff.engine(model).stats().phase == "planned"
    assert {type(p) for copies in made_copies for p in copies} == {nn.Parameter}
    loss = loss_of(model)
    tieroff.unwrap(model)
    assert {type(p) for p in model.held} == {nn.Parameter}
    loss.backward()


def test_between_steps_parameters_are_plain(planned_setting: Setting) -> None:
    """Also those that a plan keeps on the device, of which there were two copies only before the plan was followed."""
    model, optimizer = made()
    planned_setting.wrap(model, optimizer)
    for _ in range(FIRST + 2):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        assert {type(p) for p in model.held} == {nn.Parameter}
    assert tieroff.engine(model).stats().phase in ("planned", "nothing moved")
    tieroff.unwrap(model)


def test_an_optimizer_sees_plain_parameters(setting: Setting) -> None:
    seen: set[type] = set()

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.update(type(p) for group in self.param_groups for p in group["params"])
            return super().step(closure)

    tieroff.per_parameter(Noting)
    model = Net()
    optimizer = Noting(model.parameters(), 0.1)
    setting.wrap(model, optimizer)
    for _ in range(FIRST):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    assert tieroff.engine(model).stats().phase == "planned"
    assert seen == {nn.Parameter}
    tieroff.unwrap(model)
