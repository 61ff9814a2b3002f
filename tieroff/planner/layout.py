"""Offline addresses: packs buffers with known lifetimes into one range of memory.

The search is native (native/src/layout*.cpp). Buffers are placed one by one in several orders, each at the lowest free
offset that suffices or in the tightest free range; orders are then improved by lifting to the front what ends too high.
Up to 2,000 buffers, an exact search follows where that did not reach the bound or the capacity.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tieroff.errors import ConfigError, InfeasiblePlanError
from tieroff.planner.native import _native
from tieroff.units import format_bytes

_NS_PER_S = 1_000_000_000
_LARGEST = 2**60  # sums of a few of these fit in 64 bits


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to search: nodes of the exact search, and steps of placing in order beyond the first orders.

    A node takes about 2 us, a step about 10 ns.
    """

    nodes: int
    steps: int


QUICK = Budget(nodes=150_000, steps=10_000_000)
SMALLEST = Budget(nodes=1_000_000, steps=50_000_000)
WITHIN = Budget(nodes=10_000_000, steps=200_000_000)

Buffer = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each buffer lies.

    Attributes:
        offsets: one per buffer, in the order given, in bytes.
        footprint_bytes: the highest end of any buffer, with what must stay free above it.
        bound_bytes: no layout has a smaller footprint; at least the most bytes that are live at once.
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

    Without a time limit the result depends on the arguments alone.

    Args:
        buffers: (lower, upper, size) each, with half-open lifetimes [lower, upper).
        capacity_bytes: the footprint must not be above it. The first layout within it is taken; without one the
            smallest that is found.
        alignment_bytes: every offset is a multiple of it.
        time_limit_s: ends the search early, by the wall clock; the first order is always tried.

    Raises:
        ConfigError: a buffer whose lifetime or size is not positive, numbers too large, or an alignment below 1.
        InfeasiblePlanError: no layout is within the capacity (`is_proven`), or none was found before the search ended
            (not `is_proven`; `needed_bytes` is then the smallest footprint found, which a longer search may go below).
    """
    begun_s = time.monotonic()
    budget = SMALLEST if capacity_bytes is None else WITHIN
    items = [_checked(index, buffer) for index, buffer in enumerate(buffers)]
    layout = _pack(items, [0] * len(items), 0, capacity_bytes, alignment_bytes, time_limit_s, budget)
    if capacity_bytes is not None and layout.footprint_bytes > capacity_bytes:
        raise _misses(capacity_bytes, layout, time.monotonic() - begun_s)
    return layout


def pack_ring(
    buffers: Iterable[Sequence[int]],
    above_bytes: Sequence[int],
    target_bytes: int | None = None,
    alignment_bytes: int = 1,
    budget: Budget = QUICK,
) -> Layout:
    """Returns offsets on a ring of time, where `above_bytes[t]` must stay free above all that is live at time t.

    Args:
        buffers: (lower, upper, size) each, `0 <= lower < n` and `lower < upper <= lower + n` on a ring of
            `n = len(above_bytes)`; `upper > n` wraps round. Sizes count as whole multiples of the alignment.
        above_bytes: per time.
        target_bytes: a footprint that suffices: the search ends there, and at once when no layout can be so small.
            As small as is found if None.
        alignment_bytes: every offset is a multiple of it.
        budget: of the search.

    Raises:
        ConfigError: as for `pack`, or a lifetime that is not on the ring.
    """
    ring = len(above_bytes)
    items = [_checked(index, buffer) for index, buffer in enumerate(buffers)]
    for index, (lower, upper, _) in enumerate(items):
        if not (0 <= lower < ring and upper <= lower + ring):
            raise ConfigError(
                f"buffer {index}: expected a lifetime on a ring of {ring}, got {(lower, upper)}; lower is in "
                f"[0, {ring}), upper at most {ring} above it"
            )
    items = [(lower, upper, padded(size, alignment_bytes)) for lower, upper, size in items]
    twice = np.tile(np.asarray(above_bytes, np.int64), 2)
    above = [int(twice[lower:upper].max()) for lower, upper, _ in items] if twice.any() else [0] * len(items)
    return _pack(items, above, ring, target_bytes, alignment_bytes, None, budget)


def padded(size_bytes: int, alignment_bytes: int) -> int:
    """Returns the size rounded up to a whole multiple of the alignment.

    Raises:
        ConfigError: an alignment below 1.
    """
    if alignment_bytes < 1:
        raise ConfigError(f"expected alignment_bytes >= 1, got {alignment_bytes}")
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def _pack(
    items: list[Buffer],
    above: list[int],
    ring: int,
    target_bytes: int | None,
    alignment_bytes: int,
    time_limit_s: float | None,
    budget: Budget,
) -> Layout:
    total = sum(padded(size, alignment_bytes) for _, _, size in items) + max(above, default=0)
    if max(total, alignment_bytes, *(abs(value) for item in items for value in item)) >= _LARGEST:
        raise ConfigError(f"expected times and the sum of all sizes below {_LARGEST}, got sizes of {total} in all")
    lowers, uppers, sizes = ([item[k] for item in items] for k in range(3))
    offsets, footprint, bound, _, _ = _native.pack(
        lowers,
        uppers,
        sizes,
        above,
        ring=ring,
        alignment=alignment_bytes,
        capacity=-1 if target_bytes is None else max(0, min(target_bytes, _LARGEST)),
        node_budget=budget.nodes,
        fit_budget=budget.steps,
        time_limit_ns=0 if time_limit_s is None else max(1, round(time_limit_s * _NS_PER_S)),
    )
    return Layout(tuple(offsets), footprint, bound)


def _misses(capacity_bytes: int, layout: Layout, searched_s: float) -> InfeasiblePlanError:
    within = f"a layout within {format_bytes(capacity_bytes)} ({capacity_bytes} bytes)"
    is_proven = layout.bound_bytes > capacity_bytes
    if is_proven:
        needed = layout.bound_bytes
        message = (
            f"expected {within}, but none exists: any layout needs at least {needed} bytes, by what is live at once or by an "
            "exhaustive search. Raise the capacity"
        )
    else:
        needed = layout.footprint_bytes
        message = (
            f"expected {within}, but none was found in {searched_s:.3g} s; one may exist: the smallest found takes {needed} "
            f"bytes, and none can take less than {layout.bound_bytes}. Raise the capacity, or time_limit_s where it is given"
        )
    return InfeasiblePlanError(message, needed_bytes=needed, available_bytes=capacity_bytes, is_proven=is_proven)


def _checked(index: int, buffer: Sequence[int]) -> Buffer:
    lower, upper, size = (int(value) for value in buffer)
    if upper <= lower or size <= 0:
        raise ConfigError(f"buffer {index}: expected lower < upper and size > 0, got {(lower, upper, size)}")
    return lower, upper, size
