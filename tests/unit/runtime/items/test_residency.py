"""The residency of a tensor: the table in the module's docstring is what its events do, and an old copy below never counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tieroff.core.tensor import TensorClass, Tier
from tieroff.errors import StateError
from tieroff.runtime.backend.cpu import CpuBackend
from tieroff.runtime.backend.place import Place
from tieroff.runtime.items import residency
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.residency import Event, State, transition
from tieroff.runtime.items.spill import Spill
from tieroff.runtime.items.traffic import Traffic
from tieroff.storage.completion import Completion
from tieroff.storage.engines.native import NativeEngine
from tieroff.storage.host.pool import HostStore

SIZE = 64


def documented() -> Iterator[tuple[State, Event, State | None]]:
    """Yields each cell of the docstring's table: a state, an event, and the next state, or None where it is refused."""
    rows = [line.strip("|").split("|") for line in (residency.__doc__ or "").splitlines() if line.startswith("|")]
    events = [Event[name.strip().upper()] for name in rows[0][3:]]
    for row in rows[2:]:
        for event, cell in zip(events, row[3:], strict=True):
            yield State[row[0].strip()], event, State[cell.strip()] if cell.strip() in State.__members__ else None


@pytest.mark.parametrize(("state", "event", "expected"), list(documented()))
def test_an_event_does_what_the_table_of_the_docstring_says(state: State, event: Event, expected: State | None) -> None:
    if expected is None:
        with pytest.raises(StateError, match=f"{state.name} cannot take event {event.name}"):
            transition(state, event)
    else:
        assert transition(state, event)[0] is expected


class SlowCopy:
    """A copy of the bytes as they were when it began, which is over when it is waited for."""

    start_ns = stop_ns = 0

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def done(self) -> bool:
        return self._finish is None

    def wait(self, timeout_s: float | None = None) -> None:
        if self._finish is not None:
            self._finish()
        self._finish = None


class SlowBackend(CpuBackend):
    """Copies out what is there at the moment of the call, as a device's stream does, and is done when it is waited for.

    A copy that begins late, as that of `DelayedBackend`, takes what was written meanwhile, and a lost write does not show.
    """

    def copy_out(self, source: torch.Tensor, place: Place) -> Completion:
        as_it_was = source.clone()
        return SlowCopy(lambda: super(SlowBackend, self).copy_out(as_it_was, place).wait())


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    engine = NativeEngine()
    store = HostStore(1 << 20, engine)
    traffic = Traffic(SlowBackend(), Spill({Tier.HOST: store}, (Tier.HOST,)))
    yield traffic
    assert store.used_bytes == 0
    store.close()
    engine.close()


@pytest.mark.parametrize("again", [False, True])
def test_what_is_written_while_a_copy_leaves_is_what_comes_back(traffic: Traffic, again: bool) -> None:
    """A weight that somebody clips between the update and the next forward, while its copy is under way."""
    tensor = torch.zeros(SIZE)
    item = HomeItem(("state", 0, "x"), "x", TensorClass.OPTIMIZER, tensor, Tier.HOST)
    item.adopt(traffic)
    for value in (1.0, 2.0):
        item.leave(traffic)
        item.lift(traffic)
        tensor.fill_(-value)
        item.touch(traffic)
        traffic.store(item)
        seen = [item.state]
        tensor.fill_(value)
        item.touch(traffic)
        seen.append(item.state)
        if again:
            traffic.store(item)
            seen.append(item.state)
        item.leave(traffic)
        assert seen == [State.LEAVING, State.STALE, State.LEAVING][: len(seen)]
        assert item.state is State.LOWER
        assert tensor.tolist() == [value] * SIZE
    item.detach(traffic)


@pytest.mark.parametrize("is_copied", [False, True])
def test_what_an_alias_writes_while_its_tensor_cannot_leave_is_what_comes_back(traffic: Traffic, is_copied: bool) -> None:
    """A gradient whose `.data` a hook has kept, which is scaled through it after backward."""
    tensor = torch.zeros(SIZE)
    item = HomeItem(("state", 0, "x"), "x", TensorClass.OPTIMIZER, tensor, Tier.HOST)
    item.adopt(traffic)
    alias = tensor.data
    traffic.store(item)
    if is_copied:
        traffic.settle(item)
    item.leave(traffic)
    assert item.device is not None
    alias.fill_(2)
    del alias
    item.leave(traffic)
    assert item.state is State.LOWER
    assert tensor.tolist() == [2] * SIZE
    item.detach(traffic)
