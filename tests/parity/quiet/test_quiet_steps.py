"""Steps without quiet events compute what plain ones do, keep to the same memory, and notice when they leave their plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.support.delayed import DelayedBackend
from tieroff.runtime.step.feedback import Feedback

Change = Callable[[nn.Module, torch.optim.Optimizer], None]


@pytest.fixture(autouse=True)
def _unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at planned steps, so all but the first of a plan may be quiet."""
    monkeypatch.setattr(Feedback, "passes_next", property(lambda _: True))


class Net(nn.Module):
    """Layers that save activations once, twice and as views; `path` says which layers run, in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(8))
        self.norm = nn.BatchNorm1d(24)
        self.path = list(range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.path:
            y = torch.tanh(self.layers[number](x))
            x = y * y.view(2, -1, 24).view(-1, 24) + x
        return self.norm(x).exp()  # an output that is saved


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-3)


class Replacing(torch.optim.Optimizer):
    """Momentum whose state is a new tensor after each update."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    before = self.state[p].get("momentum", torch.zeros_like(p))
                    self.state[p]["momentum"] = before * 0.9 + p.grad
                    p -= group["lr"] * self.state[p]["momentum"]


tieroff.per_parameter(Replacing)


class Run:
    """A plain and a wrapped model that are trained alike."""

    def __init__(
        self,
        budget: str = "75%",
        make: Callable[[Any], torch.optim.Optimizer] = adam,
        backend: Any = None,
        model: type[Net] = Net,
    ) -> None:
        self.models, self.optimizers = [], []
        for is_wrapped in (True, False):
            torch.manual_seed(0)
            made = model()
            optimizer = make(made.parameters())
            if is_wrapped:
                config = {
                    "device": "cpu",
                    "budget": {"device": budget, "host": "1MiB"},
                    "plan": {"policy": "auto", "min_bytes": 0, "background": False},
                }
                tieroff.wrap(made, optimizer, config, backend=backend)
            self.models.append(made)
            self.optimizers.append(optimizer)
        self.engine = tieroff.engine(self.models[0])
        self._count = 0

    def step(self, backwards: int = 1, before_backward: Change | None = None, before_update: Change | None = None) -> None:
        """Trains both for a step, and compares all that there is."""
        batch = torch.randn(32, 24, generator=torch.Generator().manual_seed(self._count))
        self._count += 1
        losses = []
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            loss = model(batch).square().mean()
            if before_backward is not None:
                before_backward(model, optimizer)
            for left in reversed(range(backwards)):
                loss.backward(retain_graph=left > 0)
            if before_update is not None:
                before_update(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        self.compare()

    def compare(self) -> None:
        for a, b in zip(*(model.state_dict().values() for model in self.models), strict=True):
            assert torch.equal(a, b)
        for one, other in zip(*(optimizer.state.values() for optimizer in self.optimizers), strict=True):
            for key, value in one.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[key])), key

    def both(self, change: Change) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            change(model, optimizer)

    def settle(self) -> None:
        """Trains until steps are quiet."""
        for _ in range(6):
            self.step()
        assert self.is_quiet

    @property
    def is_quiet(self) -> bool:
        return not self.engine.executor.clock.times.is_whole

    @property
    def fallbacks(self) -> int:
        return self.engine.stats().fallbacks


@pytest.mark.parametrize("make", [adam, Replacing], ids=["adam", "replacing"])
@pytest.mark.parametrize("budget", ["55%", "75%", "95%"])
@pytest.mark.parametrize("late", [False, True], ids=["cpu", "delayed"])
def test_quiet_steps_are_right_and_take_the_same_memory(
    budget: str, late: bool, make: Callable[[Any], torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(budget, make, DelayedBackend() if late else None)
    run.settle()
    quiet = run.engine.executor.clock.times
    run.step()
    peak_bytes = run.engine.stats().peak_device_bytes
    monkeypatch.setattr(Feedback, "passes_next", property(lambda _: False))
    monkeypatch.setattr(Feedback, "take", lambda *_: False)
    run.step()
    run.step()
    whole = run.engine.executor.clock.times
    assert whole.is_whole and len(quiet.host_starts_ns) < len(whole.host_starts_ns)
    assert run.engine.stats().peak_device_bytes == peak_bytes
    assert run.fallbacks == 0
    tieroff.unwrap(run.models[0])


def _longer(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model.path = [0, 1, 2, 3, 3, 4, 5, 6, 7]  # type: ignore[assignment]


def _shorter(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model.path = [0, 1, 2, 4, 5, 6, 7]  # type: ignore[assignment]


def _turned(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model.path = [7, 1, 2, 4, 3, 5, 6, 0]  # type: ignore[assignment]


def _usual(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model.path = list(range(8))  # type: ignore[assignment]


@pytest.mark.parametrize("budget", ["55%", "90%"])
@pytest.mark.parametrize("change", [_longer, _shorter, _turned])
def test_a_quiet_step_that_is_another_one_is_right_and_leaves_its_plan(change: Change, budget: str) -> None:
    run = Run(budget)
    run.settle()
    run.both(change)
    run.step()
    run.both(_usual)
    run.step()
    assert len(list(run.engine.executor.activations)) == 0
    if change is not _turned:  # as many tensors of the same sizes, in the same order: it may not notice, and need not
        kind = run.engine.executor.state.kind
        assert kind is not None and kind.mismatches in (0, 1)
    for _ in range(3):
        run.step()
    assert run.fallbacks == 0
    tieroff.unwrap(run.models[0])


def test_a_quiet_step_that_leaves_its_plan_hands_over_what_was_left_alone() -> None:
    run = Run()
    run.settle()
    run.both(_longer)
    count = []

    def note(model: nn.Module, _: torch.optim.Optimizer) -> None:
        if model is run.models[0]:
            count.append(len(list(run.engine.executor.activations)))

    run.step(before_backward=note)
    assert run.fallbacks == 1
    assert count[0] > 20  # all that the step saved, and not only what the plan moves
    tieroff.unwrap(run.models[0])


def test_a_second_backward_of_a_quiet_step_adds_to_gradients_that_stay() -> None:
    run = Run()
    run.settle()
    run.step(backwards=2)
    run.step()
    tieroff.unwrap(run.models[0])


def _write_data(model: nn.Module, _: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.01)


def _assign_data(model: nn.Module, _: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.99


def _scale(model: nn.Module, _: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.mul_(0.5)


def _replace_gradients(model: nn.Module, _: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5


def _drop_gradients(model: nn.Module, _: torch.optim.Optimizer) -> None:
    for parameter in list(model.parameters())[::3]:
        parameter.grad = None


def _clip(model: nn.Module, _: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def _forget_state(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def _load_state(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def _freeze(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model.get_submodule("layers.2").requires_grad_(False)


def _evaluate(model: nn.Module, _: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.eval()(torch.ones(4, 24))
    model.train()


def _sleep(model: nn.Module, _: torch.optim.Optimizer) -> None:
    if hasattr(model, "_parameters") and type(model._parameters) is not dict:
        tieroff.sleep(model)
        tieroff.wake(model)


def _turn_groups(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].reverse()  # other buckets


@pytest.mark.parametrize(
    "change",
    [_turn_groups, _write_data, _assign_data, _forget_state, _load_state, _freeze, _evaluate, _sleep],
    ids=lambda c: c.__name__[1:],
)
@pytest.mark.parametrize("budget", ["55%", "90%"])
def test_what_user_code_changes_between_quiet_steps_counts(change: Change, budget: str) -> None:
    run = Run(budget)
    run.settle()
    run.both(change)
    for _ in range(4):
        run.step()
    tieroff.unwrap(run.models[0])


@pytest.mark.parametrize("change", [_scale, _replace_gradients, _drop_gradients, _clip, _write_data, _forget_state])
@pytest.mark.parametrize("budget", ["55%", "90%"])
def test_what_user_code_changes_before_the_update_of_a_quiet_step_counts(change: Change, budget: str) -> None:
    run = Run(budget)
    run.settle()
    for _ in range(3):
        run.step(before_update=change)
    run.step()
    tieroff.unwrap(run.models[0])


def test_an_error_in_a_quiet_step_leaves_the_next_ones_right() -> None:
    run = Run()
    run.settle()

    class Stop(Exception):
        """Comes in backward."""

    def stop(_: torch.Tensor) -> None:
        raise Stop

    for model, optimizer in zip(run.models, run.optimizers, strict=True):
        for _ in range(2):
            handle = model.get_parameter("layers.4.weight").register_hook(stop)
            with pytest.raises(Stop):
                model(torch.ones(32, 24)).sum().backward()
            handle.remove()
            optimizer.zero_grad()
    for _ in range(4):
        run.step()
    tieroff.unwrap(run.models[0])


def test_neighbours_that_need_nothing_are_updated_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for budget in ("90%", "95%", "98%"):  # plans differ, as durations do
        run = Run(budget)
        run.settle()
        buckets = run.engine.executor.runner.planned.executable.quiet.buckets  # type: ignore[union-attr]
        groups = {numbers for numbers in buckets.values() if len(numbers) > 1}
        if groups:
            break
        tieroff.unwrap(run.models[0])
    assert groups, "a plan was expected that leaves neighbours alone"
    calls: list[int] = []
    step: Any = torch.optim.Adam._init_group

    def note(self: Any, group: Any, *args: Any) -> Any:
        calls.append(len(group["params"]))
        return step(self, group, *args)

    monkeypatch.setattr(torch.optim.Adam, "_init_group", note)
    run.step()
    plain = max(calls)  # the plain model's call has all parameters
    of_wrapped = [count for count in calls if count != plain]
    assert sum(of_wrapped) == plain
    count = sum(name.startswith("bucket:") for name in (op.name for op in run.engine.trace.ops))
    assert len(of_wrapped) == count - sum(len(numbers) - 1 for numbers in groups)
    tieroff.unwrap(run.models[0])


class Beside(Net):
    """A layer that may compute something of its weight's size, which is saved in the weight's place and used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.is_beside = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:]:
            if self.is_beside:
                beside = torch.sin(x)[:24].exp()
                self.made.append(weakref.ref(beside))
                del beside
                x = torch.tanh(x)
            else:
                x = torch.tanh(layer(x))
        return self.norm(x)


def test_what_is_saved_in_a_parameters_place_does_not_keep_itself_alive() -> None:
    run = Run("95%", model=Beside)
    run.settle()
    for model in run.models:
        model.is_beside = True  # type: ignore[assignment]
    run.step()
    for model in run.models:
        assert all(made() is None for made in model.made)  # type: ignore[union-attr]
    tieroff.unwrap(run.models[0])


@pytest.mark.parametrize("sends_below", ["evaluate", "sleep"])
def test_what_went_below_before_the_update_is_brought_up_for_it(sends_below: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("90%")
    run.settle()
    parameters = run.engine.executor.homes.parameters
    below: list[bool] = []
    step: Any = torch.optim.Adam._init_group

    def note(self: Any, group: Any, *args: Any) -> Any:
        if self is run.optimizers[0]:
            below.extend(parameters[id(p)].device is None for p in group["params"] if id(p) in parameters)
        return step(self, group, *args)

    def change(model: nn.Module, _: torch.optim.Optimizer) -> None:
        if sends_below == "evaluate":
            with torch.no_grad():
                model(torch.ones(8, 24))
        elif model is run.models[0]:
            tieroff.sleep(model)
        left.append(sum(item.device is None for item in parameters.values()))

    monkeypatch.setattr(torch.optim.Adam, "_init_group", note)
    for _ in range(2):
        left: list[int] = []
        run.step(before_update=change)
        assert max(left) > 0, "expected an evaluation to send parameters below"
    assert len(below) == 2 * len(parameters) and not any(below)
    tieroff.unwrap(run.models[0])
