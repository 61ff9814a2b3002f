"""The `gds` engine on the real kvikio, with a stand-in for the CUDA driver: run by tests/unit/storage/test_storage_gds.py.

With STAND_IN_MEMORY=device every address counts as device memory, so everything goes through kvikio's device path. With
STAND_IN_MEMORY=host nothing does, and the same tests are run with an engine that takes host memory to kvikio all the same.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kvikio
import kvikio.defaults
import pytest
import torch

from tests.support.models import MLP_WORKLOAD
from tests.support.parity import (
    BACKENDS,
    NVME,
    assert_all_moved,
    assert_equal,
    assert_planned,
    config_for,
    run_plain,
    run_wrapped,
)
from tests.unit.storage.test_storage_conformance import *  # noqa: F403  (every test there, on the engine below)
from tests.unit.storage.test_storage_conformance import CAPACITY_BYTES, MIB, Memory, noise
from tieroff.core.tensor import Tier
from tieroff.errors import StateError, StoreError
from tieroff.probe import doctor
from tieroff.runtime.backend.accelerator import AcceleratorBackend
from tieroff.runtime.backend.place import BlockPlace, HomePlace
from tieroff.runtime.engine import Engine
from tieroff.storage.engines.cuda_memory import CudaMemory
from tieroff.storage.engines.cufile import CuFile, GdsStatus, open_cufile
from tieroff.storage.engines.gds import GdsEngine
from tieroff.storage.nvme.file_store import FileStore, Room
from tieroff.storage.nvme.gds_status import gds_status

IS_DEVICE = os.environ["STAND_IN_MEMORY"] == "device"
device_only = pytest.mark.skipif(not IS_DEVICE, reason="of device memory; run with STAND_IN_MEMORY=device")
host_only = pytest.mark.skipif(IS_DEVICE, reason="of host memory; run with STAND_IN_MEMORY=host")

driver = ctypes.CDLL("libcuda.so.1")


class EveryAddress(CudaMemory):
    """Takes host memory for device memory, so that it goes to kvikio too."""

    def holds(self, address: int) -> bool:
        return True


@pytest.fixture  # type: ignore[no-redef]  # in place of the one that the tests come with
def engine() -> Iterator[GdsEngine]:
    engine = GdsEngine(thread_count=4, task_bytes=MIB, memory=EveryAddress())
    yield engine
    engine.close()


@pytest.fixture
def nvme(engine: GdsEngine, tmp_path: Path) -> Iterator[FileStore]:
    store = FileStore([tmp_path], 4 * CAPACITY_BYTES, engine, checksum="always", room=Room(grow_bytes=MIB))
    yield store
    driver.stand_in_hold(0)
    store.close()


def put(store: FileStore, data: bytes) -> Any:
    """Returns a block that holds this."""
    block = store.allocate(len(data))
    source = Memory(len(data)).set(data)
    store.write(block, source.address, source).wait(30)
    return block


def fetch(store: FileStore, block: Any) -> bytes:
    target = Memory(block.size_bytes)
    store.read(block, target.address, target).wait(30)
    return target.get()


class Counting:
    """A file of kvikio's that reports other counts than the true ones."""

    def __init__(self, inner: CuFile, change: Callable[[int], int]) -> None:
        self.inner, self.change = inner, change
        self.fileno, self.close = inner.fileno, inner.close

    def pread(self, *arguments: Any) -> Any:
        return self.Result(self.inner.pread(*arguments).get(), self.change)

    def pwrite(self, *arguments: Any) -> Any:
        return self.Result(self.inner.pwrite(*arguments).get(), self.change)

    class Result:
        def __init__(self, count: int, change: Callable[[int], int]) -> None:
            self.count, self.change = count, change

        def get(self) -> int:
            return self.change(self.count)


@pytest.mark.parametrize(
    "change", [lambda count: count - 1, lambda count: count + 1, lambda count: 0], ids=["fewer", "more", "none"]
)
def test_another_count_than_asked_for_is_an_error_and_nothing_is_done(change: Callable[[int], int], tmp_path: Path) -> None:
    def open_counting(path: str, directory: str) -> tuple[CuFile, GdsStatus]:
        file, status = open_cufile(path, directory)
        return Counting(file, change), status

    engine = GdsEngine(memory=EveryAddress(), open_file=open_counting)
    store = FileStore([tmp_path], CAPACITY_BYTES, engine)
    block, source = store.allocate(MIB), Memory(MIB).set(noise(MIB, 1))
    write = store.write(block, source.address, source)
    with pytest.raises(StoreError, match=f"write of {MIB} bytes, .*: 0 bytes done") as caught:
        write.wait(30)
    assert (caught.value.errno, caught.value.done_bytes, write.checksum) == (errno.EIO, 0, None)
    with pytest.raises(StateError, match="has not succeeded"):
        store.read(block, source.address, source)
    assert source.get() == noise(MIB, 1)
    store.close()
    engine.close()


def test_reading_past_the_end_is_an_error(nvme: FileStore) -> None:
    block = put(nvme, noise(5 * MIB, 1))
    os.ftruncate(nvme.files[0].fd, 2 * MIB)
    target = Memory(5 * MIB)
    read = nvme.read(block, target.address, target)
    with pytest.raises(StoreError, match=r"read of .*: 0 bytes done") as caught:
        read.wait(30)
    assert (caught.value.errno, caught.value.done_bytes) == (errno.EIO, 0)


def test_error_of_the_system_keeps_its_number(nvme: FileStore) -> None:
    nvme.reserve(16 * MIB)
    put(nvme, noise(MIB, 1))
    block, source = nvme.allocate(8 * MIB), Memory(8 * MIB).set(noise(8 * MIB, 2))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, hard))
    try:
        write = nvme.write(block, source.address, source)
        with pytest.raises(StoreError, match="File too large") as caught:
            write.wait(30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (caught.value.errno, caught.value.done_bytes) == (errno.EFBIG, 0)
    assert source.get() == noise(8 * MIB, 2)
    nvme.write(block, source.address, source).wait(30)
    assert fetch(nvme, block) == noise(8 * MIB, 2)


@device_only
def test_failed_copy_of_the_device_is_an_error(nvme: FileStore) -> None:
    block, source = nvme.allocate(5 * MIB), Memory(5 * MIB).set(noise(5 * MIB, 2))
    driver.stand_in_fail(1)
    write = nvme.write(block, source.address, source)
    with pytest.raises(StoreError) as caught:
        write.wait(30)
    assert (caught.value.errno, caught.value.done_bytes) == (errno.EIO, 0)
    nvme.write(block, source.address, source).wait(30)
    assert fetch(nvme, block) == noise(5 * MIB, 2)


@device_only
def test_bit_that_changes_on_the_way_is_found(nvme: FileStore) -> None:
    block = put(nvme, noise(3 * MIB + 5, 1))
    driver.stand_in_flip(1)
    with pytest.raises(StoreError, match="checksum") as caught:
        fetch(nvme, block)
    assert caught.value.errno == errno.EBADMSG
    assert fetch(nvme, block) == noise(3 * MIB + 5, 1)
    driver.stand_in_flip(1)
    block = put(nvme, noise(3 * MIB + 5, 2))
    with pytest.raises(StoreError, match="checksum"):
        fetch(nvme, block)


@device_only
def test_bit_that_changes_on_the_way_to_a_home_is_found(nvme: FileStore) -> None:
    home = nvme.home(MIB)
    view = memoryview(home).cast("B")
    view[:] = noise(MIB, 1)
    source = Memory(MIB).set(noise(MIB, 2))
    driver.stand_in_flip(1)
    home.write(source.address, source).wait(30)
    with pytest.raises(StoreError, match="checksum"):
        home.publish()
    assert bytes(view) == noise(MIB, 1)


@device_only
def test_transfer_that_hangs_times_out_while_python_goes_on(nvme: FileStore) -> None:
    source = Memory(MIB).set(noise(MIB, 1))
    block = nvme.allocate(MIB)
    driver.stand_in_hold(1)
    write = nvme.write(block, source.address, source)
    waiter = threading.Thread(target=write.wait)
    waiter.start()
    driver.stand_in_wait_held(1)  # so this runs while one thread hangs inside kvikio and another waits for it
    assert not write.done()
    with pytest.raises(StoreError, match=f"{MIB} bytes, .* at offset {block.offset}: 0 bytes done: not ended") as caught:
        write.wait(0.01)
    assert (caught.value.errno, caught.value.path) == (errno.ETIMEDOUT, nvme.dirs[0])
    driver.stand_in_hold(0)
    waiter.join(30)
    assert write.has_succeeded()
    assert fetch(nvme, block) == noise(MIB, 1)


@device_only
@pytest.mark.parametrize("count", [1, 2])
def test_what_was_asked_for_is_waited_for_up_to_a_time_out(count: int, nvme: FileStore) -> None:
    """One of the threads hangs, or all of a direction."""
    sources = [Memory(MIB).set(noise(MIB, seed)) for seed in range(count)]
    blocks = [nvme.allocate(MIB) for _ in sources]
    driver.stand_in_hold(1)
    writes = [nvme.write(block, source.address, source) for block, source in zip(blocks, sources, strict=True)]
    driver.stand_in_wait_held(count)
    assert not nvme.engine.settle(0.05)
    assert not any(write.done() for write in writes)
    driver.stand_in_hold(0)
    assert nvme.engine.settle(30)
    assert all(write.done() for write in writes)


@device_only
def test_transfer_that_has_not_started_can_be_cancelled(nvme: FileStore) -> None:
    sources = [Memory(MIB).set(noise(MIB, seed)) for seed in range(4)]
    blocks = [nvme.allocate(MIB) for _ in sources]
    driver.stand_in_hold(1)
    writes = [nvme.write(block, source.address, source) for block, source in zip(blocks, sources, strict=True)]
    driver.stand_in_wait_held(2)
    assert [write.cancel() for write in writes] == [False, False, True, True]
    assert not writes[3].cancel()
    driver.stand_in_hold(0)
    for index, write in enumerate(writes[:2]):
        write.wait(30)
        assert fetch(nvme, blocks[index]) == noise(MIB, index)
    with pytest.raises(StoreError) as caught:
        writes[2].wait(30)
    assert caught.value.errno == errno.ECANCELED


def test_rest_of_the_last_block_becomes_zeros(nvme: FileStore) -> None:
    full = put(nvme, b"\xff" * 8192)
    offset = full.offset
    nvme.free(full)
    block = put(nvme, b"\xee" * 4099)
    assert block.offset == offset
    page = Memory(8192)
    view = (ctypes.c_ubyte * 8192).from_address(page.address)
    assert os.preadv(nvme.files[0].fd, [view], offset) == 8192
    assert page.get() == b"\xee" * 4099 + bytes(4093)


def test_whole_blocks_pass_by_the_page_cache(nvme: FileStore) -> None:
    if not nvme.is_direct:
        pytest.skip("the file system of the temporary folder has no O_DIRECT")
    block = put(nvme, noise(4 * MIB, 1))
    assert fetch(nvme, block) == noise(4 * MIB, 1)
    assert kvikio.get_page_cache_info(nvme.files[0].fd, block.offset, 4 * MIB)[0] == 0


def test_settings_are_made_on_purpose_and_restored() -> None:
    names = ("num_threads", "task_size", "bounce_buffer_size", "gds_threshold", "auto_direct_io_read", "auto_direct_io_write")
    before = [kvikio.defaults.get(name) for name in names]
    engine = GdsEngine(thread_count=3, task_bytes=2 * MIB)
    assert [kvikio.defaults.get(name) for name in names] == [3, 2 * MIB, 2 * MIB, 16384, True, True]
    assert (engine.thread_count, engine.bounce_bytes) == (3, 6 * MIB)
    engine.close()
    assert [kvikio.defaults.get(name) for name in names] == before


def test_compatibility_mode_is_told(nvme: FileStore, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = GdsStatus(str(tmp_path), "compatibility", "KVIKIO_COMPAT_MODE asks for it")
    assert gds_status([tmp_path]) == [expected]
    assert doctor.engine_path(tmp_path, "gds") == doctor.EnginePath("gds", expected.path, expected.reason)
    put(nvme, noise(MIB, 1))
    put(nvme, noise(MIB, 2))
    assert nvme.engine.statuses == {str(tmp_path): expected}  # type: ignore[attr-defined]
    assert caplog.text.count("does not go by nvidia-fs") == 1


def test_status_of_a_folder_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    status = gds_status([tmp_path / "missing"])[0]
    assert status.path == "none" and "does not exist" in status.reason
    assert list(tmp_path.iterdir()) == []


def test_opening_by_kvikio_keeps_what_the_file_holds(nvme: FileStore) -> None:
    nvme.reserve(8 * MIB)
    put(nvme, noise(MIB, 1))
    assert os.fstat(nvme.files[0].fd).st_size == 8 * MIB


@host_only
def test_host_memory_never_reaches_kvikio(tmp_path: Path) -> None:
    engine = GdsEngine()
    store = FileStore([tmp_path], CAPACITY_BYTES, engine, checksum="always")
    block = put(store, noise(3 * MIB + 1, 1))
    assert fetch(store, block) == noise(3 * MIB + 1, 1)
    assert engine.statuses == {}
    store.close()
    engine.close()


def test_engine_refuses_calls_after_close(tmp_path: Path) -> None:
    engine = GdsEngine(memory=EveryAddress())
    store = FileStore([tmp_path], CAPACITY_BYTES, engine)
    block, source = store.allocate(MIB), Memory(MIB)
    engine.close()
    engine.close()
    with pytest.raises(StateError, match="closed"):
        store.write(block, source.address, source)
    store.close()


class Over:
    """Compute that has left the memory already."""

    def synchronize(self) -> None:
        pass


@device_only
@pytest.mark.parametrize("make_place", [BlockPlace, HomePlace])
def test_cuda_backend_hands_the_engine_its_memory_without_staging(
    make_place: type[BlockPlace | HomePlace], nvme: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AcceleratorBackend, "_ready", lambda self, **_: Over())
    backend = object.__new__(AcceleratorBackend)  # its making asks for a device
    backend._staging = None
    backend._writers, backend._readers = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    place = make_place(nvme, 3 * MIB + 7)
    source = torch.frombuffer(bytearray(noise(3 * MIB + 7, 1)), dtype=torch.uint8)
    out = backend.copy_out(source, place)
    out.wait(30)
    place.publish()
    target = torch.empty_like(source)
    backend.copy_in(place, target).wait(30)
    assert torch.equal(target, source)
    assert nvme.engine.statuses  # type: ignore[attr-defined]
    place.free()
    backend._writers.shutdown()
    backend._readers.shutdown()


@device_only
@pytest.mark.parametrize("name", ["cpu", "delayed"])
def test_training_through_kvikio_computes_the_same(name: str, tmp_path: Path) -> None:
    config = config_for(NVME, tmp_path)
    config["nvme"]["engine"] = "gds"

    def after_step(index: int, engine: Engine) -> None:
        store = engine.stores[Tier.NVME]
        assert isinstance(store, FileStore) and isinstance(store.engine, GdsEngine)
        assert store.engine.statuses[str(tmp_path)].path == "compatibility"  # so bytes went there
        if index >= MLP_WORKLOAD.steps - 3:
            assert_planned(engine, NVME)
            assert_all_moved(engine, MLP_WORKLOAD, NVME)

    plain = run_plain(MLP_WORKLOAD, torch.device("cpu"))
    assert_equal(plain, run_wrapped(MLP_WORKLOAD, config, BACKENDS[name](), after_step))


FORK = """
import os, sys
from tests.gds.engine_tests import MIB, EveryAddress, GdsEngine, FileStore, Memory, StateError, fetch, noise, put

engine = GdsEngine(thread_count=2, task_bytes=MIB, memory=EveryAddress())
store = FileStore([sys.argv[1]], 16 * MIB, engine, checksum="always")
block, target, file = put(store, noise(MIB, 1)), Memory(MIB), store.files[0]
inode = os.fstat(file.fd).st_ino
read = engine.read(file, block.offset, target.address, MIB, with_checksum=False, is_mapped=False)

def is_refused(call):
    try:
        call()
    except StateError as error:
        return "fork" in str(error)
    return False

child = os.fork()
if child == 0:
    calls = [
        lambda: engine.read(file, 0, target.address, MIB, with_checksum=False, is_mapped=False),
        lambda: engine.write(file, 0, target.address, MIB, with_checksum=False),
        lambda: engine.verify(file, 0, MIB), lambda: engine.copy(target.address, target.address, 1, None),
        lambda: read.done(), lambda: read.wait(), lambda: read.cancel(),
    ]
    bad = [index for index, call in enumerate(calls) if not is_refused(call)]
    held = [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    bad += [fd for fd in held if os.fstat(int(fd)).st_ino == inode]
    engine.close()
    del engine, store, calls
    sys.exit(f"child: {bad}" if bad else 0)  # the whole way out, with every destructor
assert os.waitpid(child, 0)[1] == 0
assert read.wait(30) and read.errno == 0 and target.get() == noise(MIB, 1)
assert fetch(store, block) == noise(MIB, 1)
store.close()
engine.close()
"""


def test_forked_child_is_refused_and_lets_go_of_the_files(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORK, tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
