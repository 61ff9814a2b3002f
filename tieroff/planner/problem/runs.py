"""The copies below that windows ask for, the transfers that make and read them, and when each transfer is issued.

[Note: runs]
A run is a row of a piece's away gaps with no write between them. One copy below serves all of them: it is made once, after
the last write before the first gap, and stays until the last load. A piece with three gaps, of a persistent tensor
on a ring of 12 ops; W writes it, r reads it, dots are ops in which it is away:

    op              0  1  2  3  4  5  6  7  8  9  10 11
    uses            r  W  .  .  .  r  .  .  .  r  .  .    gap 0 is [2, 5), gap 1 [6, 9), gap 2 [10, 12)
    run 0                 o============================   made once, serves all three gaps
    copy out              >>                              issued at tick 2, awaited at the release
    loads                       <<          <<       <<   one per gap, awaited before the use that ends it

No write lies between the gaps, so the copy of gap 0 is still valid in gaps 1 and 2: one copy out, three loads. If op 5 wrote
too, gap 1 would begin run 1, with a copy of its own. If op 9 alone wrote, gap 2 would begin the run, and gaps 0 and 1 would
belong to the copy that was made in the step before. A persistent piece that nothing writes has one run that goes round the
ring, whose copy is never made nor dropped.

[Note: the order of a link]
Each link serves the transfer with the nearest deadline of those that can be issued; `dispatch` plays that through. A
transfer is then issued no earlier than those that its link served before it, so that the fixed order of the plan is
also the order of issue.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tieroff import _native
from tieroff.core.tensor import Tier
from tieroff.planner.problem.pieces import LOWER, Windows
from tieroff.planner.problem.problem import Bytes, Problem, ring_sum
from tieroff.units import NS_PER_S

_STEPS = 3  # until the links' backlog at the step's end has settled, nearly always
_ROUNDS = 4


@dataclass(slots=True)
class Runs:
    """Copies in lower tiers and the gaps that they serve, as arrays; see [Note: runs].

    Attributes:
        gap: windows' gaps in which bytes are away, in order.
        of_gap: run of each of them.
        piece, tier: of each run; the tier is an index into LOWER.
        is_copied: False for runs whose copy is never made.
        copy_from: tick from which the copy out can be issued.
        release: tick by which the copy is complete: the first gap's release.
        stop: tick up to which the copy takes room.
    """

    gap: Bytes
    of_gap: Bytes
    piece: Bytes
    tier: Bytes
    is_copied: NDArray[np.bool_]
    copy_from: Bytes
    release: Bytes
    stop: Bytes


class _Gaps(NamedTuple):
    """The gaps in which bytes are away, an entry each; those of a piece are neighbours, in order.

    Attributes:
        gap: its index in the windows.
        piece, stop: of the gap.
        first, last: per piece with any such gap, the entries of its first and of its last one.
    """

    gap: Bytes
    piece: Bytes
    stop: Bytes
    first: Bytes
    last: Bytes


def _away_gaps(windows: Windows) -> _Gaps:
    gap = np.flatnonzero(windows.is_away)
    piece = windows.piece[gap]
    first = np.flatnonzero(np.append(True, piece[1:] != piece[:-1])[: len(gap)])
    last = np.append(first[1:], len(gap))[: len(first)] - 1
    return _Gaps(gap, piece, windows.stop[gap], first, last)


def _needs_copy(problem: Problem, windows: Windows, gaps: _Gaps) -> NDArray[np.bool_]:
    """Returns, per away gap, whether its bytes were written since the away gap before it: no copy below is valid then."""
    tensors = windows.tensor[gaps.piece[gaps.first]]
    is_persistent = np.array([tensor.is_persistent for tensor in problem.trace.tensors], bool)[tensors]
    end_before = np.append(0, gaps.stop[:-1])[: len(gaps.gap)]
    # Before the first gap of a persistent piece came its last one, in the step before.
    end_before[gaps.first] = np.where(is_persistent, gaps.stop[gaps.last] - problem.op_count, 0)
    return windows.copy_from[gaps.gap] > end_before


def _number_runs(gaps: _Gaps, needs_copy: NDArray[np.bool_]) -> tuple[Bytes, Bytes, NDArray[np.bool_]]:
    """Returns the gap that begins each run; then, per gap, its run and whether that began in the step before."""
    begins = needs_copy.copy()
    begins[gaps.first] = True
    run = np.cumsum(begins) - 1
    # The first gaps of a piece belong to the copy that its last run made in the step before.
    turn = gaps.first[~needs_copy[gaps.first] & (run[gaps.first] != run[gaps.last])]
    target = np.arange(run[-1] + 1 if len(run) else 0)
    target[run[turn]] = run[gaps.last[np.searchsorted(gaps.first, turn)]]
    is_kept = target == np.arange(len(target))
    number = np.cumsum(is_kept) - 1
    return np.flatnonzero(begins)[is_kept], number[target[run]], target[run] != run


def find_runs(problem: Problem, windows: Windows) -> Runs:
    """Returns the runs of all pieces, each in the tier in which its gaps spend most time."""
    op_count = problem.op_count
    gaps = _away_gaps(windows)
    needs_copy = _needs_copy(problem, windows, gaps)
    heads, of_gap, is_carried = _number_runs(gaps, needs_copy)
    gap = gaps.gap
    # A load is awaited after residencies have ended at its tick, so its source stays for one op more.
    ends = gaps.stop + 1 - windows.is_last[gap] + np.where(is_carried, op_count, 0)
    stops = np.zeros(len(heads), np.int64)
    np.maximum.at(stops, of_gap, ends)
    time = np.zeros((len(heads), len(LOWER)), np.int64)
    np.add.at(time, (of_gap, windows.tier[gap]), windows.away_stop[gap] - windows.away_start[gap])
    return Runs(
        gap=gap,
        of_gap=of_gap,
        piece=gaps.piece[heads],
        tier=np.argmax(time, axis=1),
        is_copied=needs_copy[heads],
        copy_from=np.maximum(windows.copy_from[gap[heads]], windows.start[gap[heads]] - op_count),
        release=windows.away_start[gap[heads]],
        stop=stops,
    )


@dataclass(slots=True)
class Jobs:
    """Transfers: `link` by number as in dispatch.hpp, ticks as there; copies out first, by run, then loads, by gap."""

    link: Bytes
    issue_from: Bytes
    ready_by: Bytes
    size_bytes: Bytes
    piece: Bytes
    source: Bytes  # run of a copy out, position in `Runs.gap` of a load
    out_count: int
    issue_at: Bytes  # the tick that it gets
    order: Bytes  # transfers of a link in order of service


def make_jobs(problem: Problem, windows: Windows, runs: Runs) -> Jobs:
    """Returns the transfers of all runs."""
    outs = np.flatnonzero(runs.is_copied)
    loads = np.flatnonzero(windows.is_last[runs.gap] == 0)
    gaps = runs.gap[loads]
    release = runs.release[outs]
    from_ = np.maximum(np.minimum(runs.copy_from[outs], release), release - problem.op_count)
    piece = np.concatenate([runs.piece[outs], windows.piece[gaps]])
    sizes = np.array([p.size_bytes for p in windows.pieces], np.int64)
    return Jobs(
        link=np.concatenate([runs.tier[outs], 2 + runs.tier[runs.of_gap[loads]]]),
        issue_from=np.concatenate([from_, windows.away_stop[gaps]]),
        ready_by=np.concatenate([release, windows.stop[gaps]]),
        size_bytes=sizes[piece],
        piece=piece,
        source=np.concatenate([outs, loads]),
        out_count=len(outs),
        issue_at=np.zeros(len(piece), np.int64),
        order=np.zeros(len(piece), np.int64),
    )


def link_rates(problem: Problem) -> tuple[list[float], list[float]]:
    """Returns bytes per ns and latency in ns of the links by number as in dispatch.hpp, 0 for those there are not."""
    rates, latencies = [0.0] * 4, [0.0] * 4
    for number, tier in enumerate(LOWER):
        if tier in problem.tiers:
            for link, offset in zip(problem.links(tier), (0, 2), strict=True):
                rates[number + offset] = link.bytes_per_s / NS_PER_S
                latencies[number + offset] = float(link.latency_ns)
    return rates, latencies


def dispatch(problem: Problem, jobs: Jobs, step_count: int = _STEPS) -> int:
    """Gives every transfer its tick and its place; returns about how long a step takes, in ns."""
    machine = problem.machine
    step_ns, _, served, start_tick = _native.dispatch(
        np.diff(problem.starts_ns),
        jobs.link,
        jobs.issue_from,
        jobs.ready_by,
        jobs.size_bytes,
        *link_rates(problem),
        machine.nvme_shares_host_link,
        machine.duplex_share,
        step_count,
    )
    op_count = problem.op_count
    place = start_tick % op_count
    jobs.order = np.lexsort((served, place, jobs.link))
    available = place - (start_tick - jobs.issue_from)
    for link in range(4):
        mine = jobs.order[jobs.link[jobs.order] == link]
        if len(mine):
            line = np.concatenate([available[mine] - op_count, available[mine]])
            latest = np.maximum.accumulate(line)[len(mine) :]
            jobs.issue_at[mine] = np.maximum(latest, available[mine]) - available[mine] + jobs.issue_from[mine]
    return round(step_ns)


def _stays(problem: Problem, runs: Runs, jobs: Jobs) -> tuple[Bytes, Bytes]:
    """Returns, per run, the ticks over which its copy takes room, counted from this step's start; (0, n): always."""
    op_count = problem.op_count
    start, stop = np.zeros(len(runs.piece), np.int64), np.full(len(runs.piece), op_count, np.int64)
    outs = jobs.source[: jobs.out_count]
    start[outs] = jobs.issue_at[: jobs.out_count]
    # What is copied as the step ends is held from its last op on: a stay that began with the next step would be empty.
    start[outs[(start[outs] == runs.release[outs]) & (start[outs] % op_count == 0)]] -= 1
    stop[outs] = np.minimum(runs.stop[outs], start[outs] + op_count)
    return start, stop


def held_on_ring(op_count: int, start: Bytes, stop: Bytes, size_bytes: Bytes) -> Bytes:
    """Returns the sum per op of bytes that are held over [start, stop), from any step's ticks; at most once round the ring."""
    first = start % op_count
    return ring_sum(op_count, first, first + stop - start, size_bytes)


@dataclass(slots=True)
class Draft:
    """Windows with the order of their transfers: all of a plan but its form.

    Attributes:
        estimate_ns: about the step time of the plan.
    """

    windows: Windows
    runs: Runs
    jobs: Jobs
    start: Bytes  # of the stay below of each run
    stop: Bytes
    estimate_ns: int


def draft(problem: Problem, windows: Windows) -> Draft | None:
    """Returns the draft of windows, or None when the lower tiers have no room for it."""
    windows = _merged(windows)
    runs = find_runs(problem, windows)
    for _ in range(_ROUNDS):
        jobs = make_jobs(problem, windows, runs)
        estimate_ns = dispatch(problem, jobs)
        start, stop = _stays(problem, runs, jobs)
        found = _relieve(problem, windows, runs, start, stop)
        if found is None:
            return None
        if not found:
            tier = np.where(windows.is_away, windows.tier, -1)
            tier[runs.gap] = runs.tier[runs.of_gap]
            return Draft(replace(windows, tier=tier), runs, jobs, start, stop, estimate_ns)
    return None


def _relieve(problem: Problem, windows: Windows, runs: Runs, start: Bytes, stop: Bytes) -> bool | None:
    """Moves runs from HOST to NVME, those that stay longest first, until the host has room.

    Returns:
        True when runs moved, False when none had to, None when there is no room.
    """
    op_count, granule = problem.op_count, problem.capabilities.granule_bytes
    sizes = np.array([piece.size_bytes for piece in windows.pieces], np.int64)[runs.piece]
    sizes = -(-sizes // granule) * granule
    host, nvme = (
        held_on_ring(op_count, start[runs.tier == number], stop[runs.tier == number], sizes[runs.tier == number])
        for number in range(len(LOWER))
    )
    has_moved = False
    while int(host.max(initial=0)) > problem.budget[Tier.HOST]:
        op = int(np.argmax(host))
        stays = np.where((runs.tier == 0) & ((op - start) % op_count < stop - start), stop - start, 0)
        best = int(np.argmax(stays)) if len(stays) else -1
        if best < 0 or not stays[best] or Tier.NVME not in problem.tiers:
            return None
        covered = np.arange(start[best], stop[best]) % op_count
        host[covered] -= sizes[best]
        nvme[covered] += sizes[best]
        runs.tier[best] = 1
        has_moved = True
    return has_moved if int(nvme.max(initial=0)) <= problem.budget[Tier.NVME] else None


def _merged(windows: Windows) -> Windows:
    """Returns the same windows with neighbouring pieces of a tensor that move alike as one piece."""
    tensor = windows.tensor
    is_next = np.append(False, tensor[1:] == tensor[:-1])[: len(tensor)]
    if not is_next.any():
        return windows
    is_away = windows.is_away
    rows = np.column_stack([np.where(is_away, a, -1) for a in (windows.away_start, windows.away_stop, windows.tier)])
    counts = np.bincount(windows.piece, minlength=len(tensor))
    # All pieces of a tensor have as many gaps.
    gap_of_next = np.flatnonzero(is_next[windows.piece])
    differs = (rows[gap_of_next] != rows[gap_of_next - counts[windows.piece[gap_of_next]]]).any(axis=1)
    is_new = ~is_next
    is_new[windows.piece[gap_of_next[differs]]] = True
    owner = np.cumsum(is_new) - 1
    sizes = np.zeros(owner[-1] + 1, np.int64)
    np.add.at(sizes, owner, np.array([piece.size_bytes for piece in windows.pieces], np.int64))
    kept = is_new[windows.piece]
    pieces = [
        piece if piece.size_bytes == size else replace(piece, size_bytes=size)
        for piece, size in zip((windows.pieces[i] for i in np.flatnonzero(is_new)), sizes.tolist(), strict=True)
    ]
    columns = {
        name: np.ascontiguousarray(getattr(windows, name)[kept])
        for name in ("start", "stop", "away_start", "away_stop", "tier", "is_last", "copy_from")
    }
    mine = owner[windows.piece[kept]]
    return Windows(tuple(pieces), piece=mine, size_bytes=sizes[mine], **columns)
