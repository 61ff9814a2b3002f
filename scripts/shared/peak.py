"""Peak memory of this process, measured from outside the library."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
import torch._dynamo  # 75 MB that torch.optim loads on first use: an import, and no part of a training run's memory


class PeakMemory:
    """The most memory in use between its making and a later moment.

    On CUDA it is the allocator's most allocated bytes. On the CPU it is the peak resident set (VmHWM, reset when this
    is made) above the resident set (VmRSS) at that moment: make it after the imports and before the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base_bytes = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        with suppress(OSError):  # where it cannot be reset, the peak of the imports counts too
            Path("/proc/self/clear_refs").write_text("5")  # 5: the peak becomes the present resident set
        self._base_bytes = _status_bytes("VmRSS")

    def peak_bytes(self) -> int:
        """Returns the peak so far, in bytes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _status_bytes("VmHWM") - self._base_bytes


def _status_bytes(key: str) -> int:
    """Returns a memory line of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}; peak memory on the CPU is measured on Linux only")
