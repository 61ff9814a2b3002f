"""What the program has on an accelerator apart from the step that is recorded: nobody moves it, and no op uses it.

[Note: apart]
Copies of the weights that a moving average keeps, data that lies there, a model that is used between steps. No op of the step
shows it, so it is what the allocator has lent, less what the step knows and what belongs to other engines. The step
does not know everything at once: what is there only as it begins, or only as it ends, is not there all the time. On the CPU an
allocator says nothing, and the budget pays for what the process takes (`runtime/process_memory.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from tieroff.core.buckets import BYTES_APART
from tieroff.core.tensor import allocated_bytes
from tieroff.tracing.recording.life import Life
from tieroff.tracing.recording.scratch import AllocatorPeak


class Apart:
    """Measures it.

    Args:
        device: where the step is recorded.
        elsewhere: returns what other engines have there; None: nobody asks.
    """

    def __init__(self, device: torch.device, elsewhere: Callable[[], int] | None = None) -> None:
        counter = AllocatorPeak(device) if elsewhere is not None and device.type != "cpu" else None
        self._counter = counter if counter is not None and counter.works else None
        self._device_type, self._elsewhere = device.type, elsewhere
        self._first_bytes = 0

    def begin(self) -> None:
        """The step begins."""
        self._first_bytes = self._beside(())

    def end(self, lives: Sequence[Life]) -> Mapping[str, str]:
        """The step ends; returns what its trace's `meta` says of it.

        Args:
            lives: of all storages that the step knows.
        """
        here = [life for life in lives if not life.is_below]
        first_bytes = self._first_bytes - self._size_of(life for life in here if life.birth == 0)
        apart_bytes = min(first_bytes, self._beside(life for life in here if life.death < 0))
        return {BYTES_APART: str(apart_bytes)} if apart_bytes > 0 else {}

    def _beside(self, known: Iterable[Life]) -> int:
        """Returns what is lent now, and neither another engine's nor one of these."""
        if self._counter is None or self._elsewhere is None:
            return 0
        return self._counter.taken_bytes - self._elsewhere() - self._size_of(known)

    def _size_of(self, known: Iterable[Life]) -> int:
        return sum(allocated_bytes(life.size_bytes, self._device_type) for life in known)
