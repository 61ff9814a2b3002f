"""Scratch memory inside one kernel: no tensor shows it, but a peak counter does.

On the CPU it is the operating system's, on an accelerator that of PyTorch's allocator.
"""

from __future__ import annotations

import ctypes
import inspect
import os
from collections.abc import Iterable
from typing import Any

import torch

_CLEAR_REFS = "/proc/self/clear_refs"
_STATUS = "/proc/self/status"
_STATUS_BYTES = 4096
_RESET_PEAK = b"5"
_LIFT_FRESH = torch.ops.aten.lift_fresh.default


def are_large(inputs: Iterable[tuple[torch.Tensor, bool]], from_bytes: int) -> bool:
    """Returns whether an op on these may take scratch that is worth a look at a counter."""
    return not from_bytes or any(tensor.numel() * tensor.element_size() >= from_bytes for tensor, _ in inputs)


def takes_new(func: Any) -> bool:
    """True for an op on memory that code which nobody watches has just made: `torch.tensor`, or gloo's copies."""
    if func is _LIFT_FRESH:
        return True
    if func.namespace != "aten":
        return False  # the collective itself, on tensors of others
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d":
            return True
        frame = frame.f_back
    return False


def peak_counter(device: torch.device) -> PeakCounter | AllocatorPeak | None:
    """Returns a counter for a device; None where there is none."""
    counter = PeakCounter() if device.type == "cpu" else AllocatorPeak(device)
    return counter if counter.works else None


class AllocatorPeak:
    """Reads how far memory in use of an accelerator's allocator rose during a call above what it was before and after.

    It begins a new `torch.accelerator.max_memory_allocated` for every call. What a library takes past the allocator does not
    show: the device's free memory is what is left of that when the budget is made.

    Attributes:
        works: PyTorch counts this device's memory.
        from_bytes: scratch is looked for where an op is given a tensor as large.
    """

    from_bytes = 0  # a look takes about 0.03 ms, and an allocator counts every byte

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before_bytes = 0
        try:
            self.start()
        except (RuntimeError, AttributeError, KeyError, NotImplementedError):
            # Not for this device, or a torch before it was counted.
            self.works = False
        else:
            self.works = True

    def start(self) -> None:
        """The call begins."""
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._before_bytes, _ = self._read()

    @property
    def taken_bytes(self) -> int:
        """What is in use now."""
        return self._read()[0]

    def stop(self, came_bytes: int = 0, went_bytes: int = 0) -> int:
        """The call is over; returns the bytes that it took for its own use and gave back.

        Args:
            came_bytes, went_bytes: of what others brought and freed meanwhile, which they count themselves.
        """
        after_bytes, peak_bytes = self._read()
        return max(peak_bytes - max(self._before_bytes + came_bytes, after_bytes + went_bytes), 0)

    def _read(self) -> tuple[int, int]:
        """Returns the bytes in use now and their peak."""
        # As `torch.accelerator.memory_allocated`, which flattens and sorts all figures, once for each of the two: 0.6 ms.
        stats = torch._C._accelerator_getDeviceStats(self._device.index)
        found = stats["allocated_bytes"]["all"]
        return int(found["current"]), int(found["peak"])


class PeakCounter:
    """Reads how far resident memory rose during a call above what it was before and after.

    What the heap has kept of memory freed earlier goes back to the system first: a call that is served from it would not
    show what it takes in another process, or once the heap has shrunk.

    Attributes:
        works: the system lets this process reset its peak (Linux, /proc/self/clear_refs).
        from_bytes: scratch is looked for where an op is given a tensor as large.
    """

    from_bytes = 1 << 20  # a look takes about 0.1 ms, and what is less than some pages does not show

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

    def stop(self, came_bytes: int = 0, went_bytes: int = 0) -> int:
        """The same as of `AllocatorPeak`."""
        after_bytes, peak_bytes = self._read()
        return max(peak_bytes - max(self._before_bytes + came_bytes, after_bytes + went_bytes), 0)

    def reset(self) -> bool:
        """Begins a new peak; returns False where the kernel cannot."""
        try:
            fd = os.open(_CLEAR_REFS, os.O_WRONLY)
        except OSError:
            return False
        try:
            os.write(fd, _RESET_PEAK)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def _read(self) -> tuple[int, int]:
        """Returns resident bytes now and their peak since the last reset."""
        fd = os.open(_STATUS, os.O_RDONLY)  # file objects and decoding take longer than the kernel
        try:
            status = os.read(fd, _STATUS_BYTES)
        finally:
            os.close(fd)
        return _field(status, b"VmRSS:"), _field(status, b"VmHWM:")


def _field(status: bytes, name: bytes) -> int:
    start = status.index(name) + len(name)
    return int(status[start : status.index(b"kB", start)]) * 1024
