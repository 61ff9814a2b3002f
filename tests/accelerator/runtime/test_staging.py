"""Copies between the device and files: what arrives, what overlaps, and what happens when a piece fails."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator import sim, target
from tests.fault.storage.faulty import FaultyEngine
from tieroff.errors import StoreError
from tieroff.runtime.backend.accelerator import AcceleratorBackend
from tieroff.runtime.backend.place import BlockPlace, HomePlace
from tieroff.runtime.backend.staging.line import SLOTS
from tieroff.runtime.backend.staging.transfer import StagedTransfer, StagingGate, StreamPart
from tieroff.storage.completion import Completion
from tieroff.storage.engines import choose
from tieroff.storage.engines.base import OpenFile, Transfer
from tieroff.storage.host.pool import HostStore
from tieroff.storage.nvme.file_store import FileStore, Room

KIB, MIB = 2**10, 2**20
PIECE_BYTES = 64 * KIB
STAGING_BYTES = 2 * SLOTS * PIECE_BYTES
# One block, whole pieces, a piece and a byte, and more than all of the staging memory.
SIZES = [1, PIECE_BYTES, 2 * PIECE_BYTES, PIECE_BYTES + 1, STAGING_BYTES + 4097]
WAIT_S = 30


class Told:
    """A transfer of an engine whose use of memory the race detector knows of; whoever sees its end knows of it too."""

    def __init__(self, inner: Transfer, agent: int) -> None:
        self._inner, self._agents = inner, [agent]
        self._lock = threading.Lock()  # one that the detector watches

    def done(self) -> bool:
        return self._noted(self._inner.done())

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._noted(self._inner.wait(timeout_s))

    def _noted(self, is_over: bool) -> bool:
        with self._lock:
            if is_over and self._agents:
                sim.end_host_io(self._agents.pop())
        return is_over

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class WatchedEngine(FaultyEngine):
    """An engine with faults, of which the race detector knows when a drive reads or writes memory."""

    def read(self, file: OpenFile, offset: int, address: int, size_bytes: int, **options: Any) -> Any:
        agent = sim.begin_host_io(address, size_bytes, write=True, name="drive")
        return Told(super().read(file, offset, address, size_bytes, **options), agent)

    def write(self, file: OpenFile, offset: int, address: int, size_bytes: int, **options: Any) -> Any:
        agent = sim.begin_host_io(address, size_bytes, write=False, name="drive")
        return Told(super().write(file, offset, address, size_bytes, **options), agent)


@pytest.fixture
def backend() -> Iterator[AcceleratorBackend]:
    backend = target.backend()
    backend.use_staging(STAGING_BYTES)
    yield backend
    backend.close()


@pytest.fixture
def closing() -> AcceleratorBackend:
    """One that the test closes, beside the one that it reads back with."""
    closing = target.backend()
    closing.use_staging(STAGING_BYTES)
    return closing


@pytest.fixture
def engine() -> Iterator[WatchedEngine]:
    engine = WatchedEngine(choose("threads"))
    yield engine
    engine.close()


@pytest.fixture
def store(engine: WatchedEngine, tmp_path: Path, backend: AcceleratorBackend) -> Iterator[FileStore]:
    store = FileStore([tmp_path], 32 * MIB, engine, checksum="always", room=Room(grow_bytes=MIB))
    yield store
    engine.release()
    store.close()


def filled(size_bytes: int, seed: int) -> torch.Tensor:
    host = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return host.to(target.device())


def out(backend: AcceleratorBackend, value: torch.Tensor, place: BlockPlace | HomePlace) -> None:
    backend.copy_out(value, place).wait(WAIT_S)
    place.publish()


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_copy_that_nobody_holds_is_waited_for(backend: AcceleratorBackend, store: FileStore, tier: str) -> None:
    """As after an exception between its start and the line that notes it."""
    host = HostStore(MIB, store.engine, slabs=backend.slabs)
    place = BlockPlace(host if tier == "host" else store, PIECE_BYTES)
    out(backend, filled(PIECE_BYTES, 1), place)
    arrived = backend.empty(PIECE_BYTES)
    thread = threading.Thread(target=backend.settle, args=(WAIT_S,))
    with sim.held(torch.accelerator.current_stream(target.device())):
        backend.copy_in(place, arrived)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    arrived.zero_()  # of which the race detector would tell, too
    assert not arrived.cpu().any()
    place.free()
    host.close()


def test_copies_that_do_not_end_are_an_error_for_who_waits_for_all(
    backend: AcceleratorBackend, store: FileStore, engine: WatchedEngine
) -> None:
    size_bytes = (SLOTS + 1) * PIECE_BYTES
    place, value = BlockPlace(store, size_bytes), filled(size_bytes, 1)
    engine.inject("write", "hang", count=SLOTS)
    copy = backend.copy_out(value, place)
    with pytest.raises(StoreError, match="have not ended") as caught:
        backend.settle(0.1)
    assert caught.value.errno == errno.ETIMEDOUT
    release(engine, copy)
    backend.settle(WAIT_S)
    place.free()


def back(backend: AcceleratorBackend, place: BlockPlace | HomePlace, size_bytes: int) -> torch.Tensor:
    arrived = backend.empty(size_bytes)
    backend.copy_in(place, arrived).wait(WAIT_S)
    return arrived


def release(engine: WatchedEngine, *copies: Completion) -> None:
    """Lets what hangs go on, and waits for the copies."""
    while not all(copy.done() for copy in copies):
        engine.release()
    for copy in copies:
        copy.wait(WAIT_S)


@pytest.mark.parametrize("late_s", [0, 0.01], ids=["prompt", "late"])
@pytest.mark.parametrize("make_place", [BlockPlace, HomePlace])
def test_what_went_out_comes_back(make_place: Any, late_s: float, backend: AcceleratorBackend, store: FileStore) -> None:
    sim.set_late_links(late_s)
    values = [filled(size, seed) for seed, size in enumerate(SIZES)]
    places = [make_place(store, size) for size in SIZES]
    for copy, place in zip([backend.copy_out(v, p) for v, p in zip(values, places, strict=True)], places, strict=True):
        copy.wait(WAIT_S)
        place.publish()
    arrived = [backend.empty(size) for size in SIZES]
    copies = [backend.copy_in(place, memory) for place, memory in zip(places, arrived, strict=True)]
    for copy in copies:
        copy.wait(WAIT_S)
        assert copy.done()
        assert 0 < copy.start_ns <= copy.stop_ns
    assert all(torch.equal(a, b) for a, b in zip(values, arrived, strict=True))
    for place in places:
        place.free()


def test_compute_writes_before_and_after_a_copy(backend: AcceleratorBackend, store: FileStore) -> None:
    """The copy takes what compute was given before it; memory is written again only behind its end."""
    sim.set_late_links(0.01)
    value, place = backend.empty(3 * PIECE_BYTES), BlockPlace(store, 3 * PIECE_BYTES)
    for number in range(4):
        value.fill_(number)
        out(backend, value, place)
        value.fill_(99)
        assert torch.equal(back(backend, place, value.numel()), torch.full_like(value, number))
    place.free()


def test_the_device_copies_while_the_drive_writes(backend: AcceleratorBackend, store: FileStore, engine: WatchedEngine) -> None:
    """The first piece hangs in the drive, and as many more as there are slots leave the device meanwhile."""
    engine.inject("write", "hang")
    value, place = filled(2 * SLOTS * PIECE_BYTES, 1), BlockPlace(store, 2 * SLOTS * PIECE_BYTES)
    copy = backend.copy_out(value, place)
    while not engine.hits or sim.counters()["bytes_to_host"] < SLOTS * PIECE_BYTES:
        assert not copy.done()
    release(engine, copy)
    assert torch.equal(back(backend, place, value.numel()), value)
    place.free()


def test_the_drive_reads_ahead_of_the_device(backend: AcceleratorBackend, store: FileStore, engine: WatchedEngine) -> None:
    """The first piece hangs in the drive, which has been asked for as many as there are slots; of two tensors."""
    sizes = [2 * PIECE_BYTES, (SLOTS - 2) * PIECE_BYTES]
    values, places = [filled(size, seed) for seed, size in enumerate(sizes)], [BlockPlace(store, size) for size in sizes]
    for value, place in zip(values, places, strict=True):
        out(backend, value, place)
    engine.inject("read", "hang", count=SLOTS)
    arrived = [backend.empty(size) for size in sizes]
    copies = [backend.copy_in(place, memory) for place, memory in zip(places, arrived, strict=True)]
    while len(engine.hits) < SLOTS:
        assert not any(copy.done() for copy in copies)
    release(engine, *copies)
    assert all(torch.equal(a, b) for a, b in zip(values, arrived, strict=True))
    for place in places:
        place.free()


def failed(copy: Completion) -> int | None:
    with pytest.raises(StoreError) as caught:
        copy.wait(WAIT_S)
    return caught.value.errno


@pytest.mark.parametrize("after", [0, 1, SLOTS, 2 * SLOTS])
@pytest.mark.parametrize(("kind", "number"), [("errno", errno.EIO), ("short", errno.EIO), ("flip", errno.EBADMSG)])
def test_a_piece_that_the_drive_fails_to_read_fails_the_tensor(
    kind: Any, number: int, after: int, backend: AcceleratorBackend, store: FileStore, engine: WatchedEngine
) -> None:
    size_bytes = 2 * SLOTS * PIECE_BYTES + 1
    value, place = filled(size_bytes, 1), BlockPlace(store, size_bytes)
    out(backend, value, place)
    engine.inject("read", kind, after=after)
    assert failed(backend.copy_in(place, backend.empty(size_bytes))) == number
    assert torch.equal(back(backend, place, size_bytes), value)
    place.free()


@pytest.mark.parametrize("after", [0, 1, SLOTS])
def test_a_piece_that_the_drive_fails_to_write_fails_the_tensor(
    after: int, backend: AcceleratorBackend, store: FileStore, engine: WatchedEngine
) -> None:
    size_bytes = 2 * SLOTS * PIECE_BYTES
    old, new, place = filled(size_bytes, 1), filled(size_bytes, 2), HomePlace(store, size_bytes)
    out(backend, old, place)
    engine.inject("write", "errno", after=after, errno=errno.ENOSPC)
    assert failed(backend.copy_out(new, place)) == errno.ENOSPC
    assert torch.equal(back(backend, place, size_bytes), old)
    out(backend, new, place)
    assert torch.equal(back(backend, place, size_bytes), new)


def test_a_home_whose_read_was_changed_on_the_way_is_read_again(
    backend: AcceleratorBackend, store: FileStore, engine: WatchedEngine
) -> None:
    size_bytes = 3 * PIECE_BYTES + 1
    value, place = filled(size_bytes, 1), HomePlace(store, size_bytes)
    out(backend, value, place)
    engine.inject("read", "flip", after=2)
    assert torch.equal(back(backend, place, size_bytes), value)
    assert engine.hits == [("read", "flip")]


def test_a_copy_that_has_not_begun_is_taken_back(backend: AcceleratorBackend, store: FileStore, engine: WatchedEngine) -> None:
    engine.inject("write", "hang", count=SLOTS)
    values = [filled(SLOTS * PIECE_BYTES, seed) for seed in range(2)]
    places = [BlockPlace(store, value.numel()) for value in values]
    copies: list[Any] = [backend.copy_out(value, place) for value, place in zip(values, places, strict=True)]
    while len(engine.hits) < 1:
        assert not copies[0].done()
    assert copies[1].cancel()
    assert copies[1].done()
    release(engine, copies[0])
    assert failed(copies[1]) == errno.ECANCELED
    assert torch.equal(back(backend, places[0], values[0].numel()), values[0])
    for place in places:
        place.free()


def test_a_device_that_fails_fails_the_tensors_and_no_thread(
    closing: AcceleratorBackend, backend: AcceleratorBackend, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CUDA does from an assert in a kernel on: a thread that ends with it would let nothing that comes later end."""
    size_bytes = 2 * SLOTS * PIECE_BYTES
    value, place = filled(size_bytes, 1), BlockPlace(store, size_bytes)
    out(backend, value, place)

    def fail(part: StreamPart, timeout_s: float | None = None) -> bool:
        raise RuntimeError("device-side assert triggered")

    with monkeypatch.context() as patched:
        patched.setattr(StreamPart, "wait", fail)
        assert [failed(closing.copy_in(place, closing.empty(size_bytes))) for _ in range(2)] == [errno.EIO] * 2
        thread = threading.Thread(target=closing.close, daemon=True)
        thread.start()
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert torch.equal(back(backend, place, size_bytes), value)
    place.free()


def test_staging_below_one_block_of_a_drive_is_told(backend: AcceleratorBackend, store: FileStore) -> None:
    large_blocks = OpenFile(store.files[0].fd, store.files[0].path, True, 2 * PIECE_BYTES, 4096)
    store.files[0] = large_blocks
    place = BlockPlace(store, PIECE_BYTES)
    with pytest.raises(StoreError, match=r"\[nvme\] staging: expected room"):
        backend.copy_out(filled(PIECE_BYTES, 1), place)
    place.free()


def test_a_copy_that_is_over_holds_no_memory_of_the_device(backend: AcceleratorBackend, store: FileStore) -> None:
    place = BlockPlace(store, STAGING_BYTES)
    for copy in (backend.copy_out, lambda tensor, place: backend.copy_in(place, tensor)):
        tensor = filled(STAGING_BYTES, 1)
        copy(tensor, place).wait(WAIT_S)
        memory = weakref.ref(tensor.untyped_storage())
        del tensor
        deadline = time.monotonic() + WAIT_S  # the threads are on their way to the next one
        while memory() is not None:
            assert time.monotonic() < deadline
    place.free()


def test_closing_waits_for_what_was_asked(closing: AcceleratorBackend, backend: AcceleratorBackend, store: FileStore) -> None:
    value, place = filled(2 * STAGING_BYTES, 1), BlockPlace(store, 2 * STAGING_BYTES)
    copy = closing.copy_out(value, place)
    closing.close()
    copy.wait(WAIT_S)
    assert torch.equal(back(backend, place, value.numel()), value)
    place.free()


@pytest.mark.parametrize("action", ["write", "read"])
def test_closing_waits_for_the_drive(
    action: Any, closing: AcceleratorBackend, backend: AcceleratorBackend, store: FileStore, engine: WatchedEngine
) -> None:
    """The memory between device and drive is there for as long as a drive reads or writes it."""
    value, place = filled(2 * PIECE_BYTES, 1), BlockPlace(store, 2 * PIECE_BYTES)
    if action == "read":
        out(backend, value, place)
    engine.inject(action, "hang", after=1)
    arrived = backend.empty(value.numel())
    copy = closing.copy_out(value, place) if action == "write" else closing.copy_in(place, arrived)
    thread = threading.Thread(target=closing.close)
    thread.start()
    while not engine.hits:
        assert not copy.done()
    thread.join(0.5)
    assert thread.is_alive()
    release(engine, copy)
    thread.join(WAIT_S)
    assert not thread.is_alive() and copy.done()
    assert torch.equal(back(backend, place, value.numel()), value)
    place.free()


def test_closing_waits_for_the_last_copy_to_the_device(
    closing: AcceleratorBackend, backend: AcceleratorBackend, store: FileStore
) -> None:
    value, place = filled(PIECE_BYTES, 1), BlockPlace(store, PIECE_BYTES)
    out(backend, value, place)
    sim.set_late_links(0.2)
    arrived = backend.empty(value.numel())
    copy = closing.copy_in(place, arrived)
    closing.close()
    assert copy.done()
    assert torch.equal(arrived, value)
    place.free()


PRELUDE = """
from functools import partial
from pathlib import Path
from tests.accelerator import sim, vendor
sim.load()
vendor.install()
from tests.accelerator.runtime.test_staging import *
backend = target.backend()
backend.use_staging(STAGING_BYTES)
store = FileStore([Path(sys.argv[1])], 32 * MIB, choose("threads"), checksum="always", room=Room(grow_bytes=MIB))
"""

ENDS_AT_ONCE = (
    """
import atexit, sys
# After all that is registered later: the lines have waited for the drive. Where the I/O engine ended before them, what its
# threads had not begun is taken back, and the copy says so.
def tell():
    try:
        print(copy.wait(), copy.done())
    except StoreError as error:
        print("cancelled" if "cancelled before it had ended" in str(error) else error)
atexit.register(tell)
"""
    + PRELUDE
    + """
sim.set_late_links(0.01)
copy = backend.copy_out(filled(16 * STAGING_BYTES, 1), BlockPlace(store, 16 * STAGING_BYTES))
while not copy.start_ns:  # one that has not begun when the program ends is taken back as a whole
    time.sleep(0.001)
"""
)


def test_a_program_that_ends_at_once_leaves_no_copy_half_done(project: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS_AT_ONCE, str(tmp_path)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout in ("None True\n", "cancelled\n")


CHILD_ENDS = (
    """
import os, sys
"""
    + PRELUDE
    + """
out(backend, filled(STAGING_BYTES, 1), BlockPlace(store, STAGING_BYTES))
child = os.fork()
if child == 0:
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
)


def test_a_forked_child_ends_without_a_word(project: Path, tmp_path: Path) -> None:
    """It has none of the threads, and every call of the I/O engine is an error there."""
    command = [sys.executable, "-c", CHILD_ENDS, str(tmp_path)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("7\n", "")


def interrupted_at(place: int, work: Callable[[], object]) -> bool:
    """Runs `work`, interrupted at a line, a call or a return; returns False when there are not so many."""
    left = place

    def trace(*_: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_who_waits_at_a_gate_comes_behind_who_opens_it() -> None:
    """That it is open shows before its lock is free, and only the lock orders the two threads."""
    device, held = target.device(), [torch.ones(64, device=target.device())]
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))

    class SlowGate(StagingGate):
        def open(self) -> None:
            self.is_open = True
            time.sleep(0.3)
            super().open()

    gate = SlowGate()

    def use() -> None:
        with torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type):
            held[0].sum()
        stream.synchronize()
        gate.open()

    thread = threading.Thread(target=use)
    thread.start()
    assert gate.wait(30)
    held.clear()
    thread.join()
    assert sim.counters()["unordered_frees"] == 0


def test_an_interrupted_wait_keeps_no_line_from_ending_a_transfer() -> None:
    place, is_there = 0, True
    while is_there:
        transfer = StagedTransfer(16, None)
        is_there = interrupted_at(place, partial(transfer.wait, 0.001))
        line = threading.Thread(target=transfer.end, daemon=True)
        line.start()
        line.join(1)
        assert not line.is_alive(), place
        assert transfer.wait(1)
        place += 1
    assert place > 5


def test_an_interrupt_leaves_no_transfer_half_taken_back() -> None:
    """Either it goes on, or it has ended for all: whoever waits for one that nobody will end would wait forever."""
    place, is_there = 0, True
    while is_there:
        transfer = StagedTransfer(16, None)
        is_there = interrupted_at(place, transfer.cancel)
        is_started = transfer.claim()
        assert is_started or (transfer.done() and transfer.wait(5) and transfer.errno == errno.ECANCELED), place
        place += 1
    assert place > 2
