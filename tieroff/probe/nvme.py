"""Bandwidth of folders, through the same store and engine that a run uses."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tieroff.storage.buffers import Buffer, allocate
from tieroff.storage.engines import choose
from tieroff.storage.file_store import FileStore
from tieroff.storage.store import Block, Completion

BLOCK_BYTES = 2 * 2**20
BLOCK_COUNT = 64
CAPACITY_BYTES = BLOCK_BYTES * (BLOCK_COUNT + 1)  # one more for small transfers
DEPTH = 4
LATENCY_BYTES = 4096
LATENCY_TRANSFERS = 8
TIMEOUT_S = 60.0

Kind = Literal["write", "read"]


@dataclass(frozen=True, slots=True)
class NvmeRates:
    """What one engine moves to and from folders.

    Attributes:
        engine: the engine's name.
        is_direct: transfers go past the page cache; False means that reads may have come from memory.
        write_bytes_per_s, read_bytes_per_s: bandwidth each way alone.
        both_write_bytes_per_s, both_read_bytes_per_s: bandwidth of each way with both at once.
        write_latency_s, read_latency_s: median seconds of one small transfer.
    """

    engine: str
    is_direct: bool
    write_bytes_per_s: int
    read_bytes_per_s: int
    both_write_bytes_per_s: int
    both_read_bytes_per_s: int
    write_latency_s: float
    read_latency_s: float


def measure_dirs(dirs: Sequence[Path], engine: str, seconds: float) -> NvmeRates:
    """Returns the rates of a store that is striped over folders.

    Every block is written once before anything is timed, since first writes to fresh extents are slower.

    Args:
        dirs: existing folders.
        engine: name of an I/O engine, or "auto".
        seconds: time to spend, roughly.

    Raises:
        ConfigError: the engine is not to be had, or a folder is missing, read-only or too small.
        StoreError: a transfer failed.
    """
    with _opened(dirs, engine) as store:
        blocks = _Blocks(store)
        blocks.fill(0.3 * seconds)
        write, read = blocks.stream("write", 0.2 * seconds), blocks.stream("read", 0.2 * seconds)
        both_write, both_read = blocks.stream_both(0.3 * seconds)
        rates = NvmeRates(
            engine=store.engine.name,
            is_direct=store.is_direct,
            write_bytes_per_s=write,
            read_bytes_per_s=read,
            both_write_bytes_per_s=both_write,
            both_read_bytes_per_s=both_read,
            write_latency_s=blocks.latency_s("write"),
            read_latency_s=blocks.latency_s("read"),
        )
        blocks.free()
        return rates


@contextmanager
def _opened(dirs: Sequence[Path], engine: str) -> Iterator[FileStore]:
    """Gives a store of the size that is measured, and leaves nothing of it behind."""
    chosen = choose(engine)
    try:
        store = FileStore(dirs=[str(folder) for folder in dirs], capacity_bytes=CAPACITY_BYTES, engine=chosen)
        try:
            yield store
        finally:
            store.close()
    finally:
        chosen.close()


class _Blocks:
    """Blocks of a store and the buffers that fill them."""

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self._blocks: list[Block] = [store.allocate(BLOCK_BYTES) for _ in range(BLOCK_COUNT)]
        self._buffers: dict[Kind, list[Buffer]] = {
            "write": [allocate(BLOCK_BYTES) for _ in range(DEPTH)],
            "read": [allocate(BLOCK_BYTES) for _ in range(DEPTH)],
        }

    def fill(self, seconds: float) -> None:
        """Writes blocks once, in order, until the time is over, and drops the rest; at least two per transfer."""
        stop = time.perf_counter() + seconds
        filled = 0
        while filled < len(self._blocks) and (filled < 2 * DEPTH or time.perf_counter() < stop):
            pending = [self._issue("write", filled + lane, lane) for lane in range(DEPTH)]
            for completion in pending:
                completion.wait(TIMEOUT_S)
            filled += DEPTH
        for block in self._blocks[filled:]:
            self._store.free(block)
        del self._blocks[filled:]

    def free(self) -> None:
        """Gives all blocks back."""
        while self._blocks:
            self._store.free(self._blocks.pop())

    def stream(self, kind: Kind, seconds: float, half: int = 0, halves: int = 1) -> int:
        """Returns bytes per second with `DEPTH` transfers in flight, over one half of the blocks or all of them."""
        span = len(self._blocks) // halves
        pending: deque[tuple[int, Completion]] = deque()
        issued = itertools.count()
        done_bytes = 0

        def issue(lane: int) -> None:
            pending.append((lane, self._issue(kind, half * span + next(issued) % span, lane)))

        start = time.perf_counter()
        for lane in range(DEPTH):
            issue(lane)
        while pending:
            lane, completion = pending.popleft()
            completion.wait(TIMEOUT_S)
            done_bytes += BLOCK_BYTES
            if time.perf_counter() - start < seconds:
                issue(lane)
        return int(done_bytes / (time.perf_counter() - start))

    def stream_both(self, seconds: float) -> tuple[int, int]:
        """Returns bytes per second written and read at once, on blocks that are not shared."""
        with ThreadPoolExecutor(2, "tieroff-probe") as threads:
            write = threads.submit(self.stream, "write", seconds, 0, 2)
            read = threads.submit(self.stream, "read", seconds, 1, 2)
            return write.result(), read.result()

    def latency_s(self, kind: Kind) -> float:
        """Returns the median seconds of one small transfer that has the store to itself."""
        block = self._store.allocate(LATENCY_BYTES)
        buffer = self._buffers[kind][0]
        self._store.write(block, buffer.address, buffer).wait(TIMEOUT_S)
        transfer = self._store.write if kind == "write" else self._store.read
        times = []
        for _ in range(LATENCY_TRANSFERS):
            start = time.perf_counter()
            transfer(block, buffer.address, buffer).wait(TIMEOUT_S)
            times.append(time.perf_counter() - start)
        self._store.free(block)
        return statistics.median(times)

    def _issue(self, kind: Kind, block: int, lane: int) -> Completion:
        buffer = self._buffers[kind][lane]
        transfer = self._store.write if kind == "write" else self._store.read
        return transfer(self._blocks[block], buffer.address, buffer)
