"""Signal handlers that use a wrapped model between any two lines of the engine: right, and so is the step."""

from __future__ import annotations

import itertools
import random
import signal
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.support.injector import Injector
from tests.support.twins import Setting, adam, assert_same, copied, follow
from tieroff.errors import StateError

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning")]
SEED = 17
PLANNED_STEPS, RECORDED_STEPS = 16, 5
MANY_PLANNED_STEPS, MANY_RECORDED_STEPS = 400, 60

SETTINGS: dict[str, dict[str, Any]] = {
    "cpu-floor": {"nvme": True},
    "delayed-floor": {"delayed": True},
    "cpu-auto-80": {"policy": "auto", "device": "80%", "nvme": True},
    "delayed-auto-50": {"policy": "auto", "device": "50%", "delayed": True},
    "delayed-auto-100": {"policy": "auto", "device": "100%", "delayed": True},
}
INPUT = torch.ones(4, 8)


class Tied(nn.Module):
    """A weight that is used twice, and one that is used once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.relu(x @ self.weight) @ self.weight.T)
        return out


def tied() -> tuple[Any, Any]:
    model = Tied()
    return model, adam(model)


def train(model: Any, optimizer: Any, index: int = 0) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def plain_output(values: dict[str, torch.Tensor]) -> torch.Tensor:
    model = Tied()
    model.load_state_dict(values)
    with torch.no_grad():
        return model(INPUT).clone()


class Handler:
    """Evaluates, saves, or calls a layer, and notes what it got.

    Attributes:
        model: set before the step.
        seen: what the calls found: the parameters as they were, and what was asked for.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self.model: Any = None
        self.seen: list[tuple[dict[str, torch.Tensor], Any]] = []

    def __call__(self, *_: Any) -> None:
        with torch.no_grad():
            if self._what == "save":
                found: Any = dict(self.model.state_dict())  # kept as it is, to be looked at when the step is over
            elif self._what == "evaluate":
                found = self.model(INPUT).clone()
            else:
                found = self.model.last(INPUT).clone()
            self.seen.append(({name: p.detach().clone() for name, p in self.model.named_parameters()}, found))

    def check(self, where: str, old: dict[str, Any] | None, new: dict[str, Any]) -> None:
        """Asserts that what was found is right, by the values that the parameters had then.

        Args:
            where: the line that was interrupted.
            old, new: parameters before and after the step, of which those were one or the other; None: also between them.
        """
        values, found = self.seen.pop()
        for name, value in values.items() if old is not None else ():
            assert any(torch.equal(value, then[name]) for then in (old or {}, new)), f"{name} in a handler before {where}"
        if self._what == "save":  # copies, or tensors that followed the parameters, as those of a plain model do
            assert all(any(torch.equal(found[name], then[name]) for then in (values, new)) for name in values), where
        elif self._what == "evaluate":
            assert torch.equal(found, plain_output(values)), where
        else:
            assert torch.equal(found, nn.functional.linear(INPUT, values["last.weight"], values["last.bias"])), where


@pytest.fixture
def signalled() -> Iterator[Any]:
    """Sets a handler, which `signal.raise_signal` calls before the next instruction."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR1, before)


def raise_signal() -> None:
    signal.raise_signal(signal.SIGUSR1)


def interrupt_planned_steps(handler: Handler, setting: Setting, steps: int) -> None:
    """Runs planned steps with a handler before a line of each, other lines each time."""
    draw, injector = random.Random(SEED), Injector(raise_signal)
    fired: list[str] = []
    lines: deque[int] = deque(maxlen=3)  # of the last steps: some have fewer, since nobody looks at them, or waits were shorter

    def step(model: Any, optimizer: Any, index: int) -> Any:
        handler.model = model
        out: list[Any] = []
        if index:
            lines.append(injector.seen)
        at = draw.choice([place for place in injector.places(1) if place < min(lines)]) if index > 4 else -1
        old = copied(dict(model.named_parameters()))
        injector.run(lambda: out.append(train(model, optimizer)), at)
        if injector.where:
            fired.append(injector.where)
            handler.check(injector.where, old, dict(model.named_parameters()))
        return out[0]

    plain, wrapped = follow(tied, train, steps), follow(tied, step, steps, setting)
    assert_same(plain.seen, wrapped.seen)
    assert wrapped.phase in ("planned", "nothing moved")
    assert len(fired) > steps // 2, "few of the handlers were called"


def interrupt_recorded_steps(handler: Handler, setting: Setting, steps: int) -> None:
    """Runs first steps of models with a handler before a line of each, and some steps behind it."""
    draw, places = random.Random(SEED), [-1]
    plain = follow(tied, train, 4)
    fired = 0
    new: dict[str, Any] = {}
    for number in range(steps):
        injector = Injector(raise_signal)
        at = draw.choice(places) if number else -1

        def step(model: Any, optimizer: Any, index: int, injector: Injector = injector, at: int = at) -> Any:
            out: list[Any] = []
            handler.model = model
            if index:
                return train(model, optimizer)
            injector.run(lambda: out.append(train(model, optimizer)), at)
            new.update(copied(dict(model.named_parameters())))
            if injector.where:
                handler.check(injector.where, None, new)
            return out[0]

        wrapped = follow(tied, step, 4, setting)
        assert_same(plain.seen, wrapped.seen)
        places = injector.places(1) if number == 0 else places
        if injector.where:
            fired += 1
    assert fired > 0


@pytest.fixture(params=SETTINGS)
def each(tmp_path: Path, request: pytest.FixtureRequest) -> Setting:
    return Setting(tmp_path, **SETTINGS[request.param])


WHAT = ("evaluate", "save", "layer")


@pytest.mark.parametrize("what", WHAT)
def test_handlers_between_lines_of_planned_steps(what: str, each: Setting, signalled: Any) -> None:
    handler = Handler(what)
    signalled(handler)
    interrupt_planned_steps(handler, each, PLANNED_STEPS)


@pytest.mark.parametrize("what", WHAT)
def test_handlers_between_lines_of_recorded_steps(what: str, each: Setting, signalled: Any) -> None:
    handler = Handler(what)
    signalled(handler)
    interrupt_recorded_steps(handler, each, RECORDED_STEPS)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("what", "each"), list(zip(itertools.cycle(WHAT), SETTINGS, strict=False)), indirect=["each"])
def test_handlers_between_many_lines(what: str, each: Setting, signalled: Any) -> None:
    handler = Handler(what)
    signalled(handler)
    interrupt_planned_steps(handler, each, MANY_PLANNED_STEPS)
    interrupt_recorded_steps(handler, each, MANY_RECORDED_STEPS)


def test_a_handler_that_evaluates_between_updates_in_backward(tmp_path: Path, signalled: Any) -> None:
    """Some parameters are new by then and some are old: it is told, as anybody who evaluates there is."""
    model, optimizer = tied()
    Setting(tmp_path).wrap(model, optimizer, update_in_backward=True)
    handler = Handler("evaluate")
    handler.model = model
    signalled(handler)
    for _ in range(4):
        train(model, optimizer)
    handle = model.weight.register_hook(lambda _: raise_signal())  # the last layer was updated before
    with pytest.raises(StateError, match="backward has already updated parameters"):
        train(model, optimizer)
    handle.remove()
    tieroff.unwrap(model)
