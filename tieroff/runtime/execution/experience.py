"""Experience: what recorded steps say about steps that run without a plan."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

Shapes = tuple[tuple[int, ...], ...]


class Experience:
    """What recorded steps say about steps that run without a plan.

    Attributes:
        room_bytes: device bytes of the budget that no op of theirs needed.
        clean: keys of parameters that they read, and wrote in neither forward nor backward.
    """

    def __init__(self) -> None:
        self.room_bytes = 0
        self.clean: frozenset[Hashable] = frozenset()
        self._read, self._written = set[Hashable](), set[Hashable]()
        self._elements = 0
        self._shapes: set[Shapes] = set()

    def add(self, read: set[Hashable], written: set[Hashable], shapes: Iterable[Shapes], room_bytes: int) -> None:
        """Learns from one recorded step: what it read and wrote, its forwards' inputs, and the room of all steps so far."""
        self._read |= read
        self._written |= written
        self.clean = frozenset(self._read - self._written)
        self.cover(shapes)
        self.room_bytes = room_bytes

    def cover(self, shapes: Iterable[Shapes]) -> None:
        """Learns that forwards on these inputs need no more than what is known."""
        for shape in shapes:
            if not self.covers(shape):
                self._elements = max(self._elements, _elements_of(shape))
                self._shapes = {known for known in self._shapes if not _is_within(known, shape)} | {shape}

    def covers(self, shapes: Shapes) -> bool:
        """Returns whether some recorded input was at least as large in every dimension of every tensor."""
        return any(_is_within(shapes, known) for known in self._shapes)

    def room_of_pass(self, elements: int) -> int:
        """Returns the device bytes that a pass without gradients leaves of the budget.

        With no more elements in its inputs than a recorded forward had, it needs no more than that.

        Args:
            elements: of its inputs; what else it gets, such as a cache of keys and values, is the program's own.
        """
        return self.room_bytes if elements <= self._elements else 0


def _elements_of(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes))


def _is_within(shapes: Shapes, known: Shapes) -> bool:
    return [len(shape) for shape in shapes] == [len(shape) for shape in known] and all(
        size <= most for shape, limit in zip(shapes, known, strict=True) for size, most in zip(shape, limit, strict=True)
    )
