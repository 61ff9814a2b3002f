"""Writes through `.data` and NumPy at moments when a plan has copies under way: they count."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.twins import Setting, adam, assert_same, follow, loss_of, sgd, with_plans

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning")]


def layers(count: int = 6, width: int = 8) -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(count) for layer in (nn.Linear(width, width), nn.Tanh())])


class Momentum(nn.Module):
    """A second encoder that follows the first inside of forward, and a queue of what it said (MoCo)."""

    queue: torch.Tensor

    def __init__(self, *, assigns: bool) -> None:
        super().__init__()
        self.first = layers(3)
        self.second = copy.deepcopy(self.first).requires_grad_(False)
        self.assigns = assigns
        self.register_buffer("queue", torch.randn(8, 32))

    @torch.no_grad()
    def follow(self) -> None:
        for of, by in zip(self.first.parameters(), self.second.parameters(), strict=True):
            if self.assigns:
                by.data = by.data * 0.9 + of.data * 0.1
            else:
                by.data.mul_(0.9).add_(of.detach(), alpha=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = functional.normalize(self.first(x))
        with torch.no_grad():
            self.follow()
            key = functional.normalize(self.second(x))
        out = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone()], 1)
        with torch.no_grad():
            self.queue.copy_(torch.cat([self.queue[:, 4:], key.T], 1))
        return out


def usual(model: Any, optimizer: Any, index: int) -> torch.Tensor:
    optimizer.zero_grad()
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    return loss


@with_plans(assigns=(False, True))
def test_an_encoder_that_follows_another_inside_forward(assigns: bool, planned_setting: Setting) -> None:
    def make() -> tuple[Any, Any]:
        model = Momentum(assigns=assigns)
        return model, sgd(model)

    assert_same(follow(make, usual, 7).seen, follow(make, usual, 7, planned_setting).seen)


def update_as_gradients_arrive(model: Any, optimizer: Any, index: int) -> torch.Tensor:
    """From the sixth step on, when plans have long prefetched for the update, hooks have made it by then."""

    def descend(parameter: Any) -> None:
        if model.descends:
            with torch.no_grad():
                parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None

    if index == 0:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(descend)
    model.descends = index >= 5
    loss = loss_of(model, 8, 16)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_what_hooks_write_while_it_comes_up_for_the_update(planned_setting: Setting) -> None:
    def make() -> tuple[Any, Any]:
        model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU())])
        return model, adam(model)

    plain = follow(make, update_as_gradients_arrive, 9)
    assert_same(plain.seen, follow(make, update_as_gradients_arrive, 9, planned_setting).seen)


def write_before_update(model: Any, optimizer: Any, index: int) -> torch.Tensor:
    """Everything that the update is about to use is written after backward."""
    optimizer.zero_grad()
    loss = loss_of(model)
    loss.backward()
    for p in model.parameters():
        p.data.add_(0.001)
        p.grad.numpy()[...] *= 0.5
    for state in optimizer.state.values():
        state["exp_avg"].data.mul_(0.9)
        state["exp_avg_sq"].numpy()[...] *= 0.5
    optimizer.step()
    return loss


def test_what_is_written_between_backward_and_update(planned_setting: Setting) -> None:
    def make() -> tuple[Any, Any]:
        model = layers()
        return model, adam(model)

    assert_same(follow(make, write_before_update, 7).seen, follow(make, write_before_update, 7, planned_setting).seen)


class Decaying(nn.Module):
    """A weight that shrinks with each evaluation, through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.second.weight.data.mul_(0.9)
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out


def step_and_evaluate(model: Any, optimizer: Any, index: int) -> torch.Tensor:
    usual(model, optimizer, index)
    model.eval()
    with torch.no_grad():
        out: torch.Tensor = model(torch.randn(4, 8))
    model.train()
    return out


def step_and_pass_frozen(model: Any, optimizer: Any, index: int) -> torch.Tensor:
    usual(model, optimizer, index)
    model.eval().requires_grad_(False)
    out: torch.Tensor = model(torch.randn(4, 8))
    model.train().requires_grad_(True)
    return out


@with_plans(step=(step_and_evaluate, step_and_pass_frozen))
def test_what_an_evaluation_after_a_step_writes(step: Any, planned_setting: Setting) -> None:
    """Also after the recorded one, whose recorder saw the writes of the step alone."""

    def make() -> tuple[Any, Any]:
        model = Decaying()
        return model, adam(model)

    assert_same(follow(make, step, 6).seen, follow(make, step, 6, planned_setting).seen)
