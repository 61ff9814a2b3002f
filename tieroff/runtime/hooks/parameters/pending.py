"""A collective under way that says when it is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed


class Pending(distributed.Work):
    """Stands for a collective where FSDP2 waits for it.

    Args:
        work: the collective.
        await_it: called, instead of the first wait, with a function that waits.

    Attributes:
        over_ns: when it was first seen to be over, by the host's monotonic clock; 0: not yet.
    """

    def __init__(self, work: Any, await_it: Callable[[Callable[[], bool]], bool]) -> None:
        super().__init__()
        self._work = work
        self.over_ns = 0
        self._await: Callable[[Callable[[], bool]], bool] | None = await_it

    def look(self) -> bool:
        """Notes when it is over; True if it is."""
        if not self.over_ns and self._work.is_completed():
            self.over_ns = time.monotonic_ns()
        return self.over_ns > 0

    def wait(self, *args: timedelta) -> bool:
        """Returns when it is over; see `torch.distributed.Work.wait`."""
        wait, self._await = self._await, None
        on_work = partial(self._work.wait, *args)
        return wait(on_work) if wait is not None else bool(on_work())

    def is_completed(self) -> bool:
        """Returns whether it is over."""
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Returns whether it is over and did not fail."""
        return bool(self._work.is_success())

    def exception(self) -> Any:
        """Returns what it failed with."""
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        """Returns what it gave."""
        tensors: list[torch.Tensor] = self._work.result()
        return tensors

    def get_future(self) -> Any:
        """Returns a future of what it gives."""
        return self._work.get_future()
