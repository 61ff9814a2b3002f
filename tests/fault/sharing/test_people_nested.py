"""User code that the engine runs, and that evaluates the model: no interruption of the engine, so all is fetched as ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tieroff
from tests.support.twins import Setting, assert_same, follow, recompute_in_every_plan, sgd, usual_step
from tieroff.runtime.signal_safety import is_interrupting

pytestmark = pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning")
STEPS = 8
OWN_STEP = "an optimizer's own step"

_looks: list[tuple[str, bool]] = []  # where user code looked, and whether it was taken for a handler


def look_at(where: str) -> None:
    _looks.append((where, is_interrupting()))


class Looking(nn.Module):
    """A layer with a momentum encoder that is evaluated in the middle of its forward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.online = nn.Linear(8, 8)
        self.momentum = nn.Linear(8, 8).requires_grad_(False)
        self._where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            look_at(self._where)
            target = self.momentum(x)
        out: torch.Tensor = torch.tanh(self.online(x)) + target
        return out


class Recurrent(nn.LSTM):
    """A recurrent layer of people's own, and one that is evaluated without gradients."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.momentum = nn.LSTM(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        with torch.no_grad():
            look_at("a recurrent layer")
            target, _ = self.momentum(x)
        out, _ = super().forward(x)
        return out + target


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Looking("a layer that may run again")
        self.second = Looking("a layer in a checkpoint")
        self.recurrent = Recurrent()
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.second, self.first(x), use_reentrant=False)
        return self.last(self.recurrent(out[None])[0])


def evaluated(model: Any, where: str) -> torch.Tensor:
    with torch.no_grad():
        look_at(where)
        out: torch.Tensor = model(torch.ones(2, 8)).clone()
        return out


def loss_of(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(4, 8)).square().mean()
    return loss


def hooked(model: Any, found: list[torch.Tensor]) -> list[Any]:
    """Hangs hooks where people do, each of which evaluates the model or a layer."""

    def on_layer(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        with torch.no_grad():
            look_at("a hook of a layer")
            found.append(model.first.momentum(torch.ones(2, 8)).clone())

    def on_gradient(parameter: torch.Tensor) -> None:
        found.append(evaluated(model, "a hook on a gradient"))

    return [model.last.register_forward_hook(on_layer), model.last.bias.register_post_accumulate_grad_hook(on_gradient)]


def step_with_hooks(model: Any, optimizer: Any, backward: Callable[[torch.Tensor], None]) -> Any:
    found: list[torch.Tensor] = []
    handles = hooked(model, found)
    optimizer.zero_grad()
    loss = loss_of(model)
    backward(loss)
    optimizer.step()
    for handle in handles:
        handle.remove()
    return loss, found


def backward_with_hooks(model: Any, optimizer: Any, index: int) -> Any:
    return step_with_hooks(model, optimizer, lambda loss: loss.backward())


def backward_to_inputs(model: Any, optimizer: Any, index: int) -> Any:
    """Backward is a function that gets parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return step_with_hooks(model, optimizer, lambda loss: torch.autograd.backward(loss, inputs=trained))


def gradients_of(model: Any, optimizer: Any, index: int) -> Any:
    """Gradients are asked for, and assigned."""
    trained = [p for p in model.parameters() if p.requires_grad]
    loss = loss_of(model)
    for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
        parameter.grad = gradient
    optimizer.step()
    return loss


def hooks_of_the_optimizer(model: Any, optimizer: Any, index: int) -> Any:
    found: list[torch.Tensor] = []

    def average(*_: Any) -> None:
        found.append(evaluated(model, "a hook of the optimizer"))
        with torch.no_grad():
            model.first.momentum.weight.lerp_(model.first.online.weight, 0.1)

    handles = [optimizer.register_step_pre_hook(average), optimizer.register_step_post_hook(average)]
    optimizer.zero_grad()
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    for handle in handles:
        handle.remove()
    return loss, found


def with_closure(model: Any, optimizer: Any, index: int) -> Any:
    found: list[torch.Tensor] = []
    data = torch.randn(4, 8)

    def closure() -> torch.Tensor:
        found.append(evaluated(model, "a closure"))
        optimizer.zero_grad()
        loss: torch.Tensor = model(data).square().mean()
        loss.backward()
        found.append(evaluated(model, "a closure behind its backward"))
        return loss

    return optimizer.step(closure), found


class Evaluates(torch.optim.SGD):
    """Its step evaluates the model that it is of, before and after the update."""

    model: Any = None

    def step(self, closure: Any = None) -> Any:
        before = evaluated(self.model, OWN_STEP)
        super().step(closure)
        self.seen = before, evaluated(self.model, OWN_STEP)
        return None


def its_step_evaluates(model: Any, optimizer: Any, index: int) -> Any:
    optimizer.model = model
    optimizer.zero_grad()
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    return loss, optimizer.seen


def made(kind: Callable[..., Any] | None = None, **options: Any) -> Any:
    def make() -> Any:
        model = Net()
        return (model, sgd(model)) if kind is None else (model, kind(model.parameters(), **options))

    return make


SGD, LBFGS = torch.optim.SGD, torch.optim.LBFGS
LOOPS: dict[str, tuple[Any, Any]] = {
    "backward-with-hooks": (made(), backward_with_hooks),
    "backward-to-inputs": (made(), backward_to_inputs),
    "gradients": (made(), gradients_of),
    "hooks-of-the-optimizer": (made(), hooks_of_the_optimizer),
    "closure": (made(), with_closure),
    "closures-of-lbfgs": (made(LBFGS, lr=0.1, max_iter=2), with_closure),
    "its-step-evaluates": (made(Evaluates, lr=0.1), its_step_evaluates),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "cpu-floor": {"nvme": True},
    "delayed-floor": {"delayed": True},
    "delayed-auto-80": {"policy": "auto", "device": "80%", "delayed": True},
}


@pytest.fixture(params=SETTINGS)
def each(tmp_path: Path, request: pytest.FixtureRequest) -> Setting:
    return Setting(tmp_path, **SETTINGS[request.param])


@pytest.mark.parametrize("loop", LOOPS)
def test_evaluations_in_user_code_that_the_engine_runs(loop: str, each: Setting) -> None:
    make, step = LOOPS[loop]
    plain = follow(make, step, STEPS)
    _looks.clear()
    wrapped = follow(make, step, STEPS, each)
    assert_same(plain.seen, wrapped.seen)
    taken = {where for where, is_taken in _looks if is_taken}
    # The engine has lifted what an optimizer's own step is about to write: it is read where it lies.
    assert len(_looks) > STEPS and taken == ({OWN_STEP} if step is its_step_evaluates else set())
    # Its history grows, so that a step goes over its budget, is traced again, and ends where nothing is worth a move.
    assert wrapped.phase == "planned" or loop == "closures-of-lbfgs"


@pytest.fixture
def _recomputing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every plan run a layer again."""
    recompute_in_every_plan(monkeypatch, ("first",))


@pytest.mark.usefixtures("_recomputing")
def test_an_evaluation_in_a_layer_that_runs_again(each: Setting) -> None:
    plain = follow(made(), usual_step, STEPS)
    _looks.clear()
    wrapped = follow(made(), usual_step, STEPS, each)
    assert_same(plain.seen, wrapped.seen)
    again = [is_taken for where, is_taken in _looks if where == "a layer that may run again"]
    assert len(again) > STEPS and not any(is_taken for _, is_taken in _looks)
    assert wrapped.phase == "planned"


@torch.compiler.disable  # type: ignore[untyped-decorator]
def looked_between_graphs(module: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        look_at("between two graphs of a compiled layer")
        out: torch.Tensor = module.momentum(x)
        return out


class Compiled(nn.Module):
    """A compiled layer whose graph breaks for what people evaluate in it."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Linear(8, 8)
        self.momentum = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.online(x)) + looked_between_graphs(self, x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf", "ignore::DeprecationWarning")
@pytest.mark.parametrize("each", ["cpu-floor", "delayed-floor"], indirect=True)  # what compiling took may make a share roomy
@pytest.mark.parametrize("is_in_place", [True, False])
def test_an_evaluation_between_two_graphs_of_a_compiled_layer(is_in_place: bool, each: Setting) -> None:
    def make() -> Any:
        layer: Any = Compiled()
        if is_in_place:
            layer.compile(backend="eager")
        else:
            layer = torch.compile(layer, backend="eager")
        model = nn.Sequential(layer, nn.Linear(8, 8))
        return model, sgd(model)

    plain = follow(make, usual_step, STEPS)
    _looks.clear()
    wrapped = follow(make, usual_step, STEPS, each)
    assert_same(plain.seen, wrapped.seen)
    assert len(_looks) >= STEPS and not any(is_taken for _, is_taken in _looks)
    assert wrapped.phase == "planned"


def test_an_evaluation_in_hooks_on_saved_tensors_and_in_another_method(each: Setting) -> None:
    class Steps(Net):
        def training_step(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                look_at("a method that begins a step")
                target = self.first.momentum(x)
            return (self(x) - target).square().mean()

    def make() -> Any:
        model = Steps()
        return model, sgd(model)

    def step(model: Any, optimizer: Any, index: int) -> Any:
        wrapped = tieroff.engine(model) if index == 0 and hasattr(model.__dict__.get("forward"), "engine") else None
        if wrapped is not None:
            wrapped.begin_in("training_step")

        def hook(tensor: torch.Tensor) -> torch.Tensor:
            evaluated(model, "a hook on a saved tensor")
            return tensor

        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(hook, hook):
            loss = model.training_step(torch.randn(4, 8))
        loss.backward()
        optimizer.step()
        return loss

    plain = follow(make, step, STEPS)
    _looks.clear()
    wrapped = follow(make, step, STEPS, each)
    assert_same(plain.seen, wrapped.seen)
    assert len({where for where, _ in _looks}) > 3 and not any(is_taken for _, is_taken in _looks)
    assert wrapped.phase == "planned"
