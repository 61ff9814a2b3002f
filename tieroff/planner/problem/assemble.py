"""From what was decided to a plan: moves of whole tensors (`build_plan`), or windows of pieces (`assemble`).

`build_plan` keeps to the ticks that each move names and to one place below per tensor: it serves every executor. `assemble`
has the links' order decide when copies and loads are issued (tieroff/planner/problem/runs.py), splits tensors and crosses the
end of the step, for an executor that can.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tieroff.core.machine import LINK_NAMES
from tieroff.core.plan import WHOLE, Plan, Repeat, Residency, Transfer
from tieroff.core.tensor import Tier
from tieroff.core.trace import Trace
from tieroff.planner.problem.pieces import LOWER, Piece, Windows
from tieroff.planner.problem.problem import Bytes, Problem, Slot, Span, held_bytes
from tieroff.planner.problem.runs import Draft, draft, held_on_ring
from tieroff.planner.simulate.simulator import Totals, simulate_rows


@dataclass(frozen=True, slots=True)
class Move:
    """A tensor is off the device over [release_at, load_at) within a slot.

    `slot.start <= release_at <= load_at <= slot.stop`; equal only at the boundary, where
    `release_at <= n <= load_at` unless the executor can cross the step's end, or the eviction may be late.
    """

    slot: Slot
    release_at: int
    load_at: int


def last_dirty_writes(problem: Problem, slots: list[Slot]) -> list[int | None]:
    """Returns, for each moved slot of one tensor in order, the last write since the moved slot before it.

    None means that the copy below is still valid: the drop is free. A write in the step before counts as negative.
    """
    if not slots:
        return []
    tensor = slots[0].tensor
    op_count = problem.op_count
    writes = problem.trace.lifetimes[tensor].writes
    is_persistent = problem.trace.tensors[tensor].is_persistent
    ring = [*(w - op_count for w in writes), *writes] if is_persistent else writes
    since = slots[-1].stop - op_count if is_persistent else 0
    result: list[int | None] = []
    for slot in slots:
        position = bisect_left(ring, slot.start)
        result.append(ring[position - 1] if position and ring[position - 1] >= since else None)
        since = slot.stop
    return result


def _transfers_of(problem: Problem, moves: list[Move], tier: Tier, copies_early: bool) -> list[Transfer]:
    op_count = problem.op_count
    tensor = moves[0].slot.tensor
    transfers: list[Transfer] = []
    for move, write in zip(moves, last_dirty_writes(problem, [m.slot for m in moves]), strict=True):
        if write is not None:
            issue = min(write + 1, move.release_at) if copies_early else move.release_at
            if not problem.capabilities.wraps:
                issue = max(issue, 0)
            shift = _shift(issue, move.release_at, op_count)
            transfers.append(Transfer(tensor, Tier.DEVICE, tier, issue + shift, move.release_at + shift, 0))
        if move.slot.is_last:
            continue
        shift = _shift(move.load_at, move.slot.stop, op_count)
        if move.slot.is_boundary and move.load_at == op_count:
            shift = -op_count
        transfers.append(Transfer(tensor, tier, Tier.DEVICE, move.load_at + shift, move.slot.stop + shift, 0))
    return transfers


def _shift(start: int, stop: int, op_count: int) -> int:
    """Returns what brings `start` into [0, n), where a synchronous event at the step's end stays there."""
    if start < 0:
        return op_count
    if start > op_count or (start == op_count and stop > start):
        return -op_count
    return 0


def _stays_above(problem: Problem, moves: list[Move]) -> list[Residency]:
    op_count = problem.op_count
    tensor = moves[0].slot.tensor
    life = problem.trace.lifetimes[tensor]
    if problem.trace.tensors[tensor].is_persistent:
        starts = [moves[-1].load_at - op_count] + [m.load_at for m in moves[:-1]]
        stops = [m.release_at for m in moves]
    else:
        starts = [life.birth] + [m.load_at for m in moves if not m.slot.is_last]
        stops = [m.release_at for m in moves] + [life.death] * (not moves[-1].slot.is_last)
    residencies: list[Residency] = []
    for start, stop in zip(starts, stops, strict=True):
        shift = op_count if start < 0 else -op_count if start >= op_count else 0
        residencies.append(Residency(tensor, Tier.DEVICE, start + shift, stop + shift))
    return residencies


def _by_issue(transfers: list[Transfer]) -> tuple[Transfer, ...]:
    """Numbers the transfers of each link in the order of issue: synchronous copies out first, then by deadline."""

    def key(transfer: Transfer) -> tuple[int, bool, int, int]:
        is_first = transfer.target is not Tier.DEVICE and transfer.issue_at == transfer.ready_by
        return transfer.issue_at, not is_first, transfer.ready_by, transfer.tensor

    count: dict[str, int] = {}
    ranked: list[Transfer] = []
    for t in sorted(transfers, key=key):
        link = LINK_NAMES[t.source, t.target]
        rank = count.get(link, 0)
        count[link] = rank + 1
        ranked.append(Transfer(t.tensor, t.source, t.target, t.issue_at, t.ready_by, rank))
    return tuple(ranked)


def peak_bytes(problem: Problem, residencies: list[Residency]) -> dict[Tier, int]:
    """Returns the peak of each tier over the ops, the device's with the ops' transient bytes."""
    tensors = problem.trace.tensors
    rows: dict[Tier, list[Span]] = {tier: [] for tier in Tier}
    for r in residencies:
        rows[r.tier].append((r.start, r.stop, (r.stop_byte or tensors[r.tensor].size_bytes) - r.first_byte))
    used = {tier: held_bytes(spans, problem.op_count) for tier, spans in rows.items()}
    used[Tier.DEVICE] += np.array([op.transient_bytes for op in problem.trace.ops], np.int64)
    return {tier: int(line.max(initial=0)) for tier, line in used.items()}


def plan_from(problem: Problem, policy: str, residencies: list[Residency], transfers: Sequence[Transfer]) -> Plan:
    """Returns the plan of a problem with these residencies, and transfers that are ranked."""
    return Plan(
        policy=policy,
        trace_digest=problem.trace.digest,
        op_count=problem.op_count,
        budget_bytes=dict(problem.budget),
        peak_bytes=peak_bytes(problem, residencies),
        residencies=tuple(residencies),
        transfers=tuple(transfers),
        skipped=dict(problem.skipped),
    )


def build_plan(
    problem: Problem, policy: str, moves: list[Move], tier_of: dict[int, Tier], *, copies_early: bool = True
) -> Plan:
    """Returns the plan that carries out the moves and keeps every other tensor on the device.

    A copy out is made only where the tensor was written since its last one; it is issued right after that write, or
    at the release if not `copies_early`.
    """
    by_tensor: dict[int, list[Move]] = {}
    for move in sorted(moves, key=lambda m: (m.slot.tensor, m.slot.start, m.slot.stop)):
        by_tensor.setdefault(move.slot.tensor, []).append(move)
    residencies: list[Residency] = []
    transfers: list[Transfer] = []
    for tensor, life in enumerate(problem.trace.lifetimes):
        own = by_tensor.get(tensor)
        if own is None:
            residencies.append(Residency(tensor, Tier.DEVICE, life.birth, life.death))
            continue
        mine = _transfers_of(problem, own, tier_of[tensor], copies_early)
        transfers += mine
        residencies += _stays_above(problem, own)
        start, stop = 0, problem.op_count
        if not problem.trace.tensors[tensor].is_persistent:
            start, stop = mine[0].issue_at, life.death
        residencies.append(Residency(tensor, tier_of[tensor], start, stop))
    return plan_from(problem, policy, residencies, _by_issue(transfers))


def plan_of(problem: Problem, policy: str, drafted: Draft) -> Plan:
    """Returns the plan of a draft."""
    residencies = _device_residencies(problem, drafted) + _lower_residencies(problem, drafted)
    return plan_from(problem, policy, residencies, _ordered_transfers(problem, drafted))


def assemble(problem: Problem, policy: str, windows: Windows) -> Plan | None:
    """Returns the plan of the windows, or None when the lower tiers have no room for it."""
    drafted = draft(problem, windows)
    return plan_of(problem, policy, drafted) if drafted is not None else None


def _lower_residencies(problem: Problem, drafted: Draft) -> list[Residency]:
    """Returns the stays of all copies below, as one where two of a piece touch or share the step's last op.

    Without that, a copy awaited at the tick at which the one before it ends would be dropped together with that one.
    """
    op_count, runs = problem.op_count, drafted.runs
    stays: dict[tuple[int, int], list[tuple[int, int]]] = {}
    rows = zip(runs.piece.tolist(), runs.tier.tolist(), drafted.start.tolist(), drafted.stop.tolist(), strict=True)
    for piece, tier, start, stop in rows:
        first = start % op_count
        stays.setdefault((piece, tier), []).append((first, first + stop - start))
    residencies: list[Residency] = []
    for (piece, tier), own in stays.items():
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(own):
            if merged and merged[-1][1] >= start:
                merged[-1] = merged[-1][0], stop
            else:
                merged.append((start, stop))
        if len(merged) > 1 and merged[-1][1] - op_count >= merged[0][0]:
            merged[0] = merged.pop()[0], merged[0][1] + op_count
        residencies += [_residency(problem, drafted.windows.pieces[piece], LOWER[tier], *stay) for stay in merged]
    return residencies


def _device_residencies(problem: Problem, drafted: Draft) -> list[Residency]:
    windows, runs, jobs = drafted.windows, drafted.runs, drafted.jobs
    op_count = problem.op_count
    begins = dict(zip(jobs.source[jobs.out_count :].tolist(), jobs.issue_at[jobs.out_count :].tolist(), strict=True))
    away: list[list[tuple[int, int | None]]] = [[] for _ in windows.pieces]
    owner, release = windows.piece[runs.gap].tolist(), windows.away_start[runs.gap].tolist()
    for position, (piece, stop) in enumerate(zip(owner, release, strict=True)):
        away[piece].append((stop, begins.get(position)))
    moved = set(windows.tensor.tolist())
    lifetimes, tensors = problem.trace.lifetimes, problem.trace.tensors
    residencies = [
        Residency(life.tensor, Tier.DEVICE, life.birth, life.death) for life in lifetimes if life.tensor not in moved
    ]
    for piece, gaps in zip(windows.pieces, away, strict=True):
        life = lifetimes[piece.tensor]
        start: int | None = life.birth
        if gaps and tensors[piece.tensor].is_persistent:
            start = (gaps[-1][1] or 0) - op_count
        for stop, begin in gaps:
            if start is not None and start < stop:
                residencies.append(_residency(problem, piece, Tier.DEVICE, start, stop))
            start = begin
        if start is not None and not (gaps and tensors[piece.tensor].is_persistent):
            residencies.append(_residency(problem, piece, Tier.DEVICE, start, life.death))
    return residencies


def _stop_byte(problem: Problem, piece: Piece) -> int:
    stop = piece.first_byte + piece.size_bytes
    return WHOLE if stop == problem.trace.tensors[piece.tensor].size_bytes else stop


def _residency(problem: Problem, piece: Piece, tier: Tier, start: int, stop: int) -> Residency:
    first = start % problem.op_count
    return Residency(piece.tensor, tier, first, first + stop - start, piece.first_byte, _stop_byte(problem, piece))


def _ordered_transfers(problem: Problem, drafted: Draft) -> list[Transfer]:
    pieces = drafted.windows.pieces
    ends = [(Tier.DEVICE, tier) for tier in LOWER] + [(tier, Tier.DEVICE) for tier in LOWER]
    return [
        Transfer(
            pieces[p].tensor, ends[n][0], ends[n][1], start, stop, rank, pieces[p].first_byte, _stop_byte(problem, pieces[p])
        )
        for n, p, start, stop, rank in zip(*(column.tolist() for column in _in_order(problem, drafted)), strict=True)
    ]


class _Ordered(NamedTuple):
    """Transfers in order of link and rank; a column each.

    Attributes:
        link: by number as in dispatch.hpp.
        piece: index into the windows' pieces.
        issue_at, ready_by, rank: as in `Transfer`.
    """

    link: Bytes
    piece: Bytes
    issue_at: Bytes
    ready_by: Bytes
    rank: Bytes


def _in_order(problem: Problem, drafted: Draft) -> _Ordered:
    """Returns the transfers of a draft, ranked by link: by tick of issue, awaited ones first, then in order of service."""
    op_count, jobs = problem.op_count, drafted.jobs
    position = np.empty(len(jobs.order), np.int64)
    position[jobs.order] = np.arange(len(jobs.order))
    is_first = (jobs.link < 2) & (jobs.issue_at == jobs.ready_by)
    issue = jobs.issue_at % op_count
    issue[is_first & (issue == 0)] = op_count  # before the step ends, and with it the residency that is copied
    ready = issue + jobs.ready_by - jobs.issue_at
    keys = np.lexsort((position, ready, ~is_first, issue, jobs.link))
    link = jobs.link[keys]
    ranks = np.arange(len(keys)) - np.searchsorted(link, link)
    return _Ordered(link, jobs.piece[keys], issue[keys], ready[keys], ranks)


def totals_of(problem: Problem, drafted: Draft, repeats: Sequence[Repeat], trace: Trace) -> Totals | None:
    """Returns what `simulate_totals` does for the plan of a draft, None where it is over the device's budget.

    Lower tiers have room for every draft. To make the plan takes ten times as long.

    Args:
        problem, drafted: as for `plan_of`.
        repeats: those that the problem leaves out; see [Note: remade problems] in tieroff/planner/extended/recompute.py.
        trace: that of the problem with these repeats.
    """
    if int((problem.live - _away_bytes(problem, drafted)).max(initial=0)) > problem.device_bytes:
        return None
    order = _in_order(problem, drafted)
    sizes = np.array([p.size_bytes for p in drafted.windows.pieces], np.int64)
    is_out = order.link < len(LOWER)
    lower = 1 + order.link % len(LOWER)
    ends = np.where(is_out, 0, lower), np.where(is_out, lower, 0)
    rows = np.column_stack([*ends, order.issue_at, order.ready_by, order.rank, sizes[order.piece]])
    return simulate_rows(rows, repeats, trace, problem.machine)


def _away_bytes(problem: Problem, drafted: Draft) -> Bytes:
    """Returns the bytes that are away from the device at each op: from their release until their load is issued."""
    windows, runs, jobs = drafted.windows, drafted.runs, drafted.jobs
    begin = windows.stop[runs.gap]  # of those whose life ends: the end
    begin[jobs.source[jobs.out_count :]] = jobs.issue_at[jobs.out_count :]
    return held_on_ring(problem.op_count, windows.away_start[runs.gap], begin, windows.size_bytes[runs.gap])
