"""What every store does on every engine."""

from __future__ import annotations

import ctypes
import errno
import functools
import gc
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.injector import Injector
from tieroff.errors import StateError, StoreError
from tieroff.storage import buffers
from tieroff.storage.engines import Engine, OpenFile, available, choose
from tieroff.storage.host.pool import HostStore
from tieroff.storage.nvme.file_store import FileStore, Room
from tieroff.storage.space import SpaceStore

MIB = 2**20
CAPACITY_BYTES = 16 * MIB
SIZES = [1, 511, 4096, 4097, MIB - 1, MIB, 3 * MIB + 77]

MakeStore = Callable[..., SpaceStore]


@pytest.fixture(params=available())
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = choose(request.param)
    assert engine.name == request.param
    yield engine
    engine.close()


@pytest.fixture(params=["host", "file", "two files"])
def make_store(request: pytest.FixtureRequest, engine: Engine, tmp_path: Path) -> Iterator[MakeStore]:
    made: list[SpaceStore] = []

    def make(capacity_bytes: int = CAPACITY_BYTES) -> SpaceStore:
        if request.param == "host":
            store: SpaceStore = HostStore(capacity_bytes, engine, slab_bytes=4 * MIB)
        else:
            dirs = [tmp_path / str(index) for index in range(1 if request.param == "file" else 2)]
            for path in dirs:
                path.mkdir(exist_ok=True)
            store = FileStore(dirs, capacity_bytes, engine, checksum="always", room=Room(grow_bytes=MIB))
        made.append(store)
        return store

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(make_store: MakeStore) -> SpaceStore:
    return make_store()


class Memory:
    """Bytes at an address that is off the page by `shift`."""

    def __init__(self, size_bytes: int, shift: int = 0) -> None:
        self.buffer = buffers.allocate(size_bytes + shift)
        self.address = self.buffer.address + shift
        self.size_bytes = size_bytes

    def set(self, data: bytes) -> Memory:
        ctypes.memmove(self.address, data, self.size_bytes)
        return self

    def get(self) -> bytes:
        return ctypes.string_at(self.address, self.size_bytes)


def noise(size_bytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


@pytest.mark.parametrize("shift", [0, 1, 64])
def test_block_returns_what_was_written(store: SpaceStore, shift: int) -> None:
    for seed, size in enumerate(SIZES):
        block = store.allocate(size)
        source = Memory(size, shift).set(noise(size, seed))
        target = Memory(size, shift)
        write = store.write(block, source.address, source)
        write.wait(30)
        read = store.read(block, target.address, target)
        read.wait(30)
        assert target.get() == noise(size, seed)
        assert read.size_bytes == write.size_bytes == size
        assert 0 < write.start_ns <= write.stop_ns <= read.stop_ns
        store.free(block)
    assert store.used_bytes == 0


def test_read_leaves_bytes_around_the_target(store: SpaceStore) -> None:
    size = MIB + 13
    block = store.allocate(size)
    source = Memory(size).set(noise(size, 1))
    store.write(block, source.address, source).wait(30)
    around = Memory(size + 200).set(b"\x5a" * (size + 200))
    store.read(block, around.address + 100, around).wait(30)
    assert around.get() == b"\x5a" * 100 + noise(size, 1) + b"\x5a" * 100


def test_many_in_flight_keep_apart(store: SpaceStore) -> None:
    sizes = [random.Random(7).randrange(1, MIB) for _ in range(12)]
    blocks = [store.allocate(size) for size in sizes]
    sources = [Memory(size, index).set(noise(size, index)) for index, size in enumerate(sizes)]
    for write in [store.write(block, source.address, source) for block, source in zip(blocks, sources, strict=True)]:
        write.wait(30)
    targets = [Memory(size, 3) for size in sizes]
    for read in [store.read(block, target.address, target) for block, target in zip(blocks, targets, strict=True)]:
        read.wait(30)
    for index, target in enumerate(targets):
        assert target.get() == noise(sizes[index], index)


def test_full_store_says_so_and_still_works(make_store: MakeStore) -> None:
    store = make_store(MIB)
    blocks = [store.allocate(4096) for _ in range(store.capacity_bytes // store.alignment_bytes)]
    assert store.used_bytes == store.peak_bytes == MIB
    with pytest.raises(StoreError, match=rf"\[budget\] {store.tier}: no room for") as caught:
        store.allocate(1)
    assert caught.value.errno == errno.ENOSPC
    store.free(blocks[5])
    assert store.allocate(1).size_bytes == 1
    assert store.used_bytes == MIB


def test_freed_neighbours_merge(make_store: MakeStore) -> None:
    store = make_store(MIB)
    blocks = [store.allocate(4096) for _ in range(store.capacity_bytes // store.alignment_bytes)]
    half = [block for block in blocks if block.area == 0 and block.offset < 256 * 1024]
    for block in random.Random(3).sample(half, len(half)):
        store.free(block)
    assert store.allocate(256 * 1024).offset == 0


def test_free_while_writing_waits_for_the_write(store: SpaceStore) -> None:
    size = 8 * MIB
    source = Memory(size).set(noise(size, 1))
    block = store.allocate(size)
    write = store.write(block, source.address, source)
    store.free(block)
    again = store.allocate(store.capacity_bytes // 2)  # does not lie on bytes that are still written
    overlaps = again.area == block.area and again.offset < block.offset + size and block.offset < again.offset + size
    assert write.done() or not overlaps


def test_an_exception_in_a_finalizer_that_frees_does_no_harm(store: SpaceStore) -> None:
    """Python drops it, so that nobody repairs the store: what comes next finds it as it should be."""
    injector, kept = Injector(), store.allocate(4096)

    def is_interrupted(at: int) -> bool:
        freed = store.allocate(8192)
        was_out = injector.run(lambda: store.free(freed), at)
        others = [store.allocate(4096) for _ in range(4)]
        assert len({(block.area, block.offset) for block in (kept, *others)}) == 5
        for block in others:
            store.free(block)
        return was_out

    for at in itertools.count():
        if not is_interrupted(at):
            store.repair()  # the lock is still held where the line before this one took it
            if not is_interrupted(at):
                break
    assert at > 20
    store.repair()  # it takes back what was never queued
    assert store.used_bytes == kept.extent_bytes
    store.free(kept)


class Anywhere(Injector):
    """Acts before lines of the standard library, too."""

    def is_watched(self, file: str) -> bool:
        return file != __file__


def test_no_exception_comes_while_a_home_dies(store: SpaceStore) -> None:
    """Nobody would hear of it: what runs then is no code of Python."""
    injector, homes = Anywhere(), [store.home(4096)]
    injector.run(homes.clear)
    assert injector.seen == 0
    assert store.used_bytes == 0


def test_an_exception_in_what_takes_a_dead_home_in_loses_nothing(store: SpaceStore) -> None:
    injector = Injector()
    for at in itertools.count():
        homes = [store.home(4096), store.home(8192)]
        homes.clear()
        was_out = injector.run(lambda: store.used_bytes, at)
        store.repair()
        assert store.used_bytes == 0, f"interrupted before line {at}: {injector.where}"
        if not was_out:
            break
    assert at > 10


def test_a_read_that_an_exception_kept_from_being_noted_is_over_after_repair(store: SpaceStore, engine: Engine) -> None:
    """The caller's memory has another use then. Engines that take faults begin late, so that it shows."""
    size, injector = MIB, Injector()
    native = getattr(engine, "native", None)
    source, targets = Memory(size).set(noise(size, 1)), list[tuple[Memory, str]]()
    block, is_over = store.allocate(size), threading.Event()
    store.write(block, source.address, source).wait(30)

    def release() -> None:
        while native is not None and not is_over.wait(0.02):
            native.release()

    thread = threading.Thread(target=release)
    thread.start()
    try:
        for at in itertools.count():
            target = Memory(size)
            if native is not None:
                native.inject("copy" if isinstance(store, HostStore) else "read", hang=True)
            was_interrupted = injector.run(functools.partial(store.read, block, target.address, target), at)
            store.repair()
            target.set(bytes(size))
            if native is not None:
                native.clear_faults()
            targets.append((target, injector.where))
            if not was_interrupted:
                break
        time.sleep(0.1)  # for what would still write into one of them
    finally:
        is_over.set()
        thread.join()
    assert at > 20
    assert [where for target, where in targets if target.get() != bytes(size)] == []


@pytest.mark.parametrize("shift", [0, 1])
def test_home_shows_a_written_value_after_publish(store: SpaceStore, shift: int) -> None:
    size = 2 * MIB + 5
    home = store.home(size)
    view = memoryview(home).cast("B")
    assert len(view) == home.size_bytes == size
    for seed in range(3):
        source = Memory(size, shift).set(noise(size, seed))
        home.write(source.address, source).wait(30)
        home.publish()
        assert bytes(view) == noise(size, seed)


def test_engine_verify_gives_the_checksum_of_what_lies_there(engine: Engine, tmp_path: Path) -> None:
    size = 9 * MIB + 5
    store = FileStore([tmp_path], CAPACITY_BYTES, engine, checksum="always")
    source = Memory(size).set(noise(size, 1))
    block = store.allocate(size)
    write = store.write(block, source.address, source)
    write.wait(30)
    verify = engine.verify(store.files[0], block.offset, size)
    assert verify.wait(30)
    assert (verify.errno, verify.done_bytes) == (0, size)
    assert verify.checksum == write.checksum is not None
    store.close()


def test_home_read_sees_what_was_written_through_memory(store: SpaceStore) -> None:
    size = MIB + 9
    home = store.home(size)
    view = memoryview(home).cast("B")
    target = Memory(size, 1)
    for seed in range(4):
        view[:] = noise(size, seed)
        view[size - 1] = seed
        home.read(target.address, target).wait(30)
        assert target.get() == noise(size, seed)[:-1] + bytes([seed])


def test_home_trim_keeps_the_value(store: SpaceStore) -> None:
    home = store.home(MIB)
    view = memoryview(home).cast("B")
    view[:] = noise(MIB, 1)
    home.trim()
    assert bytes(view) == noise(MIB, 1)


def test_home_publish_without_a_write_is_refused(store: SpaceStore) -> None:
    home = store.home(4096)
    with pytest.raises(StateError, match=r"needs a write\(\) before it"):
        home.publish()


def test_home_place_is_freed_with_the_last_reference(store: SpaceStore) -> None:
    home = store.home(MIB)
    source = Memory(MIB).set(noise(MIB, 1))
    home.write(source.address, source).wait(30)
    view = memoryview(home).cast("B")[4096:]
    del home
    gc.collect()
    used_by_home = store.used_bytes
    assert used_by_home >= MIB
    view[:8] = b"still it"
    del view
    gc.collect()
    assert store.used_bytes == 0


def test_tensor_over_a_home_keeps_it(store: SpaceStore) -> None:
    torch = pytest.importorskip("torch")
    home = store.home(4096)
    tensor = torch.frombuffer(home, dtype=torch.uint8)
    assert tensor.data_ptr() == home.address
    row = tensor.view(64, 64)[3]
    del home, tensor
    gc.collect()
    row.fill_(9)
    assert store.used_bytes == store.alignment_bytes
    del row
    gc.collect()
    assert store.used_bytes == 0


def test_keep_lives_until_the_end_is_noticed(store: SpaceStore) -> None:
    block = store.allocate(MIB)
    source = Memory(MIB).set(noise(MIB, 1))
    address = source.address
    gone = threading.Event()

    class Keep:
        def __init__(self, memory: Memory) -> None:
            self.memory = memory

        def __del__(self) -> None:
            gone.set()

    write = store.write(block, address, Keep(source))
    del source
    gc.collect()
    assert write.done() or not gone.is_set()
    write.wait(30)
    gc.collect()
    assert gone.is_set()


def test_wrong_calls_are_refused(store: SpaceStore, make_store: MakeStore) -> None:
    memory = Memory(4096)
    block = store.allocate(4096)
    with pytest.raises(StateError, match="never written"):
        store.read(block, memory.address, memory)
    with pytest.raises(StateError, match="belongs to another store"):
        make_store().write(block, memory.address, memory)
    store.free(block)
    with pytest.raises(StateError, match="freed before"):
        store.free(block)
    with pytest.raises(StateError, match="freed"):
        store.write(block, memory.address, memory)
    with pytest.raises(StateError, match="above 0"):
        store.allocate(0)


def test_close_is_idempotent_and_reports_leaks(store: SpaceStore, caplog: pytest.LogCaptureFixture) -> None:
    store.allocate(5000)
    home = store.home(4096)
    view = memoryview(home).cast("B")
    view[:] = noise(4096, 1)
    store.close()
    store.close()
    assert "1 blocks that were never freed" in caplog.text and "5000" in caplog.text
    assert bytes(view) == noise(4096, 1)
    with pytest.raises(StateError, match="closed"):
        store.allocate(1)
    with pytest.raises(StateError, match="closed"):
        home.read(home.address, None)


def test_close_ends_what_is_in_flight(store: SpaceStore) -> None:
    sources = [Memory(MIB).set(noise(MIB, seed)) for seed in range(8)]
    writes = [store.write(store.allocate(MIB), source.address, source) for source in sources]
    writes[0].wait(30)
    store.close()
    assert all(write.done() for write in writes)
    for write in writes:
        if not write.has_succeeded():
            with pytest.raises(StoreError) as caught:
                write.wait()
            assert caught.value.errno == errno.ECANCELED


def test_open_and_close_leave_nothing(make_store: MakeStore, tmp_path: Path) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def cycle() -> None:
        store = make_store(MIB)
        block = store.allocate(4096)
        memory = Memory(4096)
        store.write(block, memory.address, memory).wait(30)
        store.free(block)
        home = store.home(4096)
        memoryview(home).cast("B")[0] = 1
        if isinstance(store, FileStore):
            store.return_pages(0.001)
        store.close()

    cycle()
    gc.collect()  # what tests before this one left open
    before = count()
    for _ in range(50):
        cycle()
    assert count()[0] == before[0]
    # The pool of aiofiles starts its 4 threads as they are needed, so up to 3 of them after the first cycle.
    assert count()[1] <= before[1] + 3
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


@pytest.mark.parametrize("cut", [1, 4096, MIB, 3 * MIB + 76])
def test_checksums_of_two_ranges_make_that_of_both(engine: Engine, tmp_path: Path, cut: int) -> None:
    size_bytes = 3 * MIB + 77
    memory = Memory(size_bytes).set(noise(size_bytes, 1))
    (tmp_path / "file").touch()
    fd = os.open(tmp_path / "file", os.O_RDWR)
    file = OpenFile(fd, str(tmp_path), is_direct=False, block_bytes=1, memory_alignment=1)

    def checksum(begin: int, end: int) -> int:
        transfer = engine.write(file, 0, memory.address + begin, end - begin, with_checksum=True)
        assert transfer.wait(30) and transfer.checksum is not None
        return transfer.checksum

    joined = engine.joined_checksum(checksum(0, cut), checksum(cut, size_bytes), size_bytes - cut)
    whole = checksum(0, size_bytes)
    os.close(fd)
    assert joined == whole
