"""What checksums cost: the time that an engine spends on one, on a file in memory."""

from __future__ import annotations

import os
import statistics
import time

from tieroff.storage.buffers import allocate
from tieroff.storage.engines import OpenFile, choose

SIZE_BYTES = 2**20  # one chunk, so that one thread does all of it
BLOCK_BYTES = 4096
PAIRS_MIN = 16


def measure_checksum(seconds: float) -> int:
    """Returns the bytes per second that one core makes a checksum of; 0 where it costs nothing measurable.

    It is that of the engine which `auto` takes; the native engines share one. Taken is the difference between writing with
    a checksum and without, in turn, to a file that lies in memory: no drive's noise is in it.

    Raises:
        OSError: the system has no files in memory.
    """
    source = allocate(SIZE_BYTES)
    fd = os.memfd_create("tieroff-probe", os.MFD_CLOEXEC)
    engine = choose()
    try:
        os.ftruncate(fd, SIZE_BYTES)
        file = OpenFile(fd, "memory", is_direct=False, block_bytes=BLOCK_BYTES, memory_alignment=1)

        def seconds_of(*, with_checksum: bool) -> float:
            begin = time.perf_counter()
            engine.write(file, 0, source.address, SIZE_BYTES, with_checksum=with_checksum).wait()
            return time.perf_counter() - begin

        seconds_of(with_checksum=True)  # gives the file its pages
        differences: list[float] = []
        stop = time.perf_counter() + seconds
        while len(differences) < PAIRS_MIN or time.perf_counter() < stop:
            differences.append(seconds_of(with_checksum=True) - seconds_of(with_checksum=False))
    finally:
        engine.close()
        os.close(fd)
    cost_s = statistics.median(differences)
    return int(SIZE_BYTES / cost_s) if cost_s > 0 else 0
