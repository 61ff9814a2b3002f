"""Free and used ranges of one area (a slab of memory, a file). Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from tieroff.errors import StateError


class FreeList:
    """The free ranges of an area that only grows; neighbours are always merged.

    Takes the smallest range that is large enough, so that large ones stay whole; among equal ones the one freed last,
    whose bytes are most likely in a cache.

    Attributes:
        length_bytes: the area's size.
        free_bytes: sum of its free ranges.
    """

    def __init__(self) -> None:
        self.length_bytes = 0
        self.free_bytes = 0
        self._offsets: list[int] = []  # sorted; _sizes runs along
        self._sizes: list[int] = []
        self._turns: list[int] = []  # when a range last grew
        self._turn = 0

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken."""
        return self.length_bytes - self.free_bytes

    @property
    def largest_bytes(self) -> int:
        """The largest range that take() could return now."""
        return max(self._sizes, default=0)

    @property
    def tail_bytes(self) -> int:
        """Free bytes at the area's end, which a longer area would extend."""
        if self._offsets and self._offsets[-1] + self._sizes[-1] == self.length_bytes:
            return self._sizes[-1]
        return 0

    def extend(self, size_bytes: int) -> None:
        """Adds free bytes at the end."""
        offset = self.length_bytes
        self.length_bytes += size_bytes
        self._insert(offset, size_bytes)

    def take(self, size_bytes: int) -> int | None:
        """Returns the offset of a range that is now used, from the smallest free one that holds it, or None."""
        size = index = -1
        for at, found in enumerate(self._sizes):
            if found < size_bytes or (0 <= size < found) or (found == size and self._turns[at] < self._turns[index]):
                continue
            size, index = found, at
        if index < 0:
            return None
        offset = self._offsets[index]
        if size == size_bytes:
            self._drop(index)
        else:
            self._offsets[index] += size_bytes
            self._sizes[index] -= size_bytes
        self.free_bytes -= size_bytes
        return offset

    def give(self, offset: int, size_bytes: int) -> None:
        """Makes a used range free.

        Raises:
            StateError: it is not inside the area, or a part of it is free already; nothing has changed then.
        """
        index = bisect_left(self._offsets, offset)
        ends_before = index == 0 or self._offsets[index - 1] + self._sizes[index - 1] <= offset
        starts_after = index == len(self._offsets) or offset + size_bytes <= self._offsets[index]
        if offset < 0 or offset + size_bytes > self.length_bytes or not (ends_before and starts_after):
            raise StateError(
                f"cannot free {size_bytes} bytes at {offset} of an area of {self.length_bytes} bytes: they are free already "
                "or outside it; a block was freed twice, or by another store"
            )
        self._insert(offset, size_bytes)

    def rebuild(self, taken: Iterable[tuple[int, int]]) -> None:
        """Makes these ranges, as (offset, bytes), the used ones, whatever a broken-off call left."""
        self._offsets, self._sizes, self._turns, self.free_bytes = [], [], [], 0
        position = 0
        for offset, size_bytes in (*sorted(taken), (self.length_bytes, 0)):
            if offset > position:
                self._insert(position, offset - position)
            position = offset + size_bytes

    def _insert(self, offset: int, size_bytes: int) -> None:
        index = bisect_left(self._offsets, offset)
        self.free_bytes += size_bytes
        self._turn += 1
        if index < len(self._offsets) and offset + size_bytes == self._offsets[index]:
            self._offsets[index] = offset
            self._sizes[index] += size_bytes
            self._turns[index] = self._turn
        else:
            self._offsets.insert(index, offset)
            self._sizes.insert(index, size_bytes)
            self._turns.insert(index, self._turn)
        if index > 0 and self._offsets[index - 1] + self._sizes[index - 1] == offset:
            self._sizes[index - 1] += self._sizes[index]
            self._turns[index - 1] = self._turn
            self._drop(index)

    def _drop(self, index: int) -> None:
        del self._offsets[index], self._sizes[index], self._turns[index]
