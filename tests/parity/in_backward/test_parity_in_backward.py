"""Buckets that are updated in backward: the plain run's numbers."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.support.covering import pairwise
from tests.support.in_backward import OPTIMIZERS, Tied, config, make, train
from tests.support.parity import BACKENDS
from tieroff.core.tensor import TensorClass
from tieroff.errors import StateError


def halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.data.mul_(0.5)


def is_same(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize(("name", "budget", "backend"), pairwise(list(OPTIMIZERS), ["45%", "70%", "100%"], list(BACKENDS)))
def test_numbers_are_those_of_the_plain_run(name: str, budget: str, backend: str, tmp_path: Path) -> None:
    plain, plain_optimizer = make(name)
    losses = train(plain, plain_optimizer, 7)
    model, optimizer = make(name)
    tieroff.wrap(model, optimizer, config(tmp_path, budget), backend=BACKENDS[backend]())
    assert train(model, optimizer, 7) == losses
    engine = tieroff.engine(model)
    assert engine.stats().phase == ("planned" if budget != "100%" else "nothing moved")
    names = [op.name for op in engine.trace.ops]
    last = max(i for i, op in enumerate(engine.trace.ops) if op.phase == "backward")
    assert any(op.phase == "optimizer" for op in engine.trace.ops[:last]), names
    tieroff.unwrap(model)
    assert is_same(model, plain)
    assert all(
        torch.equal(optimizer.state[p][key], value)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
        for key, value in plain_optimizer.state[q].items()
        if isinstance(value, torch.Tensor)
    )


def rounds_of(model: nn.Module, optimizer: torch.optim.Optimizer, rounds: int, steps: int = 6) -> list[str]:
    """Trains with several backward passes per update."""
    losses = []
    for step in range(steps):
        for part in range(rounds):
            x = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(step * rounds + part))
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten()) / rounds
            loss.backward()
            losses.append(float(loss.detach()).hex())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("rounds", "budget", "backend", "optimizer"), pairwise([2, 3], ["50%", "100%"], list(BACKENDS), ["AdamW", "AdamW fused"])
)
def test_the_last_of_several_backward_passes_updates(
    rounds: int, budget: str, backend: str, optimizer: str, tmp_path: Path
) -> None:
    plain, its_optimizer = make(optimizer)
    losses = rounds_of(plain, its_optimizer, rounds)
    model, own_optimizer = make(optimizer)
    settings = config(tmp_path, budget)
    settings["plan"]["update_in_backward"] = rounds
    tieroff.wrap(model, own_optimizer, settings, backend=BACKENDS[backend]())
    assert rounds_of(model, own_optimizer, rounds) == losses
    engine = tieroff.engine(model)
    assert engine.stats().phase == ("planned" if budget != "100%" else "nothing moved")
    phases = [op.phase for op in engine.trace.ops]
    last_forward = max(i for i, phase in enumerate(phases) if phase == "forward")
    last_backward = max(i for i, phase in enumerate(phases) if phase == "backward")
    assert "optimizer" in phases[last_forward:last_backward] and "optimizer" not in phases[:last_forward]
    tieroff.unwrap(model)
    assert is_same(model, plain)


def test_fewer_backward_passes_than_declared_are_updated_by_the_step(tmp_path: Path) -> None:
    plain, its_optimizer = make()
    losses = rounds_of(plain, its_optimizer, 2)
    model, own_optimizer = make()
    settings = config(tmp_path)
    settings["plan"]["update_in_backward"] = 3
    tieroff.wrap(model, own_optimizer, settings)
    assert rounds_of(model, own_optimizer, 2) == losses
    tieroff.unwrap(model)
    assert is_same(model, plain)


def in_one_buffer(model: nn.Module, optimizer: torch.optim.Optimizer, how: str, steps: int = 7) -> list[str]:
    """Trains with gradients in one vector, which is clipped and cleared as a whole; `how` they are put there."""
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    seen = []
    for step in range(steps):
        for parameter, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
            if how == "views":
                parameter.grad = part.view_as(parameter)
            else:
                parameter.grad = torch.empty_like(parameter)
                parameter.grad.data = part.view_as(parameter)
        x = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten()).backward()
        seen.append(float(flat.norm()).hex())
        flat.mul_(0.1 / flat.norm())
        optimizer.step()
        flat.zero_()
    return seen


@pytest.mark.parametrize("how", ["views", "data"])
def test_gradients_that_are_parts_of_other_memory_are_updated_by_the_step(how: str, tmp_path: Path) -> None:
    plain, its_optimizer = make()
    seen = in_one_buffer(plain, its_optimizer, how)
    model, own_optimizer = make()
    tieroff.wrap(model, own_optimizer, config(tmp_path))
    assert in_one_buffer(model, own_optimizer, how) == seen
    assert tieroff.engine(model).stats().phase == "planned"
    tieroff.unwrap(model)
    assert is_same(model, plain)


def test_more_backward_passes_than_declared_are_refused(tmp_path: Path) -> None:
    model, optimizer = make()
    settings = config(tmp_path)
    settings["plan"]["update_in_backward"] = 2
    tieroff.wrap(model, optimizer, settings)
    with pytest.raises(StateError, match=r"forward was called before optimizer\.step"):
        rounds_of(model, optimizer, 3)


def test_gradients_need_not_be_kept(tmp_path: Path) -> None:
    held = []
    for in_backward in (False, True):
        model, optimizer = make()
        settings = config(tmp_path, "100%")
        settings["plan"]["update_in_backward"] = in_backward
        tieroff.wrap(model, optimizer, settings)
        train(model, optimizer, 4)
        trace = tieroff.engine(model).trace
        lives = [life for life in trace.lifetimes if trace.tensors[life.tensor].kind is TensorClass.GRADIENT]
        held.append(max(sum(life.birth <= op < life.death for life in lives) for op in range(len(trace.ops))))
        tieroff.unwrap(model)
    assert 0 < held[1] <= held[0] / 2, "expected at most half of all gradients to be there at once"


@pytest.mark.parametrize("budget", ["50%", "100%"])
def test_hooks_of_users_come_before_the_update(budget: str, tmp_path: Path) -> None:
    results = []
    for is_wrapped in (False, True):
        model, optimizer = make()
        if is_wrapped:
            tieroff.wrap(model, optimizer, config(tmp_path, budget))
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(halve)
        results.append(train(model, optimizer, 6))
        if is_wrapped:
            tieroff.unwrap(model)
    assert results[0] == results[1]


@pytest.mark.parametrize("budget", ["50%", "100%"])
def test_updates_compute_outside_of_autocast(budget: str, tmp_path: Path) -> None:
    """As `optimizer.step()` does, even where backward itself runs inside."""
    results = []
    for is_wrapped in (False, True):
        model, optimizer = make("Adafactor")
        if is_wrapped:
            tieroff.wrap(model, optimizer, config(tmp_path, budget))
        losses = []
        for step in range(5):
            x = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(step))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()).hex())
        results.append(losses)
        if is_wrapped:
            with pytest.raises(StateError, match="outside of autocast"), torch.autocast("cpu", dtype=torch.bfloat16):
                train(model, optimizer, 1)
            tieroff.unwrap(model)
    assert results[0] == results[1]


@pytest.mark.parametrize("budget", ["50%", "100%"])
def test_unwrap_leaves_a_model_like_any_other(budget: str, tmp_path: Path) -> None:
    plain, plain_optimizer = make()
    model, optimizer = make()
    train(plain, plain_optimizer, 4)
    tieroff.wrap(model, optimizer, config(tmp_path, budget))
    train(model, optimizer, 4)
    for one, its_optimizer in ((plain, plain_optimizer), (model, optimizer)):
        one(torch.zeros(2, 32, dtype=torch.long)).sum().backward()
        if one is model:
            tieroff.unwrap(model)  # what is left is updated by the plain step
        its_optimizer.step()
        its_optimizer.zero_grad()
    assert train(model, optimizer, 2) == train(plain, plain_optimizer, 2)
    model(torch.zeros(2, 32, dtype=torch.long)).sum().backward()
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())
    model.half()


def test_a_model_is_converted_before_its_gradients_are_cleared(tmp_path: Path) -> None:
    model, optimizer = make("SGD")
    tieroff.wrap(model, optimizer, config(tmp_path))
    model(torch.zeros(2, 32, dtype=torch.long)).sum().backward()
    optimizer.step()
    model.double()
    assert all(p.dtype is torch.float64 for p in model.parameters())
    optimizer.zero_grad()
    tieroff.unwrap(model)


def test_hooks_before_the_step_have_it_wait(tmp_path: Path) -> None:
    """They may change gradients, so they come first, as in the plain run."""

    def shrink(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    results = []
    for is_wrapped in (False, True):
        model, optimizer = make()
        if is_wrapped:
            tieroff.wrap(model, optimizer, config(tmp_path))
        optimizer.register_step_pre_hook(shrink)
        results.append(train(model, optimizer, 5))
        if is_wrapped:
            assert not any(op.name.startswith("bucket") and op.phase == "backward" for op in tieroff.engine(model).trace.ops)
            tieroff.unwrap(model)
    assert results[0] == results[1]


def closure(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    optimizer.zero_grad()
    x = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(step))
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    return loss.item()


def test_a_closure_has_its_own_backward(tmp_path: Path) -> None:
    results = []
    for is_wrapped in (False, True):
        model, optimizer = make()
        if is_wrapped:
            tieroff.wrap(model, optimizer, config(tmp_path))
        results.append([optimizer.step(partial(closure, model, optimizer, step)) for step in range(6)])
        if is_wrapped:
            tieroff.unwrap(model)
    assert results[0] == results[1]


class Coupled(torch.optim.SGD):
    """An optimizer of one's own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(0.1 * p.grad / norm)


def test_an_optimizer_that_is_stepped_whole_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    results = []
    for is_wrapped in (False, True):
        torch.manual_seed(0)
        model = Tied()
        optimizer = Coupled(model.parameters())
        if is_wrapped:
            with caplog.at_level(logging.WARNING, "tieroff"):
                tieroff.wrap(model, optimizer, config(tmp_path, "100%"))
            assert "update_in_backward has no effect: this optimizer is stepped whole" in caplog.text
        results.append(train(model, optimizer, 5))
        if is_wrapped:
            tieroff.unwrap(model)
    assert results[0] == results[1]
