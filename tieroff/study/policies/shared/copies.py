"""When copies run: a nominal queue per link, and transfers of activations issued or awaited elsewhere than by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tieroff.core.plan import Plan, Residency, Transfer
from tieroff.core.tensor import Tier
from tieroff.planner.problem.assemble import Move, peak_bytes
from tieroff.planner.problem.problem import Bytes, Problem, Slot
from tieroff.planner.simulate.options import rerank


def usage_without(problem: Problem, moves: list[Move]) -> Bytes:
    """Returns the bytes on the device at each op with the moved tensors away."""
    usage = problem.live.copy()
    n = problem.op_count
    for move in moves:
        size = problem.size_bytes(move.slot.tensor)
        line = [(move.release_at, move.load_at)]
        if move.slot.is_boundary:
            line = [(move.release_at, n), (0, move.load_at - n)] if move.load_at >= n else line
        for start, stop in line:
            usage[start:stop] -= size if start < stop else 0
    return usage


def copied_ns(problem: Problem, issue_at: Mapping[Slot, int], tier_of: Mapping[int, Tier]) -> dict[Slot, int]:
    """Returns when copies out end that are issued at these ticks, one at a time per tier, beside ops that never wait."""
    free_ns: dict[Tier, int] = {}
    done: dict[Slot, int] = {}
    for slot in sorted(issue_at, key=lambda s: (issue_at[s], s.tensor)):
        tier = tier_of[slot.tensor]
        begin = max(int(problem.starts_ns[issue_at[slot]]), free_ns.get(tier, 0))
        free_ns[tier] = begin + problem.links(tier)[0].transfer_ns(problem.size_bytes(slot.tensor))
        done[slot] = free_ns[tier]
    return done


def release_when_copied(
    problem: Problem, moves: list[Move], tier_of: Mapping[int, Tier], usage: Bytes, issue_at: Mapping[Slot, int] | None = None
) -> list[Move]:
    """Returns the moves with each tensor kept until its copy out is expected to be done, as far as there is room.

    Args:
        problem: the problem.
        moves: with the earliest releases.
        tier_of: tiers of the moved tensors.
        usage: the device's bytes at each op with the tensors away; what stays longer is added to it.
        issue_at: ticks of the copies out, by slot; the releases if None.
    """
    starts = problem.starts_ns
    done = copied_ns(problem, issue_at or {move.slot: move.release_at for move in moves}, tier_of)
    result: list[Move] = []
    for move in sorted(moves, key=lambda m: (m.release_at, m.slot.tensor)):
        size = problem.size_bytes(move.slot.tensor)
        stop = min(int(np.searchsorted(starts, done[move.slot])), move.load_at - 1, problem.op_count)
        over = usage[move.release_at : stop] > problem.device_bytes - size
        if over.any():
            stop = move.release_at + int(np.argmax(over))
        stop = max(stop, move.release_at)
        usage[move.release_at : stop] += size
        result.append(replace(move, release_at=stop))
    return result


def issued_at_start(moves: list[Move]) -> dict[tuple[int, int], int]:
    """Returns, for `retimed`, that copies out are issued when the slots of their moves begin."""
    return {(move.slot.tensor, move.release_at): move.slot.start for move in moves}


def retimed(
    problem: Problem, plan: Plan, issue_at: Mapping[tuple[int, int], int], ready_by: Mapping[int, int] | None = None
) -> Plan:
    """Returns the plan with transfers of what does not persist issued later or awaited earlier.

    Args:
        problem: what the plan is for.
        plan: as `build_plan` makes it.
        issue_at: tensor and release -> earliest tick at which that copy out may be issued; the release stays.
        ready_by: tensor, of one move -> tick at which its load is awaited, if before its use; its issue stays.
    """
    transfers: list[Transfer] = []
    begins: dict[int, int] = {}
    for t in plan.transfers:
        if problem.trace.tensors[t.tensor].is_persistent:
            pass
        elif t.source is Tier.DEVICE:
            t = replace(t, issue_at=min(max(t.issue_at, issue_at.get((t.tensor, t.ready_by), 0)), t.ready_by))
            begins[t.tensor] = min(begins.get(t.tensor, t.issue_at), t.issue_at)
        elif ready_by is not None and t.tensor in ready_by:
            t = replace(t, ready_by=max(t.issue_at, min(t.ready_by, ready_by[t.tensor])))
        transfers.append(t)
    residencies: list[Residency] = [
        replace(r, start=begins[r.tensor]) if r.tier is not Tier.DEVICE and r.tensor in begins else r for r in plan.residencies
    ]
    peaks = peak_bytes(problem, residencies)
    return replace(plan, residencies=tuple(residencies), transfers=rerank(transfers), peak_bytes=peaks)
