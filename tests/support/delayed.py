"""A backend whose copies are late: the check of ordering where there is no GPU."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from tieroff.runtime.backend.cpu import CpuBackend
from tieroff.runtime.backend.place import Place
from tieroff.storage.completion import Completion


class LateCopy:
    """A copy that starts only when it is waited for, or after a random number of looks."""

    def __init__(self, start: Callable[[], Completion], looks: int) -> None:
        self._start: Callable[[], Completion] | None = start
        self._looks = looks
        self._inner: Completion | None = None

    def _begin(self) -> Completion:
        if self._inner is None:
            assert self._start is not None
            self._inner, self._start = self._start(), None  # lets go of source and target, as a real copy does
        return self._inner

    @property
    def start_ns(self) -> int:
        return self._inner.start_ns if self._inner is not None else 0

    @property
    def stop_ns(self) -> int:
        return self._inner.stop_ns if self._inner is not None else 0

    def done(self) -> bool:
        self._looks -= 1
        return self._looks <= 0 and self._begin().done()

    def wait(self, timeout_s: float | None = None) -> None:
        self._begin().wait(timeout_s)


class DelayedBackend(CpuBackend):
    """A CpuBackend whose copies start late, by a seed, and whose targets hold NaN until they arrive.

    A reader that does not wait for its copy, or a source that is freed or overwritten before its copy was awaited,
    gives wrong numbers here every time instead of once in a thousand runs.
    """

    name = "delayed"

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def empty(self, size_bytes: int) -> torch.Tensor:
        return super().empty(size_bytes).fill_(0xFF)

    def copy_out(self, source: torch.Tensor, place: Place) -> Completion:
        return LateCopy(lambda: CpuBackend.copy_out(self, source, place), self._random.randrange(1, 6))

    def copy_in(self, place: Place, target: torch.Tensor) -> Completion:
        target.fill_(0xFF)
        return LateCopy(lambda: CpuBackend.copy_in(self, place, target), self._random.randrange(1, 6))
