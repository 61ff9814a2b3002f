"""Threads that use a wrapped model: what they compute is right, or they are told that they cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.support.twins import Setting, adam, assert_same, follow
from tieroff.errors import StateError

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning")]
THREADS = 32


SETTINGS: dict[str, dict[str, Any]] = {
    "cpu-floor": {"nvme": True},
    "delayed-floor": {"delayed": True},
    "cpu-auto-80": {"policy": "auto", "device": "80%", "nvme": True},
    "delayed-auto-50": {"policy": "auto", "device": "50%", "delayed": True},
    "delayed-auto-100": {"policy": "auto", "device": "100%", "delayed": True},
}


@pytest.fixture(params=SETTINGS)
def each(tmp_path: Path, request: pytest.FixtureRequest) -> Setting:
    return Setting(tmp_path, **SETTINGS[request.param])


class Branches(nn.Module):
    """Branches that forward computes in a pool of threads."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(3) as pool:
            outs = list(pool.map(lambda branch: branch(x), self.branches))
        out: torch.Tensor = sum(torch.relu(y) for y in outs)  # type: ignore[assignment]
        return out


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def image() -> torch.Tensor:
    return torch.randn(2, 4, 24, 24)


def train(model: Any, optimizer: Any, index: int = 0) -> Any:
    loss = model(image()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def made(kind: Callable[[], nn.Module]) -> tuple[Any, Any]:
    model = kind()
    return model, adam(model)


def in_threads(work: Callable[[int], Any]) -> list[Any]:
    """Runs `work` in many threads that start together; returns what each returned."""
    start = threading.Barrier(THREADS)

    def run(number: int) -> Any:
        start.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


@pytest.mark.parametrize("steps", [0, 4])
def test_threads_that_infer_get_the_plain_outputs(steps: int, each: Setting) -> None:
    torch.manual_seed(0)
    model, optimizer = made(Chain)
    each.wrap(model, optimizer)
    for _ in range(steps):
        train(model, optimizer)
    images = [image() for _ in range(THREADS)]
    with torch.no_grad():
        expected = [model(x).clone() for x in images]

    def infer(number: int) -> bool:
        with torch.no_grad() if number % 2 else torch.inference_mode():
            return all(torch.equal(model(images[number]), expected[number]) for _ in range(6))

    assert all(in_threads(infer))
    tieroff.unwrap(model)


def test_threads_that_infer_beside_training_change_nothing(each: Setting) -> None:
    def run(setting: Setting | None) -> Any:
        torch.manual_seed(0)
        model, optimizer = made(Chain)
        if setting is not None:
            setting.wrap(model, optimizer)
        is_over, x = threading.Event(), torch.ones(2, 4, 24, 24)
        frozen: list[bool] = []

        def infer() -> None:
            while not is_over.is_set():
                with torch.no_grad():
                    frozen.append(bool(torch.isfinite(model(x)).all()))

        threads = [threading.Thread(target=infer) for _ in range(3)] if setting is not None else []
        for thread in threads:
            thread.start()
        try:
            torch.manual_seed(1)
            images = [image() for _ in range(10)]
            losses = []
            for x_train in images:
                loss = model(x_train).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach().clone())
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        if setting is not None:
            assert all(frozen) and len(frozen) > 0
            tieroff.unwrap(model)
        return losses, [p.detach().clone() for p in model.parameters()]

    (losses, values), (our_losses, our_values) = run(None), run(each)
    assert [a.item() for a in losses] == [a.item() for a in our_losses]
    assert all(torch.equal(a, b) for a, b in zip(values, our_values, strict=True))


def test_branches_of_one_forward_in_a_pool(each: Setting) -> None:
    plain = follow(lambda: made(Branches), train, 7)
    assert_same(plain.seen, follow(lambda: made(Branches), train, 7, each).seen)


def test_two_threads_that_train_one_model_are_refused(setting: Setting) -> None:
    model, optimizer = made(Chain)
    setting.wrap(model, optimizer)
    errors: list[str] = []

    def other() -> None:
        try:
            model(image())
        except StateError as error:
            errors.append(str(error))

    def hook(*_: Any) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    handle = model.layers[2].register_forward_hook(hook)
    train(model, optimizer)
    handle.remove()
    assert len(errors) == 1
    assert "expected one thread to train this model at a time" in errors[0]
    train(model, optimizer)
    tieroff.unwrap(model)


def in_another_thread(model: Any, optimizer: Any, index: int) -> Any:
    """Whole steps in one new thread after the other, and some in the first one."""
    if index % 3 == 0:
        return train(model, optimizer)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(train, model, optimizer).result()


def test_training_goes_from_thread_to_thread(each: Setting) -> None:
    plain = follow(lambda: made(Chain), in_another_thread, 8)
    assert_same(plain.seen, follow(lambda: made(Chain), in_another_thread, 8, each).seen)
