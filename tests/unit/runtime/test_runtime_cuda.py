"""When the CUDA backend hands device memory to an I/O engine; the device itself is played by an event of threads."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tieroff.errors import StoreError
from tieroff.runtime.backend.accelerator import copy_by_engine
from tieroff.runtime.backend.place import BlockPlace, HomePlace
from tieroff.storage.engines.aio import AioEngine
from tieroff.storage.host.pool import HostStore
from tieroff.storage.nvme.file_store import FileStore
from tieroff.storage.store import Store


class Work:
    """What the compute stream has been given so far."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def synchronize(self) -> None:
        assert self.is_over.wait(30)


class Ended:
    """A transfer of an engine that has ended, well or not."""

    size_bytes, start_ns, stop_ns = 8, 3, 5

    def __init__(self, failure: StoreError | None = None) -> None:
        self.failure = failure

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        if self.failure is not None:
            raise self.failure

    def cancel(self) -> bool:
        return False


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


def test_engine_gets_the_memory_only_after_compute_has_left_it(thread: ThreadPoolExecutor) -> None:
    work, started = Work(), []

    def start() -> Ended:
        started.append(work.is_over.is_set())
        return Ended()

    copy = copy_by_engine(thread, work, start, "a copy to a file", 8)
    assert not copy.done() and (copy.start_ns, copy.stop_ns) == (0, 0)
    with pytest.raises(StoreError, match=r"a copy to a file of 8 bytes to start within 0\.01 s") as caught:
        copy.wait(0.01)
    assert caught.value.errno == errno.ETIMEDOUT and started == []
    work.is_over.set()
    copy.wait(30)
    assert started == [True]
    assert copy.done() and (copy.start_ns, copy.stop_ns) == (3, 5)


def test_engine_gets_transfers_in_order_without_waiting_for_their_ends(thread: ThreadPoolExecutor) -> None:
    first, second, order = Work(), Work(), []

    class UnderWay(Ended):
        def done(self) -> bool:
            return False

    def start(name: str) -> UnderWay:
        order.append(name)
        return UnderWay()

    copies = [
        copy_by_engine(thread, first, lambda: start("1"), "a copy", 8),
        copy_by_engine(thread, second, lambda: start("2"), "a copy", 8),
    ]
    second.is_over.set()
    first.is_over.set()
    for copy in copies:
        copy.wait(30)
        assert not copy.done()
    assert order == ["1", "2"]


def test_failure_of_the_transfer_and_of_its_start_is_told(thread: ThreadPoolExecutor) -> None:
    work = Work()
    work.is_over.set()
    failure = StoreError("expected a write, got EIO", errno=errno.EIO)
    failed = copy_by_engine(thread, work, lambda: Ended(failure), "a copy", 8)
    with pytest.raises(StoreError, match="got EIO"):
        failed.wait(30)

    def refuse() -> Ended:
        raise StoreError("expected room for a shadow, got none", errno=errno.ENOSPC)

    refused = copy_by_engine(thread, work, refuse, "a copy", 8)
    with pytest.raises(StoreError, match="shadow"):
        refused.wait(30)
    assert refused.done() and refused.start_ns == 0


def test_places_of_other_engines_take_host_memory_alone(tmp_path: Path) -> None:
    engine = AioEngine()
    stores: list[Store] = [FileStore([tmp_path], 2**20, engine), HostStore(2**20, engine)]
    for store in stores:
        assert not BlockPlace(store, 4096).takes_device_memory
        assert not HomePlace(store, 4096).takes_device_memory
        store.close()
    engine.close()
