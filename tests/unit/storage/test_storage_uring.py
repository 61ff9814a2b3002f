"""The engine on io_uring beside the one on threads: the same bytes, its bounds, and what happens where it is refused."""

from __future__ import annotations

import errno
import logging
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tieroff.storage import buffers, engines
from tieroff.storage.engines import Direction, OpenFile, available, choose
from tieroff.storage.nvme import files

native_engines: Any = pytest.importorskip("tieroff.storage.engines.native")

MIB = 2**20
CHUNK = 65536

needs_uring = pytest.mark.skipif("uring" not in available(), reason="no liburing, or the kernel refuses io_uring")

MakeEngine = Callable[..., Any]


@pytest.fixture(params=["threads", pytest.param("uring", marks=needs_uring)])
def make_engine(request: pytest.FixtureRequest) -> Iterator[MakeEngine]:
    made = []

    def make(call_count: int = 4, **options: int) -> Any:
        """An engine that makes so many calls at once per direction."""
        if request.param == "uring":
            made.append(native_engines.UringEngine(queue_depth=call_count, chunk_bytes=CHUNK, **options))
        else:
            made.append(native_engines.NativeEngine(read_threads=call_count, write_threads=call_count, chunk_bytes=CHUNK))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[OpenFile]:
    opened = open_file(tmp_path)
    yield opened
    os.close(opened.fd)


def open_file(folder: Path) -> OpenFile:
    directory = os.open(folder, os.O_RDONLY)
    try:
        opened = files.open_nameless(str(folder), directory, is_direct=True)
    finally:
        os.close(directory)
    files.preallocate(opened, 0, 8 * MIB)
    return opened


def filled(size_bytes: int, seed: int) -> buffers.Buffer:
    buffer = buffers.allocate(size_bytes)
    buffer[:size_bytes] = random.Random(seed).randbytes(size_bytes)
    return buffer


def content(file: OpenFile, size_bytes: int) -> bytes:
    """What the file holds, by other means than an engine's."""
    fd = os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY)
    try:
        return os.pread(fd, size_bytes, 0)
    finally:
        os.close(fd)


def ended(transfer: Any) -> Any:
    assert transfer.wait(60)
    assert (transfer.errno, transfer.done_bytes) == (0, transfer.size_bytes)
    return transfer


def pieces(seed: int) -> list[tuple[int, int, int]]:
    """Offsets in the file, sizes and shifts off the page that together do not overlap."""
    seeded = random.Random(seed)
    found, offset = [], 0
    while offset < 6 * MIB:
        size = seeded.choice([1, 511, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 1, seeded.randrange(1, MIB)])
        found.append((offset, size, seeded.choice([0, 1, 64, 512])))
        offset += -(-size // 4096) * 4096
    return found


@needs_uring
@pytest.mark.parametrize("seed", range(3))
def test_uring_and_threads_are_equal_byte_for_byte(tmp_path: Path, seed: int) -> None:
    source = filled(8 * MIB, seed)
    written, checksums, read = [], [], []
    for engine in (
        native_engines.NativeEngine(chunk_bytes=CHUNK),
        native_engines.UringEngine(queue_depth=5, bounce_count=2, chunk_bytes=CHUNK),
    ):
        file = open_file(tmp_path)
        writes = [
            engine.write(file, offset, source.address + offset + shift, size, with_checksum=True)
            for offset, size, shift in pieces(seed)
        ]
        checksums.append([ended(write).checksum for write in writes])
        written.append(content(file, 8 * MIB))
        target = buffers.allocate(8 * MIB)
        reads = [
            engine.read(file, offset, target.address + offset, size, with_checksum=True, is_mapped=False)
            for offset, size, _ in pieces(seed)
        ]
        assert [ended(transfer).checksum for transfer in reads] == checksums[-1]
        verifies = [engine.verify(file, offset, size) for offset, size, _ in pieces(seed)]
        assert [ended(transfer).checksum for transfer in verifies] == checksums[-1]
        read.append(target[:])
        engine.close()
        os.close(file.fd)
    assert written[0] == written[1]
    assert checksums[0] == checksums[1]
    assert read[0] == read[1]
    for offset, size, shift in pieces(seed):
        expected = source[offset + shift : offset + shift + size]
        assert written[0][offset : offset + size] == expected
        assert written[0][offset + size : -(-(offset + size) // 4096) * 4096].strip(b"\0") == b""
        assert read[0][offset : offset + size] == expected


def test_calls_under_way_are_bounded(make_engine: MakeEngine, file: OpenFile) -> None:
    """A transfer that hangs, and behind it more of one call each than may be under way."""
    engine = make_engine(3)
    source = filled(20 * CHUNK, 1)
    engine.native.inject("write", hang=True)
    writes = [engine.write(file, 0, source.address, CHUNK, with_checksum=False)]
    assert engine.native.wait_hanging(1, 60)
    writes += [
        engine.write(file, index * CHUNK, source.address + index * CHUNK, CHUNK, with_checksum=False) for index in range(1, 20)
    ]
    engine.native.release()
    for write in writes:
        ended(write)
    assert engine.native.peak_call_count <= 3
    if engine.name == "uring":
        assert engine.native.peak_call_count == 3  # many transfers under way, each in the order of its call
    assert content(file, 20 * CHUNK) == source[: 20 * CHUNK]


@needs_uring
def test_bounce_buffers_are_bounded(file: OpenFile) -> None:
    """With one for all, chunks whose memory is not aligned take turns; those that are aligned need none."""
    engine = native_engines.UringEngine(queue_depth=8, bounce_count=1, chunk_bytes=CHUNK)
    source = filled(30 * CHUNK + 1, 1)
    off, straight = [
        engine.write(file, start, source.address + start + shift, 15 * CHUNK, with_checksum=False)
        for start, shift in ((0, 1), (15 * CHUNK, 0))
    ]
    ended(off)
    ended(straight)
    assert content(file, 15 * CHUNK) == source[1 : 15 * CHUNK + 1]
    assert content(file, 30 * CHUNK)[15 * CHUNK :] == source[15 * CHUNK : 30 * CHUNK]
    assert engine.native.bounced_bytes == 15 * CHUNK
    engine.close()


def test_memory_is_bounced_only_below_the_alignment_that_the_file_asks_for(make_engine: MakeEngine, file: OpenFile) -> None:
    engine = make_engine()
    memory_bytes, _ = native_engines._native.direct_alignment(file.fd)
    assert file.memory_alignment == (memory_bytes or os.sysconf("SC_PAGESIZE") if file.is_direct else 1)
    source, target = filled(2 * MIB, 1), buffers.allocate(2 * MIB)
    size, shift = MIB, file.memory_alignment
    ended(engine.write(file, 0, source.address + shift, size, with_checksum=False))
    ended(engine.read(file, 0, target.address + shift, size, with_checksum=False, is_mapped=False))
    assert target[shift : shift + size] == source[shift : shift + size]
    assert engine.native.bounced_bytes == 0
    if shift > 1:
        ended(engine.write(file, 0, source.address + shift // 2, size, with_checksum=False))
        assert engine.native.bounced_bytes == size


def test_transfers_outlive_the_thread_that_started_them(make_engine: MakeEngine, file: OpenFile) -> None:
    engine = make_engine()
    source = filled(4 * MIB, 1)
    engine.native.inject("write", hang=True)
    writes: list[Any] = []

    def start() -> None:
        for offset in range(0, 4 * MIB, MIB):
            writes.append(engine.write(file, offset, source.address + offset, MIB, with_checksum=False))

    caller = threading.Thread(target=start)
    caller.start()
    caller.join()
    assert engine.native.wait_hanging(1, 60)
    engine.native.release()
    for write in writes:
        ended(write)
    assert content(file, 4 * MIB) == source[: 4 * MIB]


def test_waiting_lets_other_threads_run(make_engine: MakeEngine, file: OpenFile) -> None:
    """The hang ends only when another Python thread ends it: with the lock held this would never return."""
    engine = make_engine(1)
    source = filled(MIB, 1)
    engine.native.inject("write", hang=True)
    write = engine.write(file, 0, source.address, MIB, with_checksum=False)
    other = threading.Thread(target=lambda: (engine.native.wait_hanging(1, 60), engine.native.release()))
    other.start()
    ended(write)
    other.join()


def test_a_hang_holds_up_its_own_direction_alone(make_engine: MakeEngine, file: OpenFile) -> None:
    engine = make_engine(1)
    source, target = filled(MIB, 1), buffers.allocate(MIB)
    engine.native.inject("read", hang=True)
    read = engine.read(file, 0, target.address, MIB, with_checksum=False, is_mapped=False)
    assert engine.native.wait_hanging(1, 60)
    ended(engine.write(file, MIB, source.address, MIB, with_checksum=False))
    ended(engine.copy(target.address, source.address, MIB, Direction.OUT))
    assert not read.done()
    engine.native.release()
    assert read.wait(60)


def test_copies_stay_in_order_with_reads(make_engine: MakeEngine, file: OpenFile) -> None:
    engine = make_engine(1)
    source, middle, target = filled(MIB, 1), buffers.allocate(MIB), buffers.allocate(MIB)
    ended(engine.write(file, 0, source.address, MIB, with_checksum=False))
    engine.read(file, 0, middle.address, MIB, with_checksum=False, is_mapped=False)
    ended(engine.copy(target.address, middle.address, MIB, Direction.IN))
    assert target[:] == source[:]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_dirty_pages_that_cannot_be_written_back_fail_the_read(make_engine: MakeEngine, file: OpenFile, number: int) -> None:
    engine = make_engine(1)
    target = buffers.allocate(MIB)
    engine.native.inject("flush", errno=number)
    read = engine.native.read(file.fd, 0, target.address, MIB, file.block_bytes, 4096, False, True)
    assert read.wait(60)
    assert (read.errno, read.done_bytes) == (number, 0)


SECCOMP = """
import ctypes, logging, platform, struct, sys
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
libc = ctypes.CDLL(None, use_errno=True)

def refuse(number):
    # Load the call's number; if it is this one answer EPERM, else allow it. On all threads of the process.
    rules = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("HL", len(rules), ctypes.addressof(code)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    seccomp = {"x86_64": 317, "aarch64": 277}[platform.machine()]
    assert libc.syscall(seccomp, 1, 1, program) == 0, ctypes.get_errno()
"""

REFUSED_AT_START = """
from tieroff.storage.engines import available, choose
assert "uring" in available()
refuse(425)
assert "uring" not in available()
for name, measured in (("uring", None), ("auto", "uring")):
    engine = choose(name, measured=measured)
    print(engine.name)
    engine.close()
"""

REFUSED_LATER = """
from tieroff.errors import StateError
from tieroff.storage import buffers
from tieroff.storage.nvme import files
from tieroff.storage.engines.native import UringEngine
import os, pathlib, time
file = files.open_nameless(sys.argv[1], os.open(sys.argv[1], os.O_RDONLY), is_direct=True)
engine = UringEngine()
source = buffers.allocate(2**20)
# The rings' threads have to be inside the call already: one that is not would find out before anything is asked of it.
rings = [task for task in pathlib.Path("/proc/self/task").iterdir() if (task / "comm").read_text().startswith("tieroff-ring")]
assert len(rings) == 2  # libraries may have threads of their own, such as OpenBLAS
while not all((task / "syscall").read_text().startswith("426 ") for task in rings):
    time.sleep(0.001)
refuse(426)
write = engine.write(file, 0, source.address, 2**20, with_checksum=False)
assert not write.wait(0.2)
try:
    while True:  # until the ring's thread has found out
        engine.write(file, 0, source.address, 2**20, with_checksum=False)
except StateError as error:
    print(error)
engine.close()
print(write.done(), write.errno, write.done_bytes)
"""


def run_script(script: str, project: Path, *arguments: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(project)}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@needs_uring
def test_uring_that_seccomp_refuses_falls_back_to_threads(project: Path) -> None:
    warning, engine, auto_engine = run_script(SECCOMP + REFUSED_AT_START, project)
    assert "got errno 1 (EPERM, Operation not permitted)" in warning and "run on threads" in warning
    assert "seccomp" in warning
    assert (engine, auto_engine) == ("threads", "threads")


@needs_uring
def test_ring_that_the_kernel_stops_serving_is_told(project: Path, tmp_path: Path) -> None:
    told, ended_as = run_script(SECCOMP + REFUSED_LATER, project, str(tmp_path))
    assert "expected an engine that works" in told and "errno 1 (Operation not permitted)" in told
    assert ended_as == "True 1 0"


def test_build_without_liburing_falls_back_to_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_arguments: int) -> None:
        raise OSError(errno.ENOSYS, "built without liburing")

    monkeypatch.setattr(native_engines._native, "RingEngine", refuse)
    caplog.set_level(logging.WARNING)
    engine = choose("uring")
    assert engine.name == "threads"
    assert "ENOSYS" in caplog.text and "build with liburing" in caplog.text
    engine.close()


@needs_uring
def test_auto_takes_what_was_measured_where_it_works(caplog: pytest.LogCaptureFixture) -> None:
    for measured, expected in ((None, "threads"), ("threads", "threads"), ("uring", "uring"), ("gone", "threads")):
        engine = engines.choose("auto", measured=measured)
        assert engine.name == expected
        engine.close()
    assert caplog.text == ""


@needs_uring
def test_rings_and_descriptors_are_gone_after_close() -> None:
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for _ in range(20):
        engine = native_engines.UringEngine()
        source, target = filled(4096, 1), buffers.allocate(4096)
        ended(engine.copy(target.address, source.address, 4096, Direction.IN))
        engine.close()
        del engine
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before
