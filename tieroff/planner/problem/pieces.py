"""Windows of all pieces: which bytes are away in which gaps, from which op to which, and in which lower tier.

A piece is a byte range of a movable tensor; whole tensors are pieces too. Its gaps are those of the tensor. All that is
decided lies in flat arrays with one entry per gap of a piece, which the native search reads and writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tieroff.core.lifetime import Lifetime
from tieroff.core.tensor import Tier
from tieroff.planner.native import _native
from tieroff.planner.problem.problem import Bytes, Problem, ring_sum
from tieroff.units import NS_PER_S

LOWER = (Tier.HOST, Tier.NVME)
"""Lower tiers by their number in `Windows.tier`."""

REPAIRS = ("least_time", "deepest", "furthest_use", "relative_time")
"""By number, as `tieroff::Repair` explains them."""


NEVER = -(2**62)
"""`Windows.copy_from` of a gap of bytes that nothing writes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [first_byte, first_byte + size_bytes) of a tensor."""

    tensor: int
    first_byte: int
    size_bytes: int


@dataclass(frozen=True)
class Windows:
    """One entry per gap of each piece; the gaps of a piece are neighbours, in order.

    Attributes:
        pieces: all pieces that may be away.
        piece: index into `pieces`.
        start, stop: the gap, `stop` on the line [0, 2n).
        size_bytes: of the piece.
        away_start, away_stop: the bytes are away over [away_start, away_stop); empty: they stay.
        tier: index into LOWER, of those that are away.
        is_last: the tensor's life ends with the gap.
        copy_from: tick after the last write before the gap, negative for a write of the step before; or NEVER.
    """

    pieces: tuple[Piece, ...]
    piece: Bytes
    start: Bytes
    stop: Bytes
    size_bytes: Bytes
    away_start: Bytes
    away_stop: Bytes
    tier: Bytes
    is_last: Bytes
    copy_from: Bytes

    @cached_property
    def tensor(self) -> Bytes:
        """Tensor of each piece."""
        return np.array([piece.tensor for piece in self.pieces], np.int64)

    @property
    def is_away(self) -> np.ndarray:
        """True for gaps in which the bytes are away for at least one op."""
        return self.away_start < self.away_stop


Away = tuple[int, int, int]
"""away_start, away_stop and tier of one gap; KEPT for one in which the bytes stay."""

KEPT: Away = (0, 0, -1)


def make_windows(problem: Problem, chosen: Sequence[tuple[Piece, Sequence[Away]]]) -> Windows:
    """Returns the windows of pieces, each given with one `Away` per gap of its tensor."""
    rows: list[tuple[int, ...]] = []
    for index, (piece, aways) in enumerate(chosen):
        life = problem.trace.lifetimes[piece.tensor]
        before = _write_before(problem, life)
        for gap, (away_start, away_stop, tier) in zip(life.gaps, aways, strict=True):
            if tier < 0:
                away_start = away_stop = gap.start
            copy_from = gap.last_write + 1 if gap.last_write >= 0 else before
            rows.append(
                (index, gap.start, gap.stop, piece.size_bytes, away_start, away_stop, tier, int(gap.is_last), copy_from)
            )
    columns = np.array(rows, np.int64).reshape(-1, 9).T
    return Windows(tuple(piece for piece, _ in chosen), *(np.ascontiguousarray(column) for column in columns))


def _write_before(problem: Problem, life: Lifetime) -> int:
    """Returns the tick after the last write of the step before, counted from this step's start, or NEVER."""
    if not life.writes or not problem.trace.tensors[life.tensor].is_persistent:
        return NEVER
    return life.writes[-1] + 1 - problem.op_count


def required_bytes(problem: Problem, windows: Windows) -> Bytes:
    """Returns the bytes at each op with every piece away over the whole of its gaps."""
    return problem.live - ring_sum(problem.op_count, windows.start, windows.stop, windows.size_bytes)


def fit(problem: Problem, windows: Windows, *, repair: str, passes: str, lead_ns: int, device_bytes: int) -> Windows | None:
    """Returns windows that bring every op under a budget and use the rest of it, or None if that cannot be.

    Args:
        problem: what is planned.
        windows: where to begin.
        repair: one of REPAIRS.
        passes: L, R, l, r: see `tieroff::Filling`.
        lead_ns: how much earlier than its latest start a load may be issued, and how much later than its copy's
            expected end a release may be, in the passes L and R.
        device_bytes: the budget.
    """
    usage = required_bytes(problem, windows)
    load_from, release_until = _limits(problem, windows, lead_ns)
    away_start, away_stop = windows.away_start.copy(), windows.away_stop.copy()
    # Nothing comes back from a last gap: it has no load that could be issued earlier.
    by_deadline = np.argsort(windows.stop % problem.op_count, kind="stable")
    by_deadline = by_deadline[windows.is_last[by_deadline] == 0]
    by_release = np.argsort(windows.away_start % problem.op_count, kind="stable")
    is_done = _native.fit_windows(
        usage,
        problem.starts_ns,
        device_bytes,
        windows.start,
        windows.stop,
        windows.size_bytes,
        away_start,
        away_stop,
        REPAIRS.index(repair),
        by_deadline,
        by_release,
        load_from,
        release_until,
        passes,
    )
    if not is_done:
        return None
    # A gap in which the bytes stayed has no tier; if they now leave, they go to the first one.
    tier = np.where((away_start < away_stop) & (windows.tier < 0), LOWER.index(problem.tiers[0]), windows.tier)
    return replace(windows, away_start=away_start, away_stop=away_stop, tier=tier)


def _limits(problem: Problem, windows: Windows, lead_ns: int) -> tuple[Bytes, Bytes]:
    """Returns per gap the tick before which a load need not begin, and the one after which no release need be.

    Each link serves its transfers one after the other: loads as late as they may be, copies out as soon as they can,
    over two rounds of the ring so that what crosses the step's end is seen.
    """
    op_count = problem.op_count
    step_ns = int(problem.starts_ns[-1])
    line = np.concatenate([problem.starts_ns[:-1], problem.starts_ns + step_ns]).astype(np.float64)
    load_from = np.zeros(len(windows.start), np.int64)
    release_until = np.full(len(windows.start), 2 * op_count, np.int64)
    begins = np.maximum(windows.copy_from, 0)
    for number, tier in enumerate(LOWER):
        if tier not in problem.tiers:
            continue
        mine = np.flatnonzero((windows.tier == number) | ((windows.tier < 0) & (tier is problem.tiers[0])))
        out, back = problem.links(tier)
        deadline = np.where(windows.stop > op_count, windows.stop - op_count, windows.stop)[mine]
        order = np.lexsort((mine, deadline))[::-1]
        takes = back.latency_ns + windows.size_bytes[mine] * (NS_PER_S / back.bytes_per_s)
        latest = _native.serve_in_turn(
            np.concatenate([line[deadline[order] + op_count], line[deadline[order]]]), np.tile(takes[order], 2), True
        )
        ticks = np.searchsorted(line, latest[len(order) :] - lead_ns, "right") - 1
        load_from[mine[order]] = ticks - deadline[order] + windows.stop[mine[order]]
        order = np.lexsort((mine, begins[mine]))
        first = begins[mine[order]]
        takes = out.latency_ns + windows.size_bytes[mine] * (NS_PER_S / out.bytes_per_s)
        done = _native.serve_in_turn(np.concatenate([line[first], line[first + op_count]]), np.tile(takes[order], 2), False)
        release_until[mine[order]] = np.searchsorted(line, done[len(order) :] + lead_ns) - op_count
    return load_from, release_until
