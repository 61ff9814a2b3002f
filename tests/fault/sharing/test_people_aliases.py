"""What people keep of a wrapped model's tensors, share with other processes, or put in their place: it follows, or stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import nn

import tieroff
from tests.support.twins import Setting, adam, assert_same, check_twins, follow, loss_of, sgd, with_plans
from tests.support.twins import usual_step as usual
from tieroff.errors import StateError

# What people keep counts, and a small budget is raised by it.
pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning")]


def layers_and(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[Any, Any]:
    """Layers enough that half of what a step takes is more than any op needs."""
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())])
    return model, make(model)


def layers_and_sgd() -> tuple[Any, Any]:
    return layers_and(sgd)


def layers_and_adam() -> tuple[Any, Any]:
    return layers_and(adam)


@pytest.fixture
def each(planned_setting: Setting) -> Setting:
    return planned_setting


ALIASES: dict[str, Callable[[Any], list[Any]]] = {
    "data": lambda model: [p.data for p in model.parameters()],
    "views": lambda model: [p.detach().view(-1) for p in model.parameters()],
    "numpy": lambda model: [p.detach().numpy() for p in model.parameters()],
    "state_dict": lambda model: list(model.state_dict().values()),
}


@with_plans(kind=tuple(ALIASES), at=(0, 4))
def test_aliases_follow_their_parameters_whatever_the_plan(kind: str, at: int, planned_setting: Setting) -> None:
    torch.manual_seed(0)
    model, optimizer = layers_and_sgd()
    planned_setting.wrap(model, optimizer)
    kept: list[Any] = []
    for index in range(8):
        if index == at:
            kept = ALIASES[kind](model)
        usual(model, optimizer)
        for alias, p in zip(kept, model.parameters(), strict=bool(kept)):
            assert torch.equal(torch.as_tensor(alias).reshape(-1), p.detach().reshape(-1))
    with torch.no_grad():
        for alias in kept:
            alias *= 0.5  # and what is written there is the parameter's
    seen = [torch.as_tensor(alias).clone() for alias in kept]
    usual(model, optimizer)
    tieroff.unwrap(model)
    usual(model, optimizer)
    for alias, p, before in zip(kept, model.parameters(), seen, strict=True):
        assert torch.equal(torch.as_tensor(alias).reshape(-1), p.detach().reshape(-1)), "after unwrap"
        assert not torch.equal(torch.as_tensor(alias), before)


@with_plans(at=(0, 2, 4))
def test_what_is_written_through_a_storage_that_is_held(at: int, each: Setting) -> None:
    """`p.untyped_storage()` is Python's object of the memory, and no tensor."""

    def step(model: Any, optimizer: Any, index: int) -> Any:
        if index == at:
            optimizer.held = [p.untyped_storage() for p in model.parameters()]
        loss = usual(model, optimizer)
        if index >= at:
            for storage in optimizer.held:
                torch.tensor([], dtype=torch.float32).set_(storage).mul_(0.9)
        return loss

    assert_same(follow(layers_and_sgd, step, 7).seen, follow(layers_and_sgd, step, 7, each).seen)


def test_parameters_move_again_once_nobody_holds_them(setting: Setting) -> None:
    model, optimizer = layers_and_adam()
    setting.wrap(model, optimizer)
    for _ in range(5):
        usual(model, optimizer)
    moved = tieroff.engine(model).stats().moved_bytes_by_class["parameter"]
    kept = [p.data for p in model.parameters()]
    usual(model, optimizer)
    stats = tieroff.engine(model).stats()
    assert (stats.phase, stats.moved_bytes_by_class["parameter"]) == ("planned", 0)
    kept.clear()
    for _ in range(2):
        usual(model, optimizer)
    assert tieroff.engine(model).stats().moved_bytes_by_class["parameter"] == moved > 0
    tieroff.unwrap(model)


def average_by_hand(model: Any, optimizer: Any, index: int) -> Any:
    """An exponential moving average over a list of `p.data` that was taken once."""
    kept = model.__dict__.setdefault("kept", [p.data for p in model.parameters()])
    averages = model.__dict__.setdefault("averages", [p.clone() for p in kept])
    usual(model, optimizer)
    for average, value in zip(averages, kept, strict=True):
        average.lerp_(value, 0.1)
    return [average.clone() for average in averages]


def test_an_average_over_kept_data(each: Setting) -> None:
    check_twins(layers_and_adam, average_by_hand, each, steps=7, moves=(), phase=_phase(each))


def _phase(setting: Setting) -> str:
    return "nothing moved" if setting.device == "100%" else "planned"


def keep_gradient_data(model: Any, optimizer: Any, index: int) -> Any:
    """`p.grad.data` kept over an accumulation."""
    optimizer.zero_grad()
    loss_of(model).backward()
    kept = [p.grad.data for p in model.parameters()]
    loss_of(model).backward()
    out = [alias.clone() for alias in kept]
    optimizer.step()
    return out


def test_aliases_of_gradients_over_an_accumulation(each: Setting) -> None:
    # What is kept is above the smallest budget: after three such steps the next one is traced again.
    phase = "traced" if each.device == "50%" else _phase(each)
    check_twins(layers_and_adam, keep_gradient_data, each, steps=6, moves=(), phase=phase)


def check(step: Any, setting: Setting) -> None:
    """Asserts equal bits after every step, however the steps ran."""
    assert_same(follow(layers_and_adam, step, 8).seen, follow(layers_and_adam, step, 8, setting).seen)


# -- other memory ------------------------------------------------------------------------------------------------------


def binary_connect(model: Any, optimizer: Any, index: int) -> Any:
    """Forward and backward on other weights, which are put back before the update."""
    optimizer.zero_grad()
    kept = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data.sign() * 0.1
    loss = loss_of(model)
    loss.backward()
    for p, value in zip(model.parameters(), kept, strict=True):
        p.data = value
    optimizer.step()
    return loss


def adversarial(model: Any, optimizer: Any, index: int) -> Any:
    """A second backward on perturbed weights, which are put back from a copy (FGM)."""
    optimizer.zero_grad()
    loss_of(model).backward()
    backup = [p.data.clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.add_(0.5 * p.grad / p.grad.norm())
    loss = loss_of(model)
    loss.backward()
    for p, value in zip(model.parameters(), backup, strict=True):
        p.data = value
    optimizer.step()
    return loss


def halve_before_update(model: Any, optimizer: Any, index: int) -> Any:
    optimizer.zero_grad()
    loss = loss_of(model)
    loss.backward()
    if index >= 4:
        for p in model.parameters():
            p.data = p.data * 0.5
    optimizer.step()
    return loss


def halve_state(model: Any, optimizer: Any, index: int) -> Any:
    loss = usual(model, optimizer)
    if index >= 4:
        for state in optimizer.state.values():
            state["exp_avg"].data = state["exp_avg"].data * 0.5
    return loss


@with_plans(step=(binary_connect, adversarial, halve_before_update, halve_state))
def test_assigned_memory_is_the_value(step: Any, each: Setting) -> None:
    check(step, each)


class Follower(nn.Module):
    """Layers, and a copy that follows them: each forward gives it other memory (`k.data = ...`), as MoCo's key encoder has."""

    def __init__(self) -> None:
        super().__init__()
        self.led, self.leads = layers_and_sgd()[0].requires_grad_(False), layers_and_sgd()[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for kept, value in zip(self.led.parameters(), self.leads.parameters(), strict=True):
                kept.data = kept.data * 0.9 + value.data * 0.1
        return self.leads(x) - self.led(x)


def follower_and_sgd() -> tuple[Any, Any]:
    model = Follower()
    return model, sgd(model)


def test_memory_assigned_in_every_forward_leaves_the_plan_as_it_is(each: Setting) -> None:
    phases = []

    def step(model: Any, optimizer: Any, index: int) -> Any:
        loss = usual(model, optimizer)
        phases.append(tieroff.engine(model).stats().phase)
        return loss

    assert_same(follow(follower_and_sgd, usual, 10).seen, follow(follower_and_sgd, step, 10, each).seen)
    assert phases[6:] == [_phase(each)] * 4


def test_assigned_memory_between_forward_and_backward_is_refused(each: Setting) -> None:
    model, optimizer = layers_and_adam()
    each.wrap(model, optimizer)
    for _ in range(5):
        usual(model, optimizer)
    if tieroff.engine(model).stats().phase == "planned":
        loss = loss_of(model)
        for p in model.parameters():
            p.data = p.data * 0.5
        with pytest.raises(StateError, match="between the forward that used it and backward"):
            loss.backward()
    tieroff.unwrap(model)


# -- other processes ---------------------------------------------------------------------------------------------------


def send(model: Any, optimizer: Any, index: int) -> Any:
    """The values go to another process, as to a worker that plays games with them; checkpoints go on."""
    loss = usual(model, optimizer)
    if index == 4:
        queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
        queue.put(dict(model.state_dict()))
        queue.get()
    return loss, [value.clone() for value in model.state_dict().values()]


def share(model: Any, optimizer: Any, index: int) -> Any:
    """The memory of a state dict becomes that of other processes too, and what is kept of it follows."""
    loss = usual(model, optimizer)
    if index == 4:
        model.__dict__["shared"] = {name: value.share_memory_() for name, value in model.state_dict().items()}
    return loss, [value.clone() for value in model.__dict__.get("shared", {}).values()]


@with_plans(step=(send, share))
def test_shared_values_stay_those_of_the_model(step: Any, each: Setting) -> None:
    check(step, each)
