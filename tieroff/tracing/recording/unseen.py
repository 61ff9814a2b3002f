"""Code that runs in a recorded step and whose tensors are not seen one by one: what `torch.compile` made.

[Note: born where it was made]
A storage that is first seen as an input was as a rule there before the step. One that is first seen while such code runs, or
that it returned, was made by it. A compiled forward has made all that it returns before autograd saves the first of it, and
each tensor saved is an event: what it made is born where the call began, not behind those events. A compiled backward asks for
what was saved before it makes anything.

What the code takes and gives back shows in a peak counter alone. What is known by itself counts by itself over the whole op, so
what came and what went meanwhile is no scratch: a saved tensor that is fetched for a compiled backward, and freed by it.
"""

from __future__ import annotations

from tieroff.tracing.recording.life import Life
from tieroff.tracing.recording.scratch import AllocatorPeak, PeakCounter


class Unseen:
    """Whether such code runs, since when, and how much memory it takes.

    Attributes:
        is_running: it does.
        makes_first: events inside tell of what it has made already.
        since: instant and op of its begin, or, where it does not make first, of the last event inside.
    """

    def __init__(self, counter: PeakCounter | AllocatorPeak | None) -> None:
        self._counter = counter
        self.is_running = self.makes_first = False
        self.since = (0, 0)
        self._came_bytes = self._went_bytes = 0

    def begin(self, now: int, op: int, *, makes_first: bool) -> None:
        """The code begins."""
        self.is_running, self.makes_first, self.since = True, makes_first, (now, max(op, 0))
        self._measure()

    def pass_event(self, now: int, op: int) -> None:
        """The code, which has ended for an event, goes on behind it."""
        self.begin(*((now, op) if not self.makes_first else self.since), makes_first=self.makes_first)

    def _measure(self) -> None:
        self._came_bytes = self._went_bytes = 0
        if self._counter is not None:
            self._counter.start()

    def birth_at(self, now: int, op: int) -> tuple[int, int]:
        """Returns instant and op of the birth of a storage that is first seen now, and that no op was seen to make."""
        if not self.is_running:
            return 0, 0
        # What the code had besides until now is known from its peak: what it returns is as new as it can be.
        return self.since if self.makes_first or self._counter is None else (now, max(op, 0))

    def came(self, life: Life) -> None:
        """The engine has brought a known tensor up."""
        self._came_bytes += life.size_bytes

    def went(self, life: Life) -> None:
        """A storage is freed."""
        if self.is_running and life.keys and not life.is_below:
            self._went_bytes += life.size_bytes

    def end(self) -> int | None:
        """The code has ended; returns the bytes that it took for its own use and gave back, None where nothing counts them."""
        self.is_running = False
        return self._counter.stop(self._came_bytes, self._went_bytes) if self._counter is not None else None
