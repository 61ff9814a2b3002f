"""Gives mapped pages back to the system, again and again."""

from __future__ import annotations

import bisect
import mmap
import os
import sys
import threading
from typing import Protocol

from tieroff.storage.memory import advise, page_out


class PageReturner(Protocol):
    """A thread that gives the pages of a range back every so often."""

    def close(self) -> None:
        """Stops it and joins its thread."""


class MappedFiles:
    """What of this process's memory was mapped from files at one moment: a checkpoint that was loaded with `mmap=True`.

    Its pages stay resident, although they are not needed any more, for as long as any tensor of the checkpoint lives.

    Attributes:
        ranges: the first address of each mapping and that after it, in order.
    """

    def __init__(self) -> None:
        """Looks at the mappings; finds none where the system does not show them."""
        try:
            with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
                split = (line.split(maxsplit=5) for line in lines)
                ranges = [parts[0].split("-") for parts in split if parts[4] != "0"]  # the file's inode
        except OSError:
            ranges = []
        self.ranges = sorted((int(start, 16), int(stop, 16)) for start, stop in ranges)

    @classmethod
    def none(cls) -> MappedFiles:
        """Returns one without any mapping, for memory that comes from no file."""
        found = cls.__new__(cls)
        found.ranges = []
        return found

    def page_out(self, address: int, size_bytes: int) -> None:
        """Gives the pages of a range back to the system if they are a file's. Values stay, those written privately too."""
        index = bisect.bisect_right(self.ranges, (address, sys.maxsize)) - 1
        if index >= 0 and address + size_bytes <= self.ranges[index][1]:
            page_out(address, size_bytes)


def return_pages(address: int, size_bytes: int, interval_s: float) -> PageReturner:
    """Returns a thread that keeps a range of shared file mappings from staying resident.

    The values stay: what was written through a shared mapping is in the file's pages.

    Args:
        address, size_bytes: a range without private memory, which would be lost.
        interval_s: above 0.
    """
    try:
        from tieroff.storage.native import _native
    except ImportError:
        return _PythonPageReturner(address, size_bytes, interval_s)
    return _native.PageReturner(address, size_bytes, max(1, round(interval_s * 1e9)))


class _PythonPageReturner:
    """The same without the native module; it needs the interpreter's lock for a moment each round."""

    def __init__(self, address: int, size_bytes: int, interval_s: float) -> None:
        self._stopping = threading.Event()  # what the thread sleeps on, so that `close` ends the sleep
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=self._run, args=(address, size_bytes, interval_s), name="tieroff-pages", daemon=True
        )
        self._thread.start()

    def _run(self, address: int, size_bytes: int, interval_s: float) -> None:
        while not self._stopping.wait(interval_s):
            advise(address, size_bytes, mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Stops it and joins its thread."""
        if os.getpid() == self._pid:
            self._stopping.set()
            self._thread.join()
