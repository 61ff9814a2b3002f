"""Bandwidth of folders: transfers of one engine, timed in slices, on files that have no name."""

from __future__ import annotations

import ctypes
import errno
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from tieroff.errors import StoreError
from tieroff.storage.buffers import allocate
from tieroff.storage.engines import Engine, OpenFile, Transfer, choose
from tieroff.storage.nvme import files
from tieroff.units import format_bytes

MIB = 2**20
QUICK_BLOCK_BYTES = 2 * MIB
QUICK_DEPTH = 4
QUICK_FILE_BYTES = 128 * MIB
QUICK_FILLED_BYTES_MIN = 16 * MIB
FREE_BYTES_MIN = 64 * MIB
"""What a folder must have free beyond the file that is measured."""

LATENCY_BYTES = 4096
LATENCY_TRANSFERS = 8
TIMEOUT_S = 60.0

Kind = Literal["write", "read"]


class Memory(Protocol):
    """Memory that transfers use."""

    @property
    def address(self) -> int:
        """Its first byte."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What was moved in a stretch of time."""

    done_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """The rate."""
        return self.done_bytes / self.seconds


@dataclass(frozen=True, slots=True)
class NvmeRates:
    """What one engine moves to and from folders.

    Attributes:
        engine: the engine's name.
        is_direct: transfers go past the page cache; False means that bytes also lie in memory.
        write_bytes_per_s, read_bytes_per_s: bandwidth each way alone.
        both_write_bytes_per_s, both_read_bytes_per_s: bandwidth of each way with both at once.
        write_latency_s, read_latency_s: median seconds of one small transfer.
        block_bytes, depth: size of the transfers that were measured, and how many were under way at once.
    """

    engine: str
    is_direct: bool
    write_bytes_per_s: int
    read_bytes_per_s: int
    both_write_bytes_per_s: int
    both_read_bytes_per_s: int
    write_latency_s: float
    read_latency_s: float
    block_bytes: int
    depth: int


def touched_memory(size_bytes: int) -> Memory:
    """Returns memory with populated pages, so that no transfer waits for them."""
    buffer = allocate(size_bytes)
    ctypes.memset(buffer.address, 1, buffer.size_bytes)
    return buffer


class Track:
    """One engine on ranges of its own in some files, which are used in turn.

    Attributes:
        engine: moves the bytes; the caller's, like the files.
        is_direct: every file is open with O_DIRECT.
        filled_bytes: bytes at the start of each file's range that were written; slices stay within them.
        moved_bytes: bytes moved so far, each way.
    """

    def __init__(
        self,
        opened: Sequence[OpenFile],
        engine: Engine,
        *,
        start: int = 0,
        filled_bytes: int = 0,
        make_memory: Callable[[int], Memory] = touched_memory,
    ) -> None:
        """Takes files as they are.

        Args:
            opened: at least one file, with room from `start` on.
            engine: an open engine.
            start: first byte of the range, in every file.
            filled_bytes: bytes from there on that were written before; see fill().
            make_memory: returns memory of a size, for transfers.
        """
        self.engine = engine
        self.is_direct = all(file.is_direct for file in opened)
        self.filled_bytes = filled_bytes
        self.moved_bytes: dict[Kind, int] = {"write": 0, "read": 0}
        self.files = list(opened)
        self._start = start
        self._make_memory = make_memory
        self._memory: dict[Kind, tuple[int, Memory]] = {}

    def fill(self, range_bytes: int, seconds: float, bytes_min: int) -> Slice:
        """Writes the ranges once, in order, until the time is over: first writes to fresh extents are slower.

        Args:
            range_bytes: of each file; there must be room for it.
            seconds: time to spend, roughly.
            bytes_min: of each file, written whatever the time.

        Returns:
            What was written.

        Raises:
            StoreError: a transfer failed.
        """
        begin = time.perf_counter()
        self.filled_bytes = QUICK_DEPTH * QUICK_BLOCK_BYTES
        written = 0
        while True:
            self.run("write", QUICK_BLOCK_BYTES, QUICK_DEPTH * len(self.files), 0.0, fresh_from=written)
            written += QUICK_DEPTH * QUICK_BLOCK_BYTES
            spent = time.perf_counter() - begin
            if written + QUICK_DEPTH * QUICK_BLOCK_BYTES > range_bytes or (spent >= seconds and written >= bytes_min):
                break
        self.filled_bytes = written
        return Slice(written * len(self.files), spent)

    def run(
        self, kind: Kind, block_bytes: int, depth: int, seconds: float, *, half: int | None = None, fresh_from: int = 0
    ) -> Slice:
        """Returns what was moved with `depth` transfers in flight, round and round over the filled blocks.

        Buffered files are read once at most, after their pages were dropped: the second time they lie in memory.

        Args:
            kind: which way.
            block_bytes: bytes of a transfer; a multiple of the files' blocks.
            depth: transfers under way at once, cut to the blocks that are there.
            seconds: time to spend; every transfer under way is then waited for, and counted.
            half: 0 or 1 to stay within that half of the blocks.
            fresh_from: first byte of the range to use, for fill().

        Raises:
            StoreError: a transfer failed, or has not ended in `TIMEOUT_S`.
        """
        blocks = self.filled_bytes // block_bytes * len(self.files)
        first, count = (0, blocks) if half is None else (half * (blocks // 2), blocks // 2)
        if count < 1:
            raise ValueError(f"expected a block of {block_bytes} bytes in {self.filled_bytes} filled ones, got none")
        depth = min(depth, count)
        limit: float = count if kind == "read" and not self.is_direct else float("inf")
        if limit < float("inf"):
            self.drop_pages()
        base = self._addresses(kind, block_bytes * depth)
        pending: deque[tuple[int, Transfer]] = deque()
        issued = 0

        def issue(lane: int) -> None:
            nonlocal issued
            file_index, row = (first + issued % count) % len(self.files), (first + issued % count) // len(self.files)
            offset = self._start + fresh_from + row * block_bytes
            pending.append((lane, self._submit(kind, file_index, offset, base + lane * block_bytes, block_bytes)))
            issued += 1

        begin = time.perf_counter()
        for lane in range(depth):
            issue(lane)
        while pending:
            lane, transfer = pending.popleft()
            self._end(transfer, kind, block_bytes)
            if issued < limit and time.perf_counter() - begin < seconds:
                issue(lane)
        done_bytes = issued * block_bytes
        self.moved_bytes[kind] += done_bytes
        return Slice(done_bytes, time.perf_counter() - begin)

    def run_both(self, block_bytes: int, depth: int, seconds: float) -> tuple[Slice, Slice]:
        """Returns what was written and what was read at once, on blocks that are not shared."""
        with ThreadPoolExecutor(2, "tieroff-probe") as threads:
            write = threads.submit(self.run, "write", block_bytes, depth, seconds, half=0)
            read = threads.submit(self.run, "read", block_bytes, depth, seconds, half=1)
            return write.result(), read.result()

    def latency_s(self, kind: Kind) -> float:
        """Returns the median seconds of one small transfer that has the engine to itself."""
        address = self._addresses(kind, LATENCY_BYTES)
        size_bytes = max(LATENCY_BYTES, *(file.block_bytes for file in self.files))
        times = []
        for index in range(LATENCY_TRANSFERS):
            begin = time.perf_counter()
            self._end(self._submit(kind, 0, self._start + index * size_bytes, address, LATENCY_BYTES), kind, LATENCY_BYTES)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def rates(self, block_bytes: int, depth: int, write: float, read: float, both: tuple[float, float]) -> NvmeRates:
        """Returns these rates with what else is known of the track; measures latencies."""
        return NvmeRates(
            self.engine.name,
            self.is_direct,
            int(write),
            int(read),
            int(both[0]),
            int(both[1]),
            self.latency_s("write"),
            self.latency_s("read"),
            block_bytes,
            depth,
        )

    def _addresses(self, kind: Kind, size_bytes: int) -> int:
        held = self._memory.get(kind)
        if held is None or held[0] < size_bytes:
            held = self._memory[kind] = (size_bytes, self._make_memory(size_bytes))
        return held[1].address

    def _submit(self, kind: Kind, file_index: int, offset: int, address: int, size_bytes: int) -> Transfer:
        file = self.files[file_index]
        if kind == "write":
            return self.engine.write(file, offset, address, size_bytes, with_checksum=False)
        return self.engine.read(file, offset, address, size_bytes, with_checksum=False, is_mapped=False)

    def _end(self, transfer: Transfer, kind: Kind, size_bytes: int) -> None:
        is_ended = transfer.wait(TIMEOUT_S)
        number = transfer.errno if is_ended else errno.ETIMEDOUT
        if number == 0 and transfer.done_bytes == size_bytes:
            return
        where = ", ".join(file.path for file in self.files)
        raise StoreError(
            f"measuring {self.engine.name}: {kind} of {size_bytes} bytes in {where}: {transfer.done_bytes} bytes done: "
            f"{os.strerror(number)}; see the system's log for this drive",
            path=where,
            size_bytes=size_bytes,
            done_bytes=transfer.done_bytes,
            errno=number,
        )

    def drop_pages(self) -> None:
        """Drops what was written from the page cache, so that reads come from the drive."""
        for file in self.files:
            os.posix_fadvise(file.fd, self._start, self.filled_bytes, os.POSIX_FADV_DONTNEED)


@contextmanager
def open_track(
    dirs: Sequence[Path], engine: str, file_bytes: int, make_memory: Callable[[int], Memory] = touched_memory
) -> Iterator[Track]:
    """Yields a track on new files of a size, one per folder, which leave nothing behind.

    Raises:
        ConfigError: the engine is not available, or a folder is missing, read-only or too small.
        StoreError: a file could not be made.
    """
    with ExitStack() as stack:
        chosen = choose(engine)
        stack.callback(chosen.close)  # idempotent; here for when a file cannot be made
        opened = [stack.enter_context(_opened(folder, file_bytes, is_direct=chosen.is_direct)) for folder in dirs]
        stack.callback(chosen.close)  # before the files are closed: it ends the transfers in flight
        track = Track(opened, chosen, make_memory=make_memory)  # held here: its memory outlives the transfers
        yield track


@contextmanager
def _opened(folder: Path, size_bytes: int, *, is_direct: bool) -> Iterator[OpenFile]:
    directory = files.open_directory(str(folder), free_bytes_min=size_bytes + FREE_BYTES_MIN)
    try:
        file = files.open_nameless(str(folder), directory, is_direct=is_direct)
    finally:
        os.close(directory)
    try:
        _preallocate(file, size_bytes)
        yield file
    finally:
        os.close(file.fd)


def _preallocate(file: OpenFile, size_bytes: int) -> None:
    try:
        files.preallocate(file, 0, size_bytes)
    except OSError as error:
        raise StoreError(
            f"cannot make a file of {format_bytes(size_bytes)} in {file.path}: {error.strerror}; free some space there, or "
            "name another folder",
            path=file.path,
            size_bytes=size_bytes,
            errno=error.errno,
        ) from error


def measure_dirs(dirs: Sequence[Path], engine: str, seconds: float) -> NvmeRates:
    """Returns the rates of folders that are used in turn: one size of transfers, quickly, as at the start of a run.

    Args:
        dirs: existing folders.
        engine: name of an I/O engine, or "auto".
        seconds: time to spend, roughly.

    Raises:
        ConfigError: the engine is not available, or a folder is missing, read-only or too small.
        StoreError: a transfer failed.
    """
    block, depth = QUICK_BLOCK_BYTES, QUICK_DEPTH
    with open_track(dirs, engine, QUICK_FILE_BYTES) as track:
        track.fill(QUICK_FILE_BYTES, 0.3 * seconds, QUICK_FILLED_BYTES_MIN)
        write = track.run("write", block, depth, 0.2 * seconds).bytes_per_s
        read = track.run("read", block, depth, 0.2 * seconds).bytes_per_s
        both = tuple(part.bytes_per_s for part in track.run_both(block, depth, 0.3 * seconds))
        return track.rates(block, depth, write, read, (both[0], both[1]))
