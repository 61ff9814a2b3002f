"""Buckets that are updated in backward: the plain run's numbers, and an error where a loop wants the gradients."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tieroff.core.tensor import TensorClass
from tieroff.errors import StateError
from tieroff.runtime.backend import CpuBackend, DelayedBackend
from tieroff.runtime.early import AppliedGradient

Use = Callable[[nn.Module], object]  # what a loop does between backward and update
WIDTH = 160
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
}


class Tied(nn.Module):
    """An embedding that is the head too, layers with and without a bias, and one that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH, bias=False))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x)
        for block in self.blocks:
            h = h + block(h)
        logits: torch.Tensor = self.head(h)
        return logits


def config(folder: Path, budget: str = "50%") -> dict[str, Any]:
    return {
        "device": "cpu",
        "budget": {"device": budget, "host": "256KiB", "nvme": "64MiB"},
        "nvme": {"dirs": [str(folder)], "staging": "64KiB"},
        "plan": {"min_bytes": "4KiB", "update_in_backward": True},
    }


def make(optimizer: str = "AdamW") -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tied()
    return model, OPTIMIZERS[optimizer](model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, use: Use | None = None) -> list[str]:
    losses = []
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(steps):
        x = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten())
        loss.backward()
        if use is not None:
            use(model)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item().hex())
    return losses


def halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.data.mul_(0.5)


def is_same(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("backend", [CpuBackend, lambda: DelayedBackend(3)], ids=["cpu", "delayed"])
@pytest.mark.parametrize("budget", ["45%", "70%", "100%"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_numbers_are_those_of_the_plain_run(name: str, budget: str, backend: Callable[[], CpuBackend], tmp_path: Path) -> None:
    plain, plain_optimizer = make(name)
    losses = train(plain, plain_optimizer, 7)
    model, optimizer = make(name)
    tieroff.wrap(model, optimizer, config(tmp_path, budget), backend=backend())
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
        for key, value in plain_optimizer.state[q].items() if isinstance(value, torch.Tensor)
    )  # fmt: skip


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


def clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def read(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.norm().item()


def backward_again(model: nn.Module) -> None:
    model(torch.zeros(2, 32, dtype=torch.long)).sum().backward()


def clear(model: nn.Module) -> None:
    for parameter in model.blocks[1].parameters():
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


@pytest.mark.parametrize("use", [clip, read, backward_again, clear, replace, decay, forward])
@pytest.mark.parametrize("budget", ["50%", "100%"])
@pytest.mark.parametrize("steps", [0, 5])
def test_a_loop_that_wants_gradients_is_told(use: Use, budget: str, steps: int, tmp_path: Path) -> None:
    model, optimizer = make()
    tieroff.wrap(model, optimizer, config(tmp_path, budget))
    train(model, optimizer, steps)
    with pytest.raises(StateError, match="update_in_backward"):
        train(model, optimizer, 1, use)
    optimizer.zero_grad()
    if use in (clip, read):  # a loop that goes on has left a step out
        with pytest.raises(StateError, match="got a forward"):
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
    with pytest.raises(StateError, match="got a forward"):
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
    stepper = tieroff.engine(model)._custody.stepper
    run_on = stepper._run_on

    def fail(bucket: list[torch.Tensor], args: Any, kwargs: dict[str, Any]) -> None:
        raise MemoryError("no memory for the update")

    monkeypatch.setattr(stepper, "_run_on", fail)
    with pytest.raises(MemoryError):
        train(model, optimizer, 1)
    monkeypatch.setattr(stepper, "_run_on", run_on)
    with pytest.raises(StateError, match="one whose update failed"):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, 3)
    tieroff.unwrap(model)


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
            losses.append(loss.item().hex())
        results.append(losses)
        if is_wrapped:
            with pytest.raises(StateError, match="outside of autocast"), torch.autocast("cpu", dtype=torch.bfloat16):
                train(model, optimizer, 1)
            tieroff.unwrap(model)
    assert results[0] == results[1]


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
        lambda: parameter.grad + 1, lambda: parameter.grad.zero_(), lambda: parameter.grad.clone(),
        lambda: parameter.grad.abs(), lambda: (parameter * 2).sum().backward(),
        lambda: torch.nn.utils.clip_grad_norm_([parameter], 1.0), lambda: tieroff.clip_grad_norm_([parameter], 1.0),
        lambda: parameter.grad.data_ptr(), lambda: parameter.grad.share_memory_(), lambda: pickle.dumps(parameter.grad),
        lambda: scaler.unscale_(torch.optim.SGD([parameter])),
    ):  # fmt: skip
        with pytest.raises((StateError, AssertionError, AttributeError)) as caught:
            use()
        assert caught.type is StateError, caught.value


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
