"""How far the host is ahead of the device: in a planned step it waits for nothing, up to a bound, and memory holds there."""

from __future__ import annotations

import ctypes
import gc
import inspect
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import tieroff
from tests.accelerator import sim, target
from tests.support.parity import HOST, config_for
from tieroff.core.tensor import Tier
from tieroff.runtime.backend.accelerator import STAMPS_AHEAD_MAX
from tieroff.runtime.backend.place import Place
from tieroff.runtime.backend.stamp import Events
from tieroff.runtime.execution.clock import Clock
from tieroff.runtime.items.activation import ActivationItem
from tieroff.runtime.items.item import Mover

WIDTH, LAYERS, WARM_STEPS, STEPS = 32, 6, 5, 16
POLL_S, HELD_S = 0.001, 0.2


class Loop:
    """Trains, and reads nothing that the device computes; its batches are on the device before."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.model = nn.Sequential(*layers).to(target.device())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.batches = [torch.randn(8, WIDTH).to(target.device()) for _ in range(4)]
        self.steps_done = 0

    def step(self) -> None:
        self.model(self.batches[self.steps_done % 4]).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_done += 1

    def values(self) -> list[Tensor]:
        return [parameter.detach().cpu() for parameter in self.model.parameters()]


class Beside(threading.Thread):
    """Does some work, while the device does nothing."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(target=work, daemon=True)
        torch.accelerator.synchronize(target.device())
        self._before = sim.counters()["host_waits"]

    @property
    def waits(self) -> int:
        """How often it has waited for the device; it waits for ever in the first one."""
        return sim.counters()["host_waits"] - self._before


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[Beside]:
    """Begins some work; the device does nothing until the end of `with`."""
    thread = Beside(work)
    with sim.held(torch.accelerator.current_stream(target.device())):
        thread.start()
        yield thread
    thread.join()


@pytest.fixture
def wrapped(tmp_path: Path) -> Iterator[Loop]:
    loop = Loop()
    tieroff.wrap(loop.model, loop.optimizer, config_for(HOST, tmp_path), backend=target.backend())
    for _ in range(WARM_STEPS):
        loop.step()
    yield loop
    tieroff.unwrap(loop.model)


def test_a_planned_step_is_issued_while_the_device_does_nothing(wrapped: Loop) -> None:
    with beside(wrapped.step) as thread:
        while thread.is_alive() and not thread.waits:
            thread.join(POLL_S)
        waits = thread.waits
    assert waits == 0
    engine = tieroff.engine(wrapped.model)
    stats = engine.stats()
    said = [line for line in engine.explain().splitlines() if not line.startswith("Not managed")]  # of other tests
    assert len(said) == 6 and not any(line.startswith("Fragmentation") for line in said)  # no memory in pieces
    assert (stats.phase, stats.fallbacks) == ("planned", 0)
    assert stats.moved_bytes["d2h"] > 0


def test_how_far_the_host_is_ahead_tells_who_sets_the_pace(wrapped: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tieroff.engine(wrapped.model)
    with beside(wrapped.step) as thread:
        thread.join(timeout=30)
        assert not thread.is_alive()
        time.sleep(HELD_S)
    assert (engine.stats().host_ahead_s or 0.0) > HELD_S
    assert "ahead of the device" not in engine.explain()
    tick = Clock.tick

    def late(self: Clock, *args: Any) -> None:
        torch.accelerator.synchronize(target.device())  # whatever the machine does besides, the device has nothing to do here
        tick(self, *args)

    monkeypatch.setattr(Clock, "tick", late)
    wrapped.step()
    stats = engine.stats()
    assert stats.phase == "planned"
    assert stats.host_ahead_s is not None and stats.host_ahead_s < HELD_S / 4


def test_stamps_are_given_up_to_a_bound_ahead_of_the_device() -> None:
    backend = target.backend()
    given: list[object] = []

    def ask() -> None:
        for _ in range(2 * STAMPS_AHEAD_MAX):
            given.append(backend.stamp())

    with beside(ask) as thread:
        while not thread.waits:
            thread.join(POLL_S)
        ahead = len(given)
    assert ahead == STAMPS_AHEAD_MAX
    assert len(given) == 2 * STAMPS_AHEAD_MAX
    backend.close()


def test_steps_that_run_ahead_of_the_device_are_bounded_and_right(wrapped: Loop) -> None:
    def train() -> None:
        for _ in range(STEPS):
            wrapped.step()

    with beside(train) as thread:
        while not thread.waits:
            thread.join(POLL_S)
        ahead = wrapped.steps_done - WARM_STEPS
    assert 1 <= ahead < STEPS
    plain = Loop()
    for _ in range(WARM_STEPS + STEPS):
        plain.step()
    engine = tieroff.engine(wrapped.model)
    assert engine.stats().peak_host_bytes <= engine.plan.budget_bytes[Tier.HOST]
    assert all(map(torch.equal, plain.values(), wrapped.values()))


def test_a_planned_step_finds_the_host_memory_of_the_step_before(wrapped: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find room for each saved tensor that leaves would take the host longer than to begin its copy."""
    made: list[ActivationItem] = []
    make_place = ActivationItem.make_place

    def counted(self: ActivationItem, traffic: Mover) -> Place:
        made.append(self)
        return make_place(self, traffic)

    monkeypatch.setattr(ActivationItem, "make_place", counted)
    for _ in range(STEPS):
        wrapped.step()
    stats = tieroff.engine(wrapped.model).stats()
    assert stats.phase == "planned" and stats.moved_bytes_by_class["activation"] > 0
    assert len(made) < STEPS  # the plan may be made again, and then others leave
    plain = Loop()
    for _ in range(WARM_STEPS + STEPS):
        plain.step()
    assert all(map(torch.equal, plain.values(), wrapped.values()))


def test_a_planned_step_takes_its_events_from_those_before(wrapped: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []  # not the events: who holds one has it not used again
    make = torch.Event

    def counted(*args: Any, **kwargs: Any) -> torch.Event:
        if kwargs.get("enable_timing"):
            made.append(True)
        return make(*args, **kwargs)

    wrapped.step()  # finds those that the steps before the plan had, which are many
    monkeypatch.setattr(torch, "Event", counted)
    for _ in range(4):
        wrapped.step()
        torch.accelerator.synchronize(target.device())
    assert len(made) < 4


def test_an_event_is_used_again_once_nobody_holds_it() -> None:
    events, stream = Events(target.device()), torch.accelerator.current_stream(target.device())
    held = [events.record(stream) for _ in range(3)]
    addresses = set(map(id, held))
    others = [id(events.record(stream)) for _ in range(20)]  # each is free again at once
    assert addresses.isdisjoint(others)
    assert len(set(others)) <= 2
    held.clear()
    events.begin_step()
    again = [events.record(stream) for _ in range(5)]
    assert addresses < set(map(id, again))
    assert len(set(map(id, again))) == 5


def test_a_planned_step_runs_no_code_in_which_an_exception_would_be_lost(wrapped: Loop) -> None:
    """As Python runs for a `__del__` or a weak reference's end: what a handler of a signal raises there goes to nobody."""
    lost = list[tuple[str, str]]()

    def called(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and (
            code.co_name == "__del__" or (code.co_filename == weakref.__file__ and code.co_name == "remove")
        ):
            lost.append((code.co_filename, code.co_name))

    sys.setprofile(called)
    try:
        for _ in range(3):
            wrapped.step()
    finally:
        sys.setprofile(None)
    assert tieroff.engine(wrapped.model).stats().phase == "planned"
    own = inspect.getfile(StorageWeakRef)  # PyTorch's, whose references keep what names a storage from being used again
    assert {name for name in lost if name != (own, "__del__")} == set()


def test_a_planned_step_makes_no_types_of_its_copies(wrapped: Loop) -> None:
    """A type is garbage in a cycle, which stays until somebody looks for it."""

    def arrays() -> int:
        return sum(isinstance(found, type) and issubclass(found, ctypes.Array) for found in gc.get_objects())

    gc.collect()
    before = arrays()
    gc.disable()
    try:
        for _ in range(2):
            wrapped.step()
        assert arrays() == before
    finally:
        gc.enable()
