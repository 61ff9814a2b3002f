"""User code in the middle of steps that never repeat: what it writes counts, and nothing stays above where it looks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tieroff
from harness.varied import Experts, Plain
from tests.support.parity import BACKENDS
from tieroff.runtime.execution.experience import Experience
from tieroff.runtime.optimizer.update import BucketUpdate

FREE_FROM = 14  # steps until so many were traced that no more are
STEPS = FREE_FROM + 5

Model = tuple[nn.Module, torch.optim.Optimizer]


def wrap(made: Model, folder: Path, backend: str, budget: str = "70%") -> None:
    config = {"device": "cpu", "budget": {"device": budget, "nvme": "64MiB"}, "nvme": {"dirs": [str(folder)]}}
    tieroff.wrap(*made, config={**config, "plan": {"min_bytes": "1KiB"}}, backend=BACKENDS[backend]())


def make(kind: type[nn.Module] = Experts) -> Model:
    torch.manual_seed(0)
    model = kind(64, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def usual(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(torch.randn(32, 64)).pow(2).mean()
    loss.backward()
    return loss


def check_equal(
    folder: Path, backend: str, prepare: Callable[[nn.Module], None], passes: Callable[[nn.Module, int], Tensor]
) -> None:
    """Trains plain and wrapped; every loss and parameter has to be the same."""
    seen = []
    for is_wrapped in (False, True):
        made = model, optimizer = make()
        prepare(model)
        if is_wrapped:
            wrap(made, folder, backend)
        losses = []
        for step in range(STEPS):
            torch.manual_seed(step)
            losses.append(passes(model, step).item())
            optimizer.step()
            optimizer.zero_grad()
        if is_wrapped:
            assert tieroff.engine(model).stats().phase == "on demand"
            tieroff.unwrap(model)
        seen.append((losses, [p.detach().clone() for p in model.parameters()]))
    assert seen[0][0] == seen[1][0]
    assert all(map(torch.equal, seen[0][1], seen[1][1]))


@pytest.fixture(params=["cpu", "delayed"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_gradient_hooks_that_write_data(tmp_path: Path, backend: str) -> None:
    def prepare(model: nn.Module) -> None:
        earlier: list[Tensor] = []

        def arrived(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.data.mul_(0.5)
            for known in earlier[-3:]:
                if known.grad is not None:
                    known.grad.data.mul_(0.9)
            earlier.append(parameter)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(arrived)

    check_equal(tmp_path, backend, prepare, usual)


def test_forward_that_writes_data_of_parameters_after_their_use(tmp_path: Path, backend: str) -> None:
    def prepare(model: nn.Module) -> None:
        assert isinstance(model, Experts)
        forward = model.forward

        def decaying(x: Tensor) -> Tensor:
            out = forward(x)
            for parameter in model.mixers.parameters():
                parameter.data.mul_(0.99)
            return out

        model.forward = decaying  # type: ignore[method-assign]

    check_equal(tmp_path, backend, prepare, usual)


def test_exception_in_backward_and_writes_after_it(tmp_path: Path, backend: str) -> None:
    def passes(model: nn.Module, step: int) -> Tensor:
        backup = [p.detach().clone() for p in model.parameters()]
        out = model(torch.randn(32, 64))
        if step >= FREE_FROM:
            broken = out.clone()
            first = next(model.parameters())
            handle = first.register_hook(_raise)
            with pytest.raises(KeyboardInterrupt):
                broken.sum().backward()
            handle.remove()
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), backup, strict=True):
                    parameter.data.copy_(value * 0.5)
                    if parameter.grad is not None:
                        parameter.grad.data.mul_(0.25)
        return usual(model, step)

    check_equal(tmp_path, backend, lambda model: None, passes)


def _raise(grad: Tensor) -> None:
    raise KeyboardInterrupt


def test_exception_in_a_forward_in_backward_of_the_recorded_step(tmp_path: Path, backend: str) -> None:
    """Steps of this model, and of others, are recorded and planned as ever from then on."""
    model, optimizer = made = make(Plain)
    wrap(made, tmp_path, backend)

    def run_again(grad: Tensor) -> None:
        with torch.enable_grad():
            model(torch.randn(32, 63))

    loss = model(torch.randn(32, 64)).pow(2).mean()
    loss.register_hook(run_again)
    with pytest.raises(RuntimeError, match="expected input with shape"):
        loss.backward()
    optimizer.zero_grad()
    for step in range(9):
        usual(model, step)
        optimizer.step()
        optimizer.zero_grad()
    assert tieroff.engine(model).stats().phase == "planned"
    tieroff.unwrap(model)


def test_exception_in_the_update_leaves_nothing_above(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model, optimizer = make()
    wrap(made, tmp_path, backend)
    for step in range(STEPS):
        torch.manual_seed(step)
        usual(model, step)
        optimizer.step()
        optimizer.zero_grad()
    usual(model, STEPS)
    run, calls = BucketUpdate.step_on, []

    def fails(self: BucketUpdate, *args: Any) -> None:
        calls.append(self)
        if len(calls) == 4:
            raise KeyboardInterrupt
        run(self, *args)

    monkeypatch.setattr(BucketUpdate, "step_on", fails)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    monkeypatch.undo()
    items = [*tieroff.engine(model).executor.homes.parameters.values()]
    assert items and all(item.device is None and not item.is_lifted for item in items)
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
    tieroff.unwrap(model)
    assert all(bool((parameter == 7.0).all()) for parameter in model.parameters())


@pytest.mark.parametrize("budget", ["70%", "85%"])
def test_bucket_is_on_the_device_when_it_is_updated(
    tmp_path: Path, backend: str, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = BucketUpdate.step_on
    away: list[str] = []

    def looks(self: BucketUpdate, bucket: list[Tensor], *args: Any) -> None:
        away.extend(item.name for item in self._items_of(bucket) if item.device is None)
        run(self, bucket, *args)

    monkeypatch.setattr(BucketUpdate, "step_on", looks)
    made = model, optimizer = make()
    wrap(made, tmp_path, backend, budget)
    for step in range(STEPS):
        torch.manual_seed(step)
        usual(model, step)
        optimizer.step()
        optimizer.zero_grad()
    assert tieroff.engine(model).stats().phase == "on demand"
    tieroff.unwrap(model)
    assert away == []


def test_graph_that_lives_on_takes_no_room_from_the_next_step(tmp_path: Path, backend: str) -> None:
    made = model, optimizer = make()
    wrap(made, tmp_path, backend)
    engine = tieroff.engine(model)
    graphs: list[Tensor] = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = model(torch.randn(32, 64)).pow(2).mean()
        loss.backward(retain_graph=True)
        graphs[:] = [loss]
        if step < STEPS - 1:
            optimizer.step()
        optimizer.zero_grad()
    old = list(engine.executor.activations)
    assert any(item.device is not None for item in old)
    seen: list[bool] = []
    assert isinstance(model, Experts)
    model.mixers[0].register_forward_pre_hook(lambda *_: seen.append(any(item.device is not None for item in old)))
    model(torch.randn(32, 64))
    assert seen == [False]
    tieroff.unwrap(model)


def test_room_is_only_for_inputs_that_a_recorded_one_covers() -> None:
    experience = Experience()
    assert not experience.covers(((8, 100),))
    experience.add({"w"}, {"w"}, [((8, 100), (8,)), ((4, 200), (4,))], 5)
    experience.add({"v"}, set(), [((2, 2), (2,))], 3)
    assert experience.room_bytes == 3 and experience.clean == {"v"}
    assert experience.covers(((8, 100), (8,))) and experience.covers(((3, 150), (4,)))
    assert not experience.covers(((1, 800), (1,)))  # as many elements, in one dimension
    assert not experience.covers(((8, 100),)) and not experience.covers(((8, 100, 1), (8,)))


def test_room_ends_with_the_first_larger_micro_batch(tmp_path: Path, backend: str) -> None:
    made = model, optimizer = make(Plain)
    wrap(made, tmp_path, backend)
    on_demand = tieroff.engine(model).executor.on_demand
    rooms = []
    for rows in (*range(20, 37), 10):
        model(torch.randn(rows, 64)).pow(2).mean().backward()
        rooms.append(on_demand.room_bytes)
        if rows == 10:
            model(torch.randn(400, 64)).pow(2).mean().backward()
            rooms.append(on_demand.room_bytes)
        optimizer.step()
        optimizer.zero_grad()
    tieroff.unwrap(model)
    assert rooms[-2] > 0 == rooms[-1]


def test_what_was_learned_of_another_model_is_void(tmp_path: Path, backend: str) -> None:
    made = model, optimizer = make()
    wrap(made, tmp_path, backend)
    for step in range(3):
        torch.manual_seed(step)
        usual(model, step)
        optimizer.step()
        optimizer.zero_grad()
    engine = tieroff.engine(model)
    assert engine.executor.on_demand.experience.clean
    assert isinstance(model, Experts)
    model.mixers[0] = nn.Linear(64, 64)
    engine.settle()
    assert not engine.executor.on_demand.experience.clean
    tieroff.unwrap(model)
