"""What a step that never repeats exactly uses next: a correlation table in forward, the step's own path in backward.

The table is DeepUM's table of executions (Jung et al., ASPLOS 2023): from the last three uses to the one that followed them
most recently. Where those three were never seen in a row, the last two count, then the last one. It is followed again and
again, up to a window. DeepUM predicts the memory blocks of an execution by further tables; here a use *is* that of one
tensor. Nor is a table asked in backward: what autograd saved in this very forward is wanted in the reverse order, whichever
branches were taken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator

# How many uses ahead are predicted; DeepUM's papers name 32 kernels. Free memory is usually used up before.
WINDOW = 32
_CONTEXT = 3
ROWS_AT_MOST = 1 << 16
_START = ("start",)


class Correlation:
    """A `Foresight` that learns while steps run.

    Args:
        window: uses ahead that are guessed, > 0.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._next: OrderedDict[tuple[Hashable, ...], Hashable] = OrderedDict()
        self._last: tuple[Hashable, ...] = (_START,)
        self._saved: list[Hashable] = []
        self._left = 0  # of what was saved, what backward has not come to yet
        self._is_backward = False

    @property
    def row_count(self) -> int:
        """What followed what, in all; at most ROWS_AT_MOST."""
        return len(self._next)

    def begin(self) -> None:
        """A step begins."""
        self._last = (_START,)
        self._saved, self._left, self._is_backward = [], 0, False

    def used(self, key: Hashable) -> None:
        """Forward uses a parameter."""
        self._is_backward = False
        for size in range(1, len(self._last) + 1):
            context = self._last[-size:]
            self._next[context] = key
            self._next.move_to_end(context)
        while self.row_count > ROWS_AT_MOST:
            self._next.popitem(last=False)
        self._last = (*self._last, key)[-_CONTEXT:]

    def saved(self, key: Hashable) -> None:
        """Autograd saved a tensor for backward, which may be saved several times."""
        del self._saved[self._left :]  # an earlier backward of this step is done with those
        self._saved.append(key)
        self._left = len(self._saved)

    def wanted(self, key: Hashable) -> None:
        """Backward uses what was saved."""
        self._is_backward = True
        for at in range(self._left - 1, -1, -1):
            if self._saved[at] == key:
                self._left = at
                return

    def ahead(self) -> Iterator[Hashable]:
        """Yields what is probably used next, nearest first, each key once."""
        seen: set[Hashable] = set()
        for key in self._backwards() if self._is_backward else self._forwards():
            if key not in seen:
                seen.add(key)
                yield key

    def _backwards(self) -> Iterator[Hashable]:
        for at in range(self._left - 1, max(self._left - 1 - self._window, -1), -1):
            yield self._saved[at]

    def _forwards(self) -> Iterator[Hashable]:
        last = self._last
        for _ in range(self._window):
            known = next((c for size in range(len(last), 0, -1) if (c := last[-size:]) in self._next), None)
            if known is None:
                return
            key = self._next[known]
            yield key
            last = (*last, key)[-_CONTEXT:]
