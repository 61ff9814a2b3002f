"""Resident memory of this process, and what of it loading this library has taken."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Returns the resident set of this process, by Linux."""
    return int(_STATM.read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


class Loading:
    """Counts what the library's own modules take where a call of the program loads them.

    That is after the program has loaded its own, and before anybody wraps a model: growth that belongs to training within a
    budget, of which no measurement from `wrap` on would know.
    """

    def __init__(self) -> None:
        self._taken_bytes = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Inside, modules are loaded. Where they bring PyTorch along, which a program loads anyway, nothing is counted."""
        if "torch" not in sys.modules or not sys.platform.startswith("linux"):
            yield
            return
        before = resident_bytes()
        yield
        self._taken_bytes += max(resident_bytes() - before, 0)

    def take(self) -> int:
        """Returns the bytes that were counted since the last call: one budget of the process pays for them."""
        taken_bytes, self._taken_bytes = self._taken_bytes, 0
        return taken_bytes


LOADING = Loading()
