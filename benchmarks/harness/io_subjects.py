"""What benchmarks/bench_io.py compares: a raw io_uring loop, this library's engines, and others where they are installed."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import random
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from tieroff.probe.nvme import Memory, Track
from tieroff.storage.buffers import Buffer, allocate
from tieroff.storage.engines import OpenFile, choose

Kind = Literal["write", "read", "both"]

MIB = 2**20
DEPTHS = {MIB: 16, 4 * MIB: 4, 16 * MIB: 2, 64 * MIB: 2}
"""Transfers under way at once, by their size; of other sizes as many as 16 MiB hold, and two at least."""

RAW_BLOCK_BYTES = MIB
RAW_DEPTH = 16
RAW_SOURCE = Path(__file__).resolve().parent.parent / "native/raw_io.cpp"


class SubjectFailed(Exception):
    """Something that cannot be measured here, and why."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What a slice moved.

    Attributes:
        written_bytes, read_bytes: each way.
        wall_s: from the first transfer's start to the last one's end.
        cpu_s: time of all cores, or None where it is not known.
    """

    written_bytes: int
    read_bytes: int
    wall_s: float
    cpu_s: float | None

    @property
    def all_bytes(self) -> int:
        """Both ways together."""
        return self.written_bytes + self.read_bytes


class Subject(Protocol):
    """Something that moves bytes between memory and a range of a file of its own."""

    @property
    def name(self) -> str:
        """As it is shown."""

    def run(self, kind: Kind, block_bytes: int, seconds: float) -> Moved:
        """Moves transfers of a size for some time. Raises SubjectFailed."""

    def close(self) -> None:
        """Ends it; idempotent."""


def depth_of(block_bytes: int) -> int:
    """Returns how many transfers of a size are under way at once."""
    return DEPTHS.get(block_bytes, max(2, 16 * MIB // block_bytes))


def random_memory(size_bytes: int) -> Buffer:
    """Returns memory that holds noise, so that no drive can compress what is written."""
    buffer = allocate(size_bytes)
    noise = random.Random(size_bytes).randbytes(MIB)
    for position in range(0, buffer.size_bytes, MIB):
        part = noise[: min(MIB, buffer.size_bytes - position)]
        ctypes.memmove(buffer.address + position, part, len(part))
    return buffer


def build_raw(folder: Path) -> Path:
    """Returns the raw loop's program, compiled into a folder.

    Raises:
        SubjectFailed: there is no compiler, or it cannot compile this.
    """
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        raise SubjectFailed("expected a C++ compiler (c++, g++ or clang++) for the reference, found none: install one")
    program = folder / "raw_io"
    done = subprocess.run(
        [compiler, "-std=c++20", "-O2", str(RAW_SOURCE), "-o", str(program)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SubjectFailed(f"{compiler} could not compile {RAW_SOURCE}: {done.stderr.strip()[-2000:]}")
    return program


class RawLoop:
    """The reference: one thread, one io_uring, 16 transfers of 1 MiB, in a process of its own."""

    def __init__(self, program: Path, file: OpenFile, start: int, range_bytes: int, name: str = "raw") -> None:
        """Starts the program on a range of an open file."""
        self.name = name
        self._process = subprocess.Popen(
            [str(program), str(file.fd), str(start), str(range_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[file.fd],
        )

    def run(self, kind: Kind, block_bytes: int, seconds: float) -> Moved:
        """Moves pieces of `RAW_BLOCK_BYTES`, over as much memory as the others use for transfers of this size."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        memory_bytes = max(block_bytes * depth_of(block_bytes), RAW_BLOCK_BYTES * RAW_DEPTH)
        line = f"{kind} {RAW_BLOCK_BYTES} {RAW_DEPTH} {memory_bytes} {int(seconds * 1e9)}\n"
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:  # its last words say why
            answer = self._process.stdout.read()
        else:
            answer = self._process.stdout.readline()
        parts = answer.split()
        if len(parts) != 4 or not all(part.isdigit() for part in parts):
            raise SubjectFailed(f"the raw loop could not {kind}: {answer.strip() or 'it ended'}")
        written, read, wall_ns, cpu_ns = map(int, parts)
        return Moved(written, read, wall_ns / 1e9, cpu_ns / 1e9)

    def close(self) -> None:
        """Ends the program."""
        self._process.communicate()


class EngineSubject:
    """One of this library's engines."""

    def __init__(self, name: str, file: OpenFile, start: int, range_bytes: int) -> None:
        """Makes the engine. The range must be written already."""
        self._engine = choose(name)
        self.name = self._engine.name
        if self.name != name:
            self._engine.close()
            raise SubjectFailed(f"{name} falls back to {self.name} here")
        if not self._engine.is_direct:  # it opens the file again, and a track has to know which reads the page cache can answer
            file = replace(file, is_direct=False, memory_alignment=1)
        self._track = Track([file], self._engine, start=start, filled_bytes=range_bytes, make_memory=make_memory)

    def run(self, kind: Kind, block_bytes: int, seconds: float) -> Moved:
        """Moves transfers with `depth_of` of them under way."""
        depth, cpu_s = depth_of(block_bytes), time.process_time()
        if kind == "both":
            begin = time.perf_counter()
            write, read = self._track.run_both(block_bytes, depth, seconds)
            wall_s = time.perf_counter() - begin
            return Moved(write.done_bytes, read.done_bytes, wall_s, time.process_time() - cpu_s)
        done = self._track.run(kind, block_bytes, depth, seconds)
        cpu_s = time.process_time() - cpu_s
        written, read_bytes = (done.done_bytes, 0) if kind == "write" else (0, done.done_bytes)
        return Moved(written, read_bytes, done.seconds, cpu_s)

    def close(self) -> None:
        """Ends the engine's threads."""
        self._engine.close()


def make_memory(size_bytes: int) -> Memory:
    """As `random_memory`, as a track wants it."""
    return random_memory(size_bytes)


class LibrarySubject:
    """Another library: a function that starts a transfer, and one that waits for it."""

    def __init__(self, name: str, path: str, start: int, range_bytes: int) -> None:
        """Opens the file by a path that lives as long as this process has it open."""
        self.name = name
        self._stack = ExitStack()
        self._range = (start, range_bytes)
        self._memory: dict[tuple[str, int], Any] = {}
        try:
            self.calls = _LIBRARIES[name](path, self._stack)
            for kind in ("write", "read"):  # some say only at the first transfer what they lack
                self._way(kind, MIB, 0.0, start, range_bytes)
        except Exception as error:  # whatever another library raises is a reason to go on without it
            self._stack.close()
            raise SubjectFailed(f"{name} cannot be used here: {type(error).__name__}: {error}") from error

    def run(self, kind: Kind, block_bytes: int, seconds: float) -> Moved:
        """Moves transfers with `depth_of` of them under way, on one thread per way."""
        cpu_s, begin = time.process_time(), time.perf_counter()
        start, range_bytes = self._range
        if kind == "both":
            with ThreadPoolExecutor(2) as threads:
                write = threads.submit(self._way, "write", block_bytes, seconds, start, range_bytes // 2)
                read = threads.submit(self._way, "read", block_bytes, seconds, start + range_bytes // 2, range_bytes // 2)
                written_bytes, read_bytes = write.result(), read.result()
        else:
            done_bytes = self._way(kind, block_bytes, seconds, start, range_bytes)
            written_bytes, read_bytes = (done_bytes, 0) if kind == "write" else (0, done_bytes)
        return Moved(written_bytes, read_bytes, time.perf_counter() - begin, time.process_time() - cpu_s)

    def _way(self, kind: str, block_bytes: int, seconds: float, start: int, range_bytes: int) -> int:
        import torch

        depth, count, issued = depth_of(block_bytes), range_bytes // block_bytes, 0
        key = (kind, block_bytes)
        if key not in self._memory:
            self._memory[key] = [
                torch.frombuffer(random_memory(block_bytes), dtype=torch.uint8)[:block_bytes] for _ in range(depth)
            ]
        buffers, begin = self._memory[key], time.perf_counter()
        pending: list[Any] = []
        while issued < depth or time.perf_counter() - begin < seconds:
            if len(pending) == depth:
                self.calls.wait(kind, pending.pop(0), block_bytes)
            offset = start + issued % count * block_bytes
            pending.append(self.calls.start(kind, buffers[issued % depth], offset))
            issued += 1
        for one in pending:
            self.calls.wait(kind, one, block_bytes)
        return issued * block_bytes

    def close(self) -> None:
        """Closes the file."""
        self._memory.clear()
        self._stack.close()


class _Kvikio:
    """kvikio on host memory, direct where it can."""

    def __init__(self, path: str, stack: ExitStack) -> None:
        kvikio = importlib.import_module("kvikio")
        defaults = importlib.import_module("kvikio.defaults")
        settings = {"num_threads": 8, "task_size": 4 * MIB, "auto_direct_io_read": True, "auto_direct_io_write": True}
        stack.enter_context(defaults.set(settings))
        self._file = stack.enter_context(kvikio.CuFile(path, "r+"))

    def start(self, kind: str, buffer: Any, offset: int) -> Any:
        call = self._file.pwrite if kind == "write" else self._file.pread
        return call(buffer.numpy(), file_offset=offset)

    def wait(self, kind: str, pending: Any, size_bytes: int) -> None:
        done = pending.get()
        if done != size_bytes:
            raise SubjectFailed(f"kvikio: expected to {kind} {size_bytes} bytes, got {done}")


class _DeepNvme:
    """DeepSpeed's asynchronous I/O, one handle per way: its wait() waits for all that a handle has under way."""

    def __init__(self, path: str, stack: ExitStack) -> None:
        builder = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
        module = builder.load()
        self._path = path
        self._handles = {kind: module.aio_handle(MIB, 32, False, True, 2) for kind in ("write", "read")}
        self._under_way = {"write": 0, "read": 0}

    def start(self, kind: str, buffer: Any, offset: int) -> Any:
        handle = self._handles[kind]
        call = handle.async_pwrite if kind == "write" else handle.async_pread
        call(buffer, self._path, offset)
        self._under_way[kind] += 1
        return kind

    def wait(self, kind: str, pending: Any, size_bytes: int) -> None:
        if self._under_way[kind]:
            done = self._handles[kind].wait()
            if done != self._under_way[kind]:
                raise SubjectFailed(f"DeepNVMe: expected {self._under_way[kind]} transfers to {kind}, got {done}")
            self._under_way[kind] = 0


_LIBRARIES: dict[str, Any] = {"kvikio": _Kvikio, "deepnvme": _DeepNvme}


def fio_rate(path: str, kind: str, start: int, range_bytes: int, seconds: float) -> float:
    """Returns the bytes per second that fio moves, at the reference's size and depth.

    Raises:
        SubjectFailed: it is not installed, or failed.
    """
    program = shutil.which("fio")
    if program is None:
        raise SubjectFailed("fio is not installed")
    done = subprocess.run(
        [
            program,
            "--name=reference",
            f"--filename={path}",
            f"--rw={kind}",
            f"--bs={RAW_BLOCK_BYTES}",
            f"--iodepth={RAW_DEPTH}",
            "--ioengine=io_uring",
            "--direct=1",
            "--time_based",
            f"--runtime={int(seconds * 1000)}ms",
            f"--offset={start}",
            f"--size={range_bytes}",
            "--output-format=json",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SubjectFailed(f"fio failed: {(done.stderr or done.stdout).strip()[-500:]}")
    text = done.stdout
    return float(json.loads(text[text.index("{") :])["jobs"][0][kind]["bw_bytes"])


class Matmul:
    """Multiplies matrices on two threads, in the background of a `with` block.

    Attributes:
        per_s: products per second in the last block.
    """

    SIZE = 1024
    THREADS = 2

    def __init__(self) -> None:
        import torch

        self.per_s = 0.0
        self._torch = torch
        self._matrices = [torch.rand(self.SIZE, self.SIZE) for _ in range(3)]
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Matmul:
        self._stop.clear()
        begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(begun,), name="matmul")
        self._thread.start()
        begun.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, begun: threading.Event) -> None:
        self._torch.set_num_threads(self.THREADS)  # holds for this thread
        left, right, out = self._matrices
        self._torch.mm(left, right, out=out)
        begun.set()
        begin, count = time.perf_counter(), 0
        while not self._stop.is_set():
            self._torch.mm(left, right, out=out)
            count += 1
        self.per_s = count / (time.perf_counter() - begin)


def path_of(file: OpenFile) -> str:
    """Returns a path to an open file without a name, for this process and its children."""
    return f"/proc/{os.getpid()}/fd/{file.fd}"
