"""Buckets that are updated in backward: an error where a loop would train otherwise than the plain one."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.support.covering import pairwise
from tests.support.in_backward import WIDTH, Use, backward_again, clip, config, make, read, train
from tieroff.errors import StateError
from tieroff.runtime.optimizer.in_backward import AppliedGradient
from tieroff.runtime.optimizer.update import BucketUpdate


def clear(model: nn.Module) -> None:
    for parameter in model.get_submodule("blocks.1").parameters():
        parameter.grad = None


def replace(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def decay(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def forward(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.zeros(2, 32, dtype=torch.long))


@pytest.mark.parametrize(
    ("use", "budget", "steps"), pairwise([clip, read, backward_again, clear, replace, decay, forward], ["50%", "100%"], [0, 5])
)
def test_a_loop_that_wants_gradients_is_told(use: Use, budget: str, steps: int, tmp_path: Path) -> None:
    model, optimizer = make()
    tieroff.wrap(model, optimizer, config(tmp_path, budget))
    train(model, optimizer, steps)
    with pytest.raises(StateError, match="update_in_backward"):
        train(model, optimizer, 1, use)
    optimizer.zero_grad()
    if use in (clip, read):  # a loop that goes on has left a step out
        with pytest.raises(StateError, match="forward was called before"):
            train(model, optimizer, 1)
    train(model, optimizer, 3)
    tieroff.unwrap(model)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("budget", ["50%", "100%"])
@pytest.mark.parametrize("steps", [1, 5])
def test_a_step_that_is_left_out_is_told(steps: int, budget: str, tmp_path: Path) -> None:
    model, optimizer = make()
    tieroff.wrap(model, optimizer, config(tmp_path, budget))
    train(model, optimizer, steps)
    model(torch.zeros(2, 32, dtype=torch.long)).sum().backward()
    optimizer.zero_grad()
    with pytest.raises(StateError, match="forward was called before"):
        train(model, optimizer, 1)
    train(model, optimizer, 2)
    tieroff.unwrap(model)


@pytest.mark.parametrize("budget", ["50%", "100%"])
def test_options_that_change_after_backward_are_told(budget: str, tmp_path: Path) -> None:
    model, optimizer = make()
    tieroff.wrap(model, optimizer, config(tmp_path, budget))

    def schedule(_: nn.Module) -> None:
        optimizer.param_groups[0]["lr"] *= 2

    with pytest.raises(StateError, match="options of the optimizer"):
        train(model, optimizer, 1, schedule)
    tieroff.unwrap(model)


@pytest.mark.parametrize("budget", ["50%", "100%"])
def test_an_update_that_fails_does_not_count_as_done(budget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make("SGD")
    tieroff.wrap(model, optimizer, config(tmp_path, budget))
    train(model, optimizer, 4)

    def fail(self: BucketUpdate, bucket: list[torch.Tensor], args: Any, kwargs: dict[str, Any]) -> None:
        raise MemoryError("no memory for the update")

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(BucketUpdate, "step_on", fail)
        train(model, optimizer, 1)
    with pytest.raises(StateError, match="one whose update failed"):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, 3)
    tieroff.unwrap(model)


@pytest.mark.parametrize("budget", ["50%", "100%"])
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_recomputation_does_not_read_new_values(is_reentrant: bool, budget: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Recomputed(is_reentrant)
    optimizer = torch.optim.AdamW(model.parameters())
    tieroff.wrap(model, optimizer, config(tmp_path, budget))
    with pytest.raises(StateError, match="after it was updated"):
        model(torch.randn(64, WIDTH)).square().mean().backward()
    tieroff.unwrap(model)


class Recomputed(nn.Module):
    """A checkpointed block that reads a weight of a layer whose gradient is final before it runs again."""

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.between = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
        self.is_reentrant = is_reentrant

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.inner(x) @ self.last.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.utils.checkpoint.checkpoint(self.block, self.first(x), use_reentrant=self.is_reentrant)
        out: torch.Tensor = self.last(self.between(h))
        return out


@pytest.mark.parametrize("budget", ["50%", "100%"])
def test_a_second_step_does_not_pass_for_one(budget: str, tmp_path: Path) -> None:
    model, optimizer = make()
    tieroff.wrap(model, optimizer, config(tmp_path, budget))
    train(model, optimizer, 4)
    with pytest.raises(StateError, match="update_in_backward"):
        train(model, optimizer, 1, lambda _: optimizer.step())
    tieroff.unwrap(model)


def test_gradients_are_refused_not_read() -> None:
    parameter = nn.Parameter(torch.randn(4, 3))
    parameter.grad = AppliedGradient(parameter)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    assert parameter.grad.shape == (4, 3) and "AppliedGradient" in repr(parameter.grad)
    for use in (
        lambda: parameter.grad + 1,
        lambda: parameter.grad.zero_(),
        lambda: parameter.grad.clone(),
        lambda: parameter.grad.abs(),
        lambda: (parameter * 2).sum().backward(),
        lambda: torch.nn.utils.clip_grad_norm_([parameter], 1.0),
        lambda: tieroff.clip_grad_norm_([parameter], 1.0),
        lambda: parameter.grad.data_ptr(),
        lambda: parameter.grad.share_memory_(),
        lambda: pickle.dumps(parameter.grad),
        lambda: scaler.unscale_(torch.optim.SGD([parameter])),
    ):
        with pytest.raises((StateError, AssertionError, AttributeError)) as caught:
            use()
        assert caught.type is StateError, caught.value


class Detached(nn.Module):
    """Backward uses a weight's value where no gradient comes from it, after the gradient is final."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))  # of other buckets
        self.second = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))  # its gradient comes in between: then the second layer is updated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sin(self.first(x)) @ self.second.weight.detach()
        return self.second(h * self.scale)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("budget", ["60%", "100%"])
def test_new_values_are_never_used_for_old_ones(is_fused: bool, budget: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Detached()
    optimizer = torch.optim.AdamW(model.parameters(), fused=is_fused)
    tieroff.wrap(model, optimizer, config(tmp_path, budget))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(64, WIDTH)).square().mean().backward()
        optimizer.step()
    tieroff.unwrap(model)
