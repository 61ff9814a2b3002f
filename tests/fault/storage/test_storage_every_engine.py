"""Faults of every engine, as a store sees them: each is told or mended, and no wrong byte is handed out."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fault.storage.faulty import FaultyEngine, flip_bit
from tieroff.errors import StoreError
from tieroff.storage import buffers, space
from tieroff.storage.engines import available, choose
from tieroff.storage.host.pool import HostStore
from tieroff.storage.nvme.file_store import FileStore, Room

MIB = 2**20
SIZE = 2 * MIB + 100


@pytest.fixture(params=available())
def engine(request: pytest.FixtureRequest) -> Iterator[FaultyEngine]:
    engine = FaultyEngine(choose(request.param))
    yield engine
    engine.close()


@pytest.fixture
def store(engine: FaultyEngine, tmp_path: Path) -> Iterator[FileStore]:
    store = FileStore([tmp_path], 32 * MIB, engine, checksum="always", room=Room(grow_bytes=MIB))
    yield store
    engine.release()
    store.close()


def filled(size_bytes: int, seed: int) -> buffers.Buffer:
    buffer = buffers.allocate(size_bytes)
    buffer[:size_bytes] = random.Random(seed).randbytes(size_bytes)
    return buffer


def shown(home: Any) -> bytes:
    return bytes(memoryview(home).cast("B"))


def refused(number: int, start: Callable[[], Any]) -> StoreError:
    with pytest.raises(StoreError) as caught:
        start().wait(30)
    assert caught.value.errno == number, caught.value
    return caught.value


def published(store: FileStore, seed: int) -> Any:
    """Returns a home that shows the bytes of a seed, by a write and no other way."""
    home, source = store.home(SIZE), filled(SIZE, seed)
    home.write(source.address, source).wait(30)
    home.publish()
    return home


@pytest.mark.parametrize(("kind", "number"), [("errno", errno.EIO), ("errno", errno.ENOSPC), ("short", errno.EIO)])
@pytest.mark.parametrize("action", ["write", "read"])
def test_error_is_told_with_its_place_and_the_transfer_can_be_repeated(
    store: FileStore, engine: FaultyEngine, action: Any, kind: Any, number: int
) -> None:
    source, target = filled(SIZE, 1), buffers.allocate(SIZE)
    store.allocate(MIB)
    block = store.allocate(SIZE)
    if action == "read":
        store.write(block, source.address, source).wait(30)
    start = store.write if action == "write" else store.read
    memory = source if action == "write" else target
    engine.inject(action, kind, errno=number)
    error = refused(number, lambda: start(block, memory.address, memory))
    assert (error.path, error.offset, error.size_bytes) == (store.dirs[0], MIB, SIZE)
    assert error.done_bytes == (0 if kind == "errno" else SIZE - 1)
    assert all(part in str(error) for part in (store.dirs[0], f"offset {MIB}", str(SIZE)))
    assert source[:SIZE] == filled(SIZE, 1)[:SIZE]
    store.write(block, source.address, source).wait(30)
    store.read(block, target.address, target).wait(30)
    assert target[:SIZE] == source[:SIZE]


@pytest.mark.parametrize("kind", ["flip", "lost", "misdirected"])
def test_block_that_the_drive_did_not_keep_is_refused(store: FileStore, engine: FaultyEngine, kind: Any) -> None:
    source, target = filled(SIZE, 1), buffers.allocate(SIZE)
    block, _behind = store.allocate(SIZE), store.allocate(SIZE)
    engine.inject("write", kind)
    store.write(block, source.address, source).wait(30)
    error = refused(errno.EBADMSG, lambda: store.read(block, target.address, target))
    assert (error.offset, error.path) == (block.offset, store.dirs[0])


@pytest.mark.parametrize("kind", ["flip", "misdirected"])
def test_block_that_a_read_changed_is_refused(store: FileStore, engine: FaultyEngine, kind: Any) -> None:
    source, target = filled(SIZE, 1), buffers.allocate(SIZE)
    block, behind = store.allocate(SIZE), store.allocate(SIZE)
    for each in (block, behind):
        store.write(each, source.address, source).wait(30)
    source[5] ^= 1
    store.write(behind, source.address, source).wait(30)
    engine.inject("read", kind)
    refused(errno.EBADMSG, lambda: store.read(block, target.address, target))
    store.read(block, target.address, target).wait(30)  # on the drive it is as it was
    assert target[:SIZE] == filled(SIZE, 1)[:SIZE]


def test_block_that_another_write_hit_is_refused(store: FileStore, engine: FaultyEngine) -> None:
    source, target = filled(SIZE, 1), buffers.allocate(SIZE)
    block, victim = store.allocate(SIZE), store.allocate(SIZE)
    store.write(victim, source.address, source).wait(30)
    other = filled(SIZE, 2)
    engine.inject("write", "misdirected")
    store.write(block, other.address, other).wait(30)
    refused(errno.EBADMSG, lambda: store.read(victim, target.address, target))


@pytest.mark.parametrize("kind", ["flip", "lost", "misdirected", "errno", "short"])
def test_home_value_that_the_drive_did_not_keep_is_never_shown(store: FileStore, engine: FaultyEngine, kind: Any) -> None:
    home, new = published(store, 1), filled(SIZE, 2)
    _behind = [store.allocate(SIZE) for _ in range(2)]
    engine.inject("write", kind, errno=errno.EIO if kind == "errno" else 0)
    number = errno.EIO if kind in ("errno", "short") else errno.EBADMSG
    with pytest.raises(StoreError) as caught:
        home.write(new.address, new).wait(30)
        home.publish()
    assert caught.value.errno == number
    assert shown(home) == filled(SIZE, 1)[:SIZE]
    home.write(new.address, new).wait(30)
    home.publish()
    assert shown(home) == new[:SIZE]


@pytest.mark.parametrize("kind", ["flip", "misdirected"])
def test_home_that_a_read_changed_is_read_again(store: FileStore, engine: FaultyEngine, kind: Any) -> None:
    home, target = published(store, 1), buffers.allocate(SIZE)
    _behind = published(store, 2)
    engine.inject("read", kind)
    home.read(target.address, target).wait(30)
    assert engine.hits == [("read", kind)]
    assert target[:SIZE] == filled(SIZE, 1)[:SIZE]


def test_home_that_comes_back_different_each_time_is_refused(store: FileStore, engine: FaultyEngine) -> None:
    """The bits flipped differ from read to read, as each flip is made where the one before has ended."""
    home, target = published(store, 1), buffers.allocate(SIZE)
    reads = iter(range(100))

    class Restless(FaultyEngine):
        def read(self, file: Any, offset: int, *arguments: Any, **options: Any) -> Any:
            flip_bit(file, offset + next(reads))
            transfer = self.inner.read(file, offset, *arguments, **options)
            transfer.wait()
            return transfer

    store.engine = Restless(engine.inner)
    refused(errno.EBADMSG, lambda: home.read(target.address, target))


def test_value_that_was_believed_is_not_read_again_later(store: FileStore, engine: FaultyEngine) -> None:
    """What is asked of an ended transfer never touches its target, which may be somebody else's memory by then."""
    home, target, new = published(store, 1), buffers.allocate(SIZE), filled(SIZE, 3)
    memoryview(home).cast("B")[0] ^= 1
    read = home.read(target.address, target)
    read.wait(30)
    engine.inject("write", "flip")
    home.write(new.address, new).wait(30)
    with pytest.raises(StoreError, match="read back"):
        home.publish()
    target[:] = bytes(len(target))
    read.wait(30)
    assert read.done()
    assert target[:] == bytes(len(target))


def test_home_that_somebody_changed_is_read_as_it_is(store: FileStore, engine: FaultyEngine) -> None:
    home, target = published(store, 1), buffers.allocate(SIZE)
    memoryview(home).cast("B")[7:12] = b"mine!"
    home.read(target.address, target).wait(30)
    assert target[7:12] == b"mine!"
    assert target[12:SIZE] == filled(SIZE, 1)[12:SIZE]


def test_home_that_a_write_of_another_hit_is_not_believed_any_more(store: FileStore, engine: FaultyEngine) -> None:
    """The other write is found out at publish(); from then on a home that differs is not taken for somebody's change."""
    target, new = buffers.allocate(SIZE), filled(SIZE, 9)
    homes = [published(store, seed) for seed in range(3)]
    victim = min(homes, key=lambda home: home.place.shown.offset)
    hole = store.allocate(SIZE)
    assert hole.offset < victim.place.shown.offset  # left behind by the first home's first value
    store.free(hole)
    other = next(home for home in homes if home is not victim)
    engine.inject("write", "misdirected")
    other.write(new.address, new).wait(30)
    with pytest.raises(StoreError, match="read back"):
        other.publish()
    refused(errno.EBADMSG, lambda: victim.read(target.address, target))


@pytest.mark.parametrize(("mode", "before", "after"), [("off", False, False), ("warmup", True, False), ("always", True, True)])
def test_flipped_bit_is_found_as_long_as_the_config_says(
    engine: FaultyEngine, tmp_path: Path, mode: Any, before: bool, after: bool
) -> None:
    store = FileStore([tmp_path], 8 * MIB, engine, checksum=mode, room=Room(grow_bytes=MIB))
    source, target = filled(SIZE, 1), buffers.allocate(SIZE)
    block, home = store.allocate(SIZE), store.home(SIZE)

    def is_found() -> list[bool]:
        found = []
        engine.inject("write", "flip", count=2)
        store.write(block, source.address, source).wait(30)
        home.write(source.address, source).wait(30)
        engine.clear()
        looks: tuple[Callable[[], object], ...] = (lambda: store.read(block, target.address, target).wait(30), home.publish)
        for look in looks:
            try:
                look()
            except StoreError as error:
                assert error.errno == errno.EBADMSG
                found.append(True)
            else:
                found.append(False)
        return found

    assert is_found() == [before] * 2
    store.end_warmup()
    assert is_found() == [after] * 2
    store.close()


@pytest.mark.parametrize("seed", range(3))
def test_ends_that_come_late_and_out_of_order_change_nothing(store: FileStore, engine: FaultyEngine, seed: int) -> None:
    sizes = [random.Random(seed).randrange(1, MIB) for _ in range(12)]
    blocks = [store.allocate(size) for size in sizes]
    sources = [filled(size, index) for index, size in enumerate(sizes)]
    targets = [buffers.allocate(size) for size in sizes]
    engine.inject("write", "late", count=0)
    engine.inject("read", "late", count=0)
    for start, memories in ((store.write, sources), (store.read, targets)):
        transfers = [start(b, memory.address, memory) for b, memory in zip(blocks, memories, strict=True)]
        assert not any(transfer.done() for transfer in transfers)
        engine.release(seed)
        for transfer in transfers:
            transfer.wait(30)
    assert all(t[:size] == s[:size] for t, s, size in zip(targets, sources, sizes, strict=True))


def test_block_freed_before_its_late_end_is_not_given_away(store: FileStore, engine: FaultyEngine) -> None:
    source = filled(SIZE, 1)
    block = store.allocate(SIZE)
    engine.inject("write", "late")
    write = store.write(block, source.address, source)
    store.free(block)
    again = store.allocate(SIZE)
    assert again.offset != block.offset
    engine.release()
    write.wait(30)
    store.free(again)
    assert store.used_bytes == 0


@pytest.mark.parametrize("action", ["write", "read"])
def test_hang_is_told_with_its_place_and_goes_on_later(store: FileStore, engine: FaultyEngine, action: Any) -> None:
    source, target = filled(SIZE, 1), buffers.allocate(SIZE)
    block = store.allocate(SIZE)
    if action == "read":
        store.write(block, source.address, source).wait(30)
    start = store.write if action == "write" else store.read
    memory = source if action == "write" else target
    engine.inject(action, "hang")
    transfer = start(block, memory.address, memory)
    with pytest.raises(StoreError, match=f"{action} of {SIZE} bytes, .* at offset 0") as caught:
        transfer.wait(0.01)
    assert (caught.value.errno, caught.value.path) == (errno.ETIMEDOUT, store.dirs[0])
    assert not transfer.done()
    engine.release()
    transfer.wait(30)
    store.read(block, target.address, target).wait(30)
    assert target[:SIZE] == source[:SIZE]


def test_close_during_a_late_end_is_told_and_leaves_the_memory_alone(
    engine: FaultyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "CLOSE_TIMEOUT_S", 0.01)
    store = FileStore([tmp_path], 8 * MIB, engine, room=Room(grow_bytes=MIB))
    source = filled(SIZE, 1)
    engine.inject("write", "late")
    write = store.write(store.allocate(SIZE), source.address, source)
    with pytest.raises(StoreError, match="after close") as caught:
        store.close()
    assert caught.value.errno == errno.ETIMEDOUT
    assert os.fstat(store.files[0].fd).st_nlink == 0  # its file stays open for the engine
    engine.release()
    write.wait(30)
    for file in store.files:
        os.close(file.fd)


def test_transfers_of_a_thread_that_exits_are_carried_out(store: FileStore) -> None:
    blocks = [store.allocate(SIZE) for _ in range(4)]
    sources = [filled(SIZE, seed) for seed in range(4)]
    targets = [buffers.allocate(SIZE) for _ in range(4)]
    transfers: list[Any] = []

    def write() -> None:
        transfers.extend(store.write(b, s.address, s) for b, s in zip(blocks, sources, strict=True))

    def read() -> None:
        transfers.extend(store.read(b, t.address, t) for b, t in zip(blocks, targets, strict=True))

    for start in (write, read):
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        for transfer in transfers:
            transfer.wait(30)
    assert all(t[:SIZE] == s[:SIZE] for t, s in zip(targets, sources, strict=True))


@pytest.mark.parametrize("kind", ["errno", "short"])
@pytest.mark.parametrize("action", ["write", "read"])
def test_host_copy_that_fails_is_told(engine: FaultyEngine, action: str, kind: Any) -> None:
    store = HostStore(8 * MIB, engine)
    source, target = filled(SIZE, 1), buffers.allocate(SIZE)
    block = store.allocate(SIZE)
    if action == "read":
        store.write(block, source.address, source).wait(30)
    start = store.write if action == "write" else store.read
    engine.inject("copy", kind, errno=errno.EFAULT if kind == "errno" else 0)
    error = refused(errno.EFAULT if kind == "errno" else errno.EIO, lambda: start(block, target.address, target))
    assert "host memory" in str(error)
    store.write(block, source.address, source).wait(30)
    store.read(block, target.address, target).wait(30)
    assert target[:SIZE] == source[:SIZE]
    store.close()
