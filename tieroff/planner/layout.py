"""Offline addresses: packs buffers with known lifetimes into one range of memory.

[Note: packing]
Buffers are placed one by one in a fixed order, each at the lowest free offset that suffices (first fit) or in the
tightest free range (best fit), looking only at placed buffers whose lifetimes overlap its own. Several orders are
tried; while time is left, the best order is improved by moving the buffers that reach the top further to the front.
The result is checked by a sweep that knows nothing of how it was found.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tieroff.errors import ConfigError, InfeasiblePlanError
from tieroff.planner.problem import Bytes
from tieroff.units import format_bytes

_LIMIT_S = 1.0
_ROUNDS = 400

Buffer = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each buffer lies.

    Attributes:
        offsets: one per buffer, in the order given, in bytes.
        footprint_bytes: the highest end of any buffer.
        bound_bytes: the most bytes that are live at once; no layout is smaller.
    """

    offsets: tuple[int, ...]
    footprint_bytes: int
    bound_bytes: int


def pack(
    buffers: Iterable[Sequence[int]],
    capacity_bytes: int | None = None,
    alignment_bytes: int = 1,
    time_limit_s: float | None = None,
) -> Layout:
    """Returns offsets such that no two buffers that live at the same time overlap.

    Args:
        buffers: (lower, upper, size) each, with half-open lifetimes [lower, upper).
        capacity_bytes: the footprint must not be above it.
        alignment_bytes: every offset is a multiple of it.
        time_limit_s: how long to look for a smaller footprint; 1 s if None. The first orders are always tried, and
            the search ends early when the bound or the capacity is met.

    Raises:
        ConfigError: a buffer whose lifetime or size is not positive, or an alignment below 1.
        InfeasiblePlanError: no layout within the capacity was found.
    """
    items = [_checked(index, buffer) for index, buffer in enumerate(buffers)]
    if alignment_bytes < 1:
        raise ConfigError(f"expected alignment_bytes >= 1, got {alignment_bytes}")
    bound = _live_peak(items, alignment_bytes)
    target = bound if capacity_bytes is None else max(bound, capacity_bytes)
    if capacity_bytes is not None and bound > capacity_bytes:
        raise _misses(capacity_bytes, bound, "so many bytes are live at once")
    deadline = time.monotonic() + (_LIMIT_S if time_limit_s is None else time_limit_s)
    offsets = _search(items, alignment_bytes, target, deadline)
    footprint = max((offset + item[2] for offset, item in zip(offsets, items, strict=True)), default=0)
    if capacity_bytes is not None and footprint > capacity_bytes:
        raise _misses(capacity_bytes, footprint, f"the best layout found needs that; {bound} are live at once")
    return Layout(tuple(offsets), footprint, bound)


def _misses(capacity_bytes: int, needed_bytes: int, why: str) -> InfeasiblePlanError:
    return InfeasiblePlanError(
        f"expected a layout within {format_bytes(capacity_bytes)} ({capacity_bytes} bytes), but {needed_bytes} bytes "
        f"are needed: {why}. Raise the capacity or the time limit",
        needed_bytes=needed_bytes,
        available_bytes=capacity_bytes,
    )


def _checked(index: int, buffer: Sequence[int]) -> Buffer:
    lower, upper, size = (int(value) for value in buffer)
    if upper <= lower or size <= 0:
        raise ConfigError(f"buffer {index}: expected lower < upper and size > 0, got {(lower, upper, size)}")
    return lower, upper, size


def _live_peak(items: list[Buffer], alignment_bytes: int) -> int:
    """Returns the most bytes live at once; all but the one on top take whole multiples of the alignment."""
    events: list[tuple[int, int]] = []
    for lower, upper, size in items:
        events += [(lower, size), (upper, -size)]
    peak = live = 0
    for _, change in sorted(events):
        live += change
        peak = max(peak, live)
    return peak


def _search(items: list[Buffer], alignment_bytes: int, target: int, deadline: float) -> list[int]:
    best: list[int] = []
    best_footprint = -1
    best_order: list[int] = []
    placer = _Placer(items, alignment_bytes)
    for key in _keys(items):
        order = sorted(range(len(items)), key=key)
        for is_best_fit in (False, True):
            offsets = placer.place(order, is_best_fit)
            footprint = placer.footprint(offsets)
            if best_footprint < 0 or footprint < best_footprint:
                best, best_footprint, best_order = offsets, footprint, order
            if best_footprint <= target:
                return best
    order = best_order
    for step in range(_ROUNDS):
        if time.monotonic() > deadline:
            break
        order = _promote(order, placer.tops(placer.place(order, False)), step)
        offsets = placer.place(order, step % 2 == 1)
        footprint = placer.footprint(offsets)
        if footprint < best_footprint:
            best, best_footprint, best_order = offsets, footprint, order
        elif step % 20 == 19:
            order = best_order
        if best_footprint <= target:
            break
    return best


def _keys(items: list[Buffer]) -> list[Callable[[int], tuple[int, ...]]]:
    """Returns sorting keys for the first orders: by size, area, length, and contention with others."""
    lowers = np.array([item[0] for item in items], np.int64)
    uppers = np.array([item[1] for item in items], np.int64)
    sizes = np.array([item[2] for item in items], np.int64)
    points, live = _profile(items)
    crowd = [
        int(live[np.searchsorted(points, lower, "right") - 1 : np.searchsorted(points, upper)].max())
        for lower, upper, _ in items
    ]
    lengths = uppers - lowers
    return [
        lambda i: (-int(sizes[i]), -int(lengths[i]), int(lowers[i])),
        lambda i: (-int(sizes[i]) * int(lengths[i]), int(lowers[i])),
        lambda i: (-crowd[i], -int(sizes[i]), -int(lengths[i])),
        lambda i: (-int(lengths[i]), -int(sizes[i]), int(lowers[i])),
        lambda i: (-crowd[i], -int(lengths[i]), -int(sizes[i])),
        lambda i: (int(lowers[i]), -int(lengths[i]), -int(sizes[i])),
    ]


def _profile(items: list[Buffer]) -> tuple[Bytes, Bytes]:
    """Returns the times at which the live bytes change, and the live bytes from each on."""
    change: dict[int, int] = {}
    for lower, upper, size in items:
        change[lower] = change.get(lower, 0) + size
        change[upper] = change.get(upper, 0) - size
    points = np.array(sorted(change), np.int64)
    return points, np.cumsum(np.array([change[int(p)] for p in points], np.int64))


def _promote(order: list[int], tops: list[int], step: int) -> list[int]:
    """Moves the buffers that reach the top to an earlier place in the order; how much earlier varies."""
    moved = set(tops)
    rest = [index for index in order if index not in moved]
    first = min(order.index(index) for index in tops)
    place = first * (step % 7) // 8
    return rest[:place] + [index for index in order if index in moved] + rest[place:]


class _Placer:
    """Places buffers in a given order."""

    def __init__(self, items: list[Buffer], alignment_bytes: int) -> None:
        self._items = items
        self._alignment = alignment_bytes
        lowers = np.array([item[0] for item in items], np.int64)
        uppers = np.array([item[1] for item in items], np.int64)
        self._neighbours = [np.flatnonzero((lowers < upper) & (uppers > lower)).tolist() for lower, upper, _ in items]

    def footprint(self, offsets: list[int]) -> int:
        """Returns the highest end."""
        return max((offset + item[2] for offset, item in zip(offsets, self._items, strict=True)), default=0)

    def tops(self, offsets: list[int]) -> list[int]:
        """Returns the buffers that reach the highest end."""
        top = self.footprint(offsets)
        return [i for i, item in enumerate(self._items) if offsets[i] + item[2] == top]

    def place(self, order: list[int], is_best_fit: bool) -> list[int]:
        """Returns the offsets of all buffers."""
        offsets = [-1] * len(self._items)
        for index in order:
            taken: list[tuple[int, int]] = []
            for other in self._neighbours[index]:
                if offsets[other] >= 0:
                    insort(taken, (offsets[other], offsets[other] + self._items[other][2]))
            offsets[index] = self._fit(taken, self._items[index][2], is_best_fit)
        return offsets

    def _fit(self, taken: list[tuple[int, int]], size: int, is_best_fit: bool) -> int:
        end = 0
        best, best_room = -1, 0
        for start, stop in taken:
            room = start - end
            if room >= size and (best < 0 or room < best_room):
                if not is_best_fit:
                    return end
                best, best_room = end, room
            end = max(end, -(-stop // self._alignment) * self._alignment)
        return best if best >= 0 else end
