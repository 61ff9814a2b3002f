"""Scratch memory inside one kernel on the CPU: no tensor shows it, but the kernel's own peak counter does."""

from __future__ import annotations

import ctypes
from pathlib import Path

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"


class PeakCounter:
    """Reads how far resident memory rose during a call above what it was before and after.

    What the heap has kept of memory freed earlier goes back to the system first: a call that is served from it would not
    show what it takes in another process, or once the heap has shrunk.

    Attributes:
        works: the system lets this process reset its peak (Linux, /proc/self/clear_refs).
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc
            libc.malloc_trim(0)
        self.works = self.reset()
        self._before_bytes = 0

    def start(self) -> None:
        """The call begins."""
        self.reset()
        self._before_bytes, _ = self._read()

    def stop(self) -> int:
        """The call is over; returns the bytes that it took for its own use and gave back."""
        after_bytes, peak_bytes = self._read()
        return max(peak_bytes - max(self._before_bytes, after_bytes), 0)

    def reset(self) -> bool:
        """Begins a new peak; returns False where the kernel cannot."""
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK)
        except OSError:
            return False
        return True

    def _read(self) -> tuple[int, int]:
        """Returns resident bytes now and their peak since the last reset."""
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if line.startswith("Vm"))
        resident, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
        return resident, peak
