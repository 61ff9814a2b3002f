"""Waits for copies: each one by itself in a step that is looked at, those of a tick as one in any other.

And for a copy to a drive of what has to leave: it reads what user code may write next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator import sim, target
from tieroff.core.tensor import TensorClass, Tier
from tieroff.errors import StoreError
from tieroff.runtime.backend.accelerator import AcceleratorBackend
from tieroff.runtime.backend.staging.line import SLOTS, Piece
from tieroff.runtime.backend.stamp import ns_of
from tieroff.runtime.items.activation import ActivationItem
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.residency import State
from tieroff.runtime.items.spill import Spill
from tieroff.runtime.items.table import begin_to_leave
from tieroff.runtime.items.traffic import Traffic
from tieroff.storage.engines.native import NativeEngine
from tieroff.storage.host.pool import HostStore
from tieroff.storage.nvme.file_store import FileStore

MIB = 1 << 20
SIZE_BYTES, COUNT = 64 << 10, 3
LINK = 4 * MIB  # bytes per second
VALUES = SIZE_BYTES // 4
HELD_S = 0.2


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    sim.set_machine(target.machine_with_links(LINK))
    backend, engine = target.backend(), NativeEngine()
    store = HostStore(4 * MIB, engine, backend.slabs)
    traffic = Traffic(backend, Spill({Tier.HOST: store}, (Tier.HOST,)))
    traffic.keeps_timeline = True
    yield traffic
    backend.close()
    store.close()
    engine.close()


def begin(traffic: Traffic, *, is_quiet: bool) -> AcceleratorBackend:
    traffic.begin_step(is_planned=True, is_quiet=is_quiet)
    assert isinstance(traffic.backend, AcceleratorBackend)
    traffic.backend.begin_step(keeps_times=traffic.keep_spans)
    return traffic.backend


def lying_below(traffic: Traffic) -> list[ActivationItem]:
    items = [ActivationItem(number, SIZE_BYTES, Tier.HOST) for number in range(COUNT)]
    for item in items:
        traffic.hold(item, torch.full((SIZE_BYTES,), item.ordinal, dtype=torch.uint8, device=target.device()))
        traffic.leave(item)
    return items


@pytest.mark.parametrize(("is_quiet", "waits"), [(True, 1), (False, COUNT)])
def test_copies_of_a_tick_are_waited_for_as_long_in_one_wait_as_in_many(is_quiet: bool, waits: int, traffic: Traffic) -> None:
    begin(traffic, is_quiet=is_quiet)
    items = lying_below(traffic)
    for item in items:
        traffic.fetch(item)
    before = len(traffic.counts.stalls)
    traffic.settle_all(items)
    assert len(traffic.counts.stalls) - before == waits
    stall_s = sum(ns_of(stop) - ns_of(start) for start, stop in traffic.counts.stalls[before:]) / 1e9
    assert stall_s == pytest.approx(COUNT * SIZE_BYTES / LINK, rel=0.1)
    assert [traffic.want(item).float().mean().item() for item in items] == [0, 1, 2]
    for item in items:
        traffic.end(item)


def test_a_copy_of_a_step_that_nobody_looks_at_has_no_begin_of_its_own(traffic: Traffic) -> None:
    backend = begin(traffic, is_quiet=True)
    item = lying_below(traffic)[0]
    assert item.place is not None
    for keeps_times in (False, True):
        backend.begin_step(keeps_times=keeps_times)
        copy = backend.copy_in(item.place, backend.empty(SIZE_BYTES))
        copy.wait()
        assert (copy.stop_ns - copy.start_ns > 0) == keeps_times


class Failed:
    """A copy of which the drive says that it failed."""

    start_ns = stop_ns = 0

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        raise StoreError("expected 65536 bytes, the drive gave none")


def test_a_wait_for_many_in_which_one_fails_ends_and_those_after_it_are_counted(traffic: Traffic) -> None:
    begin(traffic, is_quiet=True)
    items = lying_below(traffic)
    for item in items:
        traffic.fetch(item)
    items[1].arriving = Failed()
    with pytest.raises(StoreError, match="bringing activation 1 back"):
        traffic.settle_all(items)
    assert [item.state for item in items] == [State.BOTH, State.LOWER, State.ARRIVING]
    count, traffic.keep_spans = len(traffic.counts.stalls), True  # each is of interest, also of a copy that is over by now
    assert [traffic.want(item).float().mean().item() for item in items] == [0, 1, 2]
    assert len(traffic.counts.stalls) == count + 2
    for item in items:
        traffic.end(item)


@pytest.fixture
def to_drive(tmp_path: Path) -> Iterator[Traffic]:
    backend, engine = target.backend(), NativeEngine()
    backend.use_staging(2 * SLOTS * SIZE_BYTES)
    store = FileStore([tmp_path], 4 * MIB, engine)
    yield Traffic(backend, Spill({Tier.NVME: store}, (Tier.NVME,)))
    backend.close()
    store.close()
    engine.close()


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Has copies hold their part of the tensor for a while, as a thread does that has to wait for the interpreter."""
    begun, copy = threading.Event(), Piece.copy

    def slow(piece: Piece, to: torch.Tensor, source: torch.Tensor, stream: torch.Stream) -> Any:
        begun.set()
        time.sleep(HELD_S)
        return copy(piece, to, source, stream)

    monkeypatch.setattr(Piece, "copy", slow)
    return begun


def adopted(traffic: Traffic) -> tuple[torch.Tensor, HomeItem]:
    tensor = torch.ones(VALUES, device=target.device())
    item = HomeItem("state", "state", TensorClass.OPTIMIZER, tensor, Tier.NVME)
    item.adopt(traffic)
    return tensor, item


def test_a_copy_under_way_keeps_nothing_on_the_device(to_drive: Traffic, begun: threading.Event) -> None:
    """Its thread shares the memory, as somebody's alias would."""
    tensor, item = adopted(to_drive)
    to_drive.store(item)
    assert begun.wait(30)
    item.leave(to_drive)
    assert (item.state, to_drive.device_bytes) == (State.LOWER, 0)
    item.lift(to_drive)
    assert torch.equal(tensor.cpu(), torch.ones(VALUES))
    to_drive.end(item)


def test_a_copy_under_way_is_over_before_user_code_writes_what_it_holds(to_drive: Traffic, begun: threading.Event) -> None:
    """What somebody holds stays on the device, and is his to write."""
    _, item = adopted(to_drive)
    alias = item.living.view(-1)
    to_drive.store(item)
    assert begun.wait(30)
    item.leave(to_drive)
    assert item.device is not None
    alias.mul_(2)
    del alias
    item.leave(to_drive)
    item.lift(to_drive)
    assert torch.equal(item.living.cpu(), torch.full((VALUES,), 2.0))
    to_drive.end(item)


def test_what_begins_to_leave_while_it_is_copied_is_hidden(to_drive: Traffic, begun: threading.Event) -> None:
    _, item = adopted(to_drive)
    to_drive.store(item)
    assert begun.wait(30)
    begin_to_leave(item, to_drive)
    assert not item.is_lifted
    to_drive.end(item)
