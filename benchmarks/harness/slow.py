"""A backend behind a slow link, so that a small model waits as a large one would."""

from __future__ import annotations

import threading
import time

from torch import Tensor

from tieroff.runtime.backend.cpu import CpuBackend
from tieroff.runtime.backend.place import Place
from tieroff.storage.completion import Completion
from tieroff.units import NS_PER_S


class _Due:
    """A copy that ends no sooner than a slow link would end it."""

    def __init__(self, inner: Completion, due_ns: int) -> None:
        self._inner, self._due_ns = inner, due_ns

    @property
    def start_ns(self) -> int:
        return self._inner.start_ns

    @property
    def stop_ns(self) -> int:
        return max(self._inner.stop_ns, self._due_ns) if self._inner.stop_ns else 0

    def done(self) -> bool:
        return time.monotonic_ns() >= self._due_ns and self._inner.done()

    def wait(self, timeout_s: float | None = None) -> None:
        time.sleep(max(self._due_ns - time.monotonic_ns(), 0) / NS_PER_S)
        self._inner.wait(timeout_s)


class SlowBackend(CpuBackend):
    """A CpuBackend behind two links, one each way, that move one copy after another at a given rate."""

    name = "slow"

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self._bytes_per_s = bytes_per_s
        self._free_ns = {"out": 0, "in": 0}
        self._lock = threading.Lock()

    def _due(self, inner: Completion, link: str, size_bytes: int) -> Completion:
        with self._lock:
            begin_ns = max(self._free_ns[link], time.monotonic_ns())
            self._free_ns[link] = begin_ns + int(size_bytes / self._bytes_per_s * NS_PER_S)
            return _Due(inner, self._free_ns[link])

    def copy_out(self, source: Tensor, place: Place) -> Completion:
        return self._due(super().copy_out(source, place), "out", source.numel())

    def copy_in(self, place: Place, target: Tensor) -> Completion:
        return self._due(super().copy_in(place, target), "in", target.numel())
