"""Which calls took a tick's memory: for the message that says which op needs too much."""

from __future__ import annotations

from collections.abc import Collection, Container, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from tieroff.core.place import module_of, place_here

# Calls that are named for one tick's memory.
_AT_MOST = 2


@dataclass(frozen=True, slots=True)
class _Maker:
    """A call that took memory.

    Attributes:
        size_bytes: the most that it took at once.
        keys: of the storage that it made, as far as the step gives it any; None for scratch memory.
        words: which operator, in which module, at which line.
    """

    size_bytes: int
    keys: Collection[Hashable] | None
    words: str


class Makers:
    """Per tick the operators that took the most; only of those that took half of the most at their time.

    Attributes:
        running: the operator that runs.
    """

    def __init__(self) -> None:
        self.running: Any = None
        self._ticks: dict[int, dict[int, _Maker]] = {}  # by the operator's id: its hash is a call of Python
        self._most: dict[int, int] = {}  # the largest so far of each tick

    def note(self, tick: int, size_bytes: int, keys: Collection[Hashable] | None, events: Sequence[tuple[str, str]]) -> None:
        """Notes where memory was taken, if it is much for this tick and more than the same operator took before.

        Args:
            tick: the op of the trace.
            size_bytes: how much.
            keys: see _Maker; they may still grow.
            events: names and phases of the ticks so far, which tell the module.
        """
        most = self._most.get(tick, 1)
        if 2 * size_bytes < most:
            return
        noted = self._ticks.setdefault(tick, {})
        known = noted.get(id(self.running))
        if known is not None and known.size_bytes >= size_bytes:
            return
        self._most[tick] = max(most, size_bytes)
        place = place_here()
        path = module_of(name for name, _ in reversed(events)) or place.kind
        module, line = path and f"in {path}", place.line and f"({place.line})"
        words = " ".join(filter(None, (str(self.running).removesuffix(".default"), module, line)))
        noted[id(self.running)] = _Maker(size_bytes, keys, words)

    def words(self, tick: int, subjects: Container[Hashable]) -> str:
        """Returns what took the most memory in a tick that holds no subject, for people; "" if nothing did."""
        noted = self._ticks.get(tick, {}).values()
        own = [maker for maker in noted if maker.keys is None or not any(key in subjects for key in maker.keys)]
        own.sort(key=lambda maker: -maker.size_bytes)
        return ", ".join(maker.words for maker in own[:_AT_MOST] if 2 * maker.size_bytes >= own[0].size_bytes)
