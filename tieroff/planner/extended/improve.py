"""Local search on windows: small changes where the step waits, played through natively; see `tieroff::improve`.

A change keeps a gap, moves a run to the other lower tier, issues a load earlier or awaits a copy later. Other windows
then widen until every op fits, and shrink again where there is room. Changes are chosen near what the step waits for.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tieroff.planner.native import _native
from tieroff.planner.problem.pieces import LOWER, Windows
from tieroff.planner.problem.problem import Problem
from tieroff.planner.problem.runs import link_rates


def improve(problem: Problem, windows: Windows, *, seed: int, work: int) -> Windows:
    """Returns windows whose step is no longer by the dispatcher's clock, after at most `work` changes tried.

    Args:
        problem: what is planned.
        windows: that fit at every op, as in `Draft.windows`.
        seed: the same seed gives the same windows.
        work: changes to try.
    """
    op_count = problem.op_count
    is_away = windows.is_away
    change = np.zeros(2 * op_count + 1, np.int64)
    np.subtract.at(change, windows.away_start[is_away], windows.size_bytes[is_away])
    np.add.at(change, windows.away_stop[is_away], windows.size_bytes[is_away])
    line = np.cumsum(change)
    usage = problem.live + line[:op_count] + line[op_count : 2 * op_count]
    is_persistent = np.array([tensor.is_persistent for tensor in problem.trace.tensors], np.int64)
    away_start, away_stop, tier = windows.away_start.copy(), windows.away_stop.copy(), windows.tier.copy()
    rates, latencies = link_rates(problem)
    machine = problem.machine
    _native.improve(
        usage=usage,
        duration_ns=np.diff(problem.starts_ns),
        bytes_per_ns=rates,
        latency_ns=latencies,
        nvme_shares_host_link=machine.nvme_shares_host_link,
        duplex_share=machine.duplex_share,
        device_bytes=problem.device_bytes,
        lower_bytes=[problem.budget[lower] if lower in problem.tiers else 0 for lower in LOWER],
        granule_bytes=problem.capabilities.granule_bytes,
        piece=windows.piece,
        start=windows.start,
        stop=windows.stop,
        size_bytes=windows.size_bytes,
        is_last=windows.is_last,
        copy_from=windows.copy_from,
        is_persistent=is_persistent[windows.tensor[windows.piece]],
        away_start=away_start,
        away_stop=away_stop,
        tier=tier,
        seed=seed,
        work=work,
    )
    return replace(windows, away_start=away_start, away_stop=away_stop, tier=tier)
