"""From moves (who leaves in which gap, released and loaded when) to a plan."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tieroff.core.machine import LINK_NAMES
from tieroff.core.plan import Plan, Residency, Transfer
from tieroff.core.tensor import Tier
from tieroff.planner.problem.problem import Problem, Slot


@dataclass(frozen=True, slots=True)
class Move:
    """A tensor is off the device over [release_at, load_at) within a slot.

    `slot.start <= release_at <= load_at <= slot.stop`; equal only at the boundary, where
    `release_at <= n <= load_at` unless the executor can cross the step's end.
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


def _transfers(problem: Problem, moves: list[Move], tier: Tier, copies_early: bool) -> list[Transfer]:
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


def _device_residencies(problem: Problem, moves: list[Move]) -> list[Residency]:
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


def _ranked(transfers: list[Transfer]) -> tuple[Transfer, ...]:
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
    op_count, tensors = problem.op_count, problem.trace.tensors
    rows: dict[Tier, list[tuple[int, int, int]]] = {tier: [] for tier in Tier}
    for r in residencies:
        rows[r.tier].append((r.start, r.stop, (r.stop_byte or tensors[r.tensor].size_bytes) - r.first_byte))
    peaks: dict[Tier, int] = {}
    for tier, items in rows.items():
        start, stop, size = np.array(items, np.int64).reshape(-1, 3).T
        change = np.zeros(2 * op_count + 1, np.int64)
        np.add.at(change, start, size)
        np.subtract.at(change, stop, size)
        line = np.cumsum(change[:-1])
        used = line[:op_count] + line[op_count:]
        if tier is Tier.DEVICE:
            used = used + np.array([op.transient_bytes for op in problem.trace.ops], np.int64)
        peaks[tier] = int(used.max(initial=0))
    return peaks


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
    problem: Problem,
    policy: str,
    moves: list[Move],
    tier_of: dict[int, Tier],
    *,
    copies_early: bool = True,
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
        mine = _transfers(problem, own, tier_of[tensor], copies_early)
        transfers += mine
        residencies += _device_residencies(problem, own)
        start, stop = 0, problem.op_count
        if not problem.trace.tensors[tensor].is_persistent:
            start, stop = mine[0].issue_at, life.death
        residencies.append(Residency(tensor, tier_of[tensor], start, stop))
    return plan_from(problem, policy, residencies, _ranked(transfers))
