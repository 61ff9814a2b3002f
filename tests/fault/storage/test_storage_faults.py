"""Transfers that fail, each with a stated outcome. Faults are injected at the native engine's system calls."""

from __future__ import annotations

import errno
import os
import random
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tieroff.errors import StoreError
from tieroff.storage import buffers
from tieroff.storage.engines import available
from tieroff.storage.host.pool import HostStore
from tieroff.storage.nvme.file_store import FileStore, Room

native_engine = pytest.importorskip("tieroff.storage.engines.native")

MIB = 2**20
SIZE = 4 * MIB + 100
CHUNKS = 5  # of 1 MiB, the last one of 100 bytes


@pytest.fixture(params=[name for name in ("threads", "uring") if name in available()])
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A native engine that makes the calls of a direction one after the other, so that faults hit the ones they name."""
    if request.param == "uring":
        engine = native_engine.UringEngine(queue_depth=1, chunk_bytes=MIB)
    else:
        engine = native_engine.NativeEngine(read_threads=1, write_threads=1, chunk_bytes=MIB)
    yield engine
    engine.close()


@pytest.fixture
def store(engine: Any, tmp_path: Path) -> Iterator[FileStore]:
    store = FileStore([tmp_path], 32 * MIB, engine, checksum="always", room=Room(grow_bytes=MIB))
    yield store
    store.close()


def filled(size_bytes: int, seed: int) -> buffers.Buffer:
    buffer = buffers.allocate(size_bytes)
    buffer[:size_bytes] = random.Random(seed).randbytes(size_bytes)
    return buffer


def failure(store: Any, number: int, start: Any) -> StoreError:
    with pytest.raises(StoreError) as caught:
        start().wait(30)
    assert caught.value.errno == number
    return caught.value


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("after", [0, 3])
def test_failed_write_tells_errno_and_bytes_and_can_be_repeated(store: FileStore, engine: Any, number: int, after: int) -> None:
    source, target = filled(SIZE, 1), buffers.allocate(SIZE)
    block = store.allocate(SIZE)
    engine.native.inject("write", errno=number, after=after)
    error = failure(store, number, lambda: store.write(block, source.address + 1, source))
    assert error.done_bytes == after * MIB
    assert (error.size_bytes, error.offset, error.path) == (SIZE, block.offset, store.dirs[0])
    assert store.dirs[0] in str(error)
    assert source[:SIZE] == filled(SIZE, 1)[:SIZE]
    store.write(block, source.address, source).wait(30)
    store.read(block, target.address, target).wait(30)
    assert target[:SIZE] == source[:SIZE]


def test_failed_chunk_stops_the_rest(store: FileStore, engine: Any) -> None:
    source = filled(SIZE, 1)
    block = store.allocate(SIZE)
    engine.native.inject("write", errno=errno.EIO, after=1, count=1)
    error = failure(store, errno.EIO, lambda: store.write(block, source.address, source))
    assert error.done_bytes == MIB  # the later chunks would have succeeded, and were not tried


def test_failed_read_is_told(store: FileStore, engine: Any) -> None:
    source, target = filled(SIZE, 1), buffers.allocate(SIZE)
    block = store.allocate(SIZE)
    store.write(block, source.address, source).wait(30)
    engine.native.inject("read", errno=errno.EIO, after=2)
    assert failure(store, errno.EIO, lambda: store.read(block, target.address, target)).done_bytes == 2 * MIB
    store.read(block, target.address, target).wait(30)
    assert target[:SIZE] == source[:SIZE]


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("short_bytes", [1, 4095, 4096, 5000, 512 * 1024, MIB - 1])
@pytest.mark.parametrize("shift", [0, 1])
def test_short_transfer_is_continued(store: FileStore, engine: Any, kind: str, short_bytes: int, shift: int) -> None:
    source, target = filled(SIZE + 1, 1), buffers.allocate(SIZE + 1)
    block = store.allocate(SIZE)
    engine.native.inject(kind, short_bytes=short_bytes, count=3)
    store.write(block, source.address + shift, source).wait(30)
    store.read(block, target.address + shift, target).wait(30)
    assert target[shift : shift + SIZE] == source[shift : shift + SIZE]


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("short_bytes", [0, 100])
def test_transfer_that_gets_nowhere_fails(store: FileStore, engine: Any, kind: str, short_bytes: int) -> None:
    source = filled(SIZE, 1)
    block = store.allocate(SIZE)
    if kind == "read":
        store.write(block, source.address, source).wait(30)
    engine.native.inject(kind, short_bytes=short_bytes, count=0)
    start = store.read if kind == "read" else store.write
    failure(store, errno.EIO, lambda: start(block, source.address, source))


@pytest.mark.parametrize("kind", ["read", "write"])
def test_interrupted_call_is_repeated(store: FileStore, engine: Any, kind: str) -> None:
    source, target = filled(SIZE, 1), buffers.allocate(SIZE)
    block = store.allocate(SIZE)
    engine.native.inject(kind, errno=errno.EINTR, count=7)
    store.write(block, source.address, source).wait(30)
    store.read(block, target.address, target).wait(30)
    assert target[:SIZE] == source[:SIZE]


def test_flipped_bit_is_found_by_checksum(store: FileStore, engine: Any) -> None:
    source, target = filled(SIZE, 1), buffers.allocate(SIZE)
    block = store.allocate(SIZE)
    store.write(block, source.address, source).wait(30)
    engine.native.inject("read", flip=True, after=4)
    failure(store, errno.EBADMSG, lambda: store.read(block, target.address, target))


def test_hang_becomes_a_time_out_that_names_the_place(store: FileStore, engine: Any) -> None:
    source = filled(SIZE, 1)
    block = store.allocate(SIZE)
    engine.native.inject("write", hang=True, after=1)
    write = store.write(block, source.address, source)
    assert engine.native.wait_hanging(1, 30)
    with pytest.raises(StoreError) as caught:
        write.wait(0.01)
    error = caught.value
    assert (error.errno, error.path, error.offset, error.size_bytes) == (errno.ETIMEDOUT, store.dirs[0], block.offset, SIZE)
    assert error.done_bytes == MIB
    assert all(part in str(error) for part in (store.dirs[0], f"offset {block.offset}", str(SIZE)))
    assert not write.done()
    engine.native.release()
    write.wait(30)


def test_transfer_behind_a_hang_can_be_cancelled(store: FileStore, engine: Any) -> None:
    source = filled(SIZE, 1)
    blocks = [store.allocate(SIZE) for _ in range(3)]
    engine.native.inject("write", hang=True)
    writes = [store.write(block, source.address, source) for block in blocks]
    assert engine.native.wait_hanging(1, 30)
    assert not writes[0].cancel()
    assert writes[1].cancel()
    assert not writes[1].cancel()
    engine.native.release()
    writes[0].wait(30)
    writes[2].wait(30)
    assert failure(store, errno.ECANCELED, lambda: writes[1]).done_bytes == 0
    assert not writes[0].cancel()
    store.write(blocks[1], source.address, source).wait(30)


def test_full_store_waits_for_freed_blocks_that_are_still_written(engine: Any, tmp_path: Path) -> None:
    store = FileStore([tmp_path], 4 * MIB, engine, room=Room(grow_bytes=MIB))
    source = filled(4 * MIB, 1)
    block = store.allocate(4 * MIB)
    engine.native.inject("write", hang=True)
    write = store.write(block, source.address, source)
    assert engine.native.wait_hanging(1, 30)
    store.free(block)
    assert store.used_bytes == 4 * MIB  # still written to
    releaser = threading.Timer(0.05, engine.native.release)
    releaser.start()
    assert store.allocate(MIB).offset == 0
    assert write.done()
    releaser.join()
    store.close()


def test_close_during_a_hang_cancels_the_queue(store: FileStore, engine: Any) -> None:
    source = filled(SIZE, 1)
    engine.native.inject("write", hang=True)
    writes = [store.write(store.allocate(SIZE), source.address, source) for _ in range(3)]
    assert engine.native.wait_hanging(1, 30)
    engine.close()
    assert all(write.done() for write in writes)
    for write in writes[1:]:
        failure(store, errno.ECANCELED, lambda write=write: write)


def test_failed_home_write_keeps_the_old_value(store: FileStore, engine: Any) -> None:
    home = store.home(SIZE)
    old, new = filled(SIZE, 1), filled(SIZE, 2)
    home.write(old.address, old).wait(30)
    home.publish()
    engine.native.inject("write", errno=errno.EIO, after=3)
    failure(store, errno.EIO, lambda: home.write(new.address, new))
    with pytest.raises(StoreError):
        home.publish()
    assert bytes(memoryview(home).cast("B")) == old[:SIZE]
    home.write(new.address, new).wait(30)
    home.publish()
    assert bytes(memoryview(home).cast("B")) == new[:SIZE]


def test_home_value_that_the_drive_changed_is_not_published(store: FileStore, engine: Any) -> None:
    home = store.home(SIZE)
    old, new = filled(SIZE, 1), filled(SIZE, 2)
    home.write(old.address, old).wait(30)
    home.publish()
    home.write(new.address, new).wait(30)
    engine.native.inject("read", flip=True, after=3)
    with pytest.raises(StoreError, match="read back") as caught:
        home.publish()
    assert caught.value.errno == errno.EBADMSG
    assert bytes(memoryview(home).cast("B")) == old[:SIZE]
    home.write(new.address, new).wait(30)
    home.publish()
    assert bytes(memoryview(home).cast("B")) == new[:SIZE]


def test_failed_copy_to_host_is_told(engine: Any) -> None:
    store = HostStore(8 * MIB, engine)
    source = filled(SIZE, 1)
    block = store.allocate(SIZE)
    engine.native.inject("copy", errno=errno.EFAULT, after=1)
    error = failure(store, errno.EFAULT, lambda: store.write(block, source.address, source))
    assert error.done_bytes == MIB and "host memory" in str(error)
    store.close()


def test_waiting_lets_other_threads_run(store: FileStore, engine: Any) -> None:
    """The hang ends only when another Python thread ends it: with the lock held this would never return."""
    source = filled(SIZE, 1)
    engine.native.inject("write", hang=True)
    write = store.write(store.allocate(SIZE), source.address, source)
    assert engine.native.wait_hanging(1, 30)
    waiting = threading.Event()

    def release() -> None:
        waiting.wait()
        engine.native.release()

    other = threading.Thread(target=release)
    other.start()
    waiting.set()
    write.wait(60)
    other.join()
    assert write.done()


def test_drive_that_is_full_is_told_when_growing(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore([tmp_path], 8 * MIB, engine, room=Room(grow_bytes=MIB))

    def fallocate(*_args: int) -> None:
        raise OSError(errno.ENOSPC, "injected")

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with pytest.raises(StoreError, match=r"cannot reserve .* more in") as caught:
        store.allocate(MIB)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert store.allocate(MIB).offset == 0
    store.close()


FILE_SIZE_LIMIT = """
import errno, resource, sys
from tieroff.errors import StoreError
from tieroff.storage.engines import choose
from tieroff.storage.nvme.file_store import FileStore, Room
resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, 2**21))
engine = choose(sys.argv[2])
store = FileStore([sys.argv[1]], 2**24, engine, room=Room(grow_bytes=2**20))
blocks = [store.allocate(2**20), store.allocate(2**20)]
try:
    store.allocate(2**20)
except StoreError as error:
    print("told", len(blocks), error.errno == errno.ENOSPC, "File too large" in str(error))
store.close()
engine.close()
"""


@pytest.mark.parametrize("name", available())
def test_file_that_may_not_grow_is_told(tmp_path: Path, project: Path, name: str) -> None:
    done = run_script(FILE_SIZE_LIMIT, project, str(tmp_path), name)
    assert done.stdout.split() == ["told", "2", "True", "True"], done.stderr


def run_script(script: str, project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(project)}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )


KILLED = """
import os, signal, sys, threading
from tieroff.storage import buffers
from tieroff.storage.engines import choose
from tieroff.storage.nvme.file_store import FileStore, Room
engine = choose(sys.argv[2])
store = FileStore([sys.argv[1]], 2**26, engine)
home = store.home(2**20)
memoryview(home).cast("B")[0] = 1
source = buffers.allocate(2**23)
for _ in range(6):
    write = store.write(store.allocate(2**23), source.address, source)
print(os.listdir(sys.argv[1]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("name", available())
def test_killed_process_leaves_nothing(tmp_path: Path, project: Path, name: str) -> None:
    done = run_script(KILLED, project, str(tmp_path), name)
    assert done.returncode == -9
    assert done.stdout.strip() == "[]"
    assert os.listdir(tmp_path) == []


UNCLOSED = """
import sys
from tieroff.storage import buffers
from tieroff.storage.engines import choose
from tieroff.storage.nvme.file_store import FileStore, Room
engine = choose(sys.argv[2])
store = FileStore([sys.argv[1]], 2**26, engine)
store.return_pages(0.001)
for _ in range(6):
    source = buffers.allocate(2**23)
    store.write(store.allocate(2**23), source.address, source)
print("end")
"""


@pytest.mark.parametrize("name", available())
def test_exit_with_transfers_in_flight_ends_well(tmp_path: Path, project: Path, name: str) -> None:
    done = run_script(UNCLOSED, project, str(tmp_path), name)
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr


def test_address_space_that_is_short_is_told(engine: Any, tmp_path: Path) -> None:
    store = FileStore([tmp_path], 8 * MIB, engine, room=Room(grow_bytes=MIB))
    before = resource.getrlimit(resource.RLIMIT_AS)
    statm_pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (statm_pages * resource.getpagesize() + MIB, before[1]))
    try:
        with pytest.raises(StoreError, match="cannot map 4194304 bytes"):
            store.home(4 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert store.used_bytes == 0
    assert store.home(4 * MIB).size_bytes == 4 * MIB
    store.close()
