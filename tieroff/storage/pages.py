"""Gives mapped pages back to the system, again and again."""

from __future__ import annotations

import mmap
import os
import threading
from typing import Protocol

from tieroff.storage.memory import advise


class PageReturner(Protocol):
    """A thread that gives the pages of a range back every so often."""

    def close(self) -> None:
        """Stops it and joins its thread."""


def return_pages(address: int, size_bytes: int, interval_s: float) -> PageReturner:
    """Returns a thread that keeps a range of shared file mappings from staying resident.

    The values stay: what was written through a shared mapping is in the file's pages.

    Args:
        address, size_bytes: a range without private memory, which would be lost.
        interval_s: above 0.
    """
    try:
        from tieroff import _native
    except ImportError:
        return _PythonPageReturner(address, size_bytes, interval_s)
    return _native.PageReturner(address, size_bytes, max(1, round(interval_s * 1e9)))


class _PythonPageReturner:
    """The same without the native module; it needs the interpreter's lock for a moment each round."""

    def __init__(self, address: int, size_bytes: int, interval_s: float) -> None:
        self._stopping = threading.Event()
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
