"""The command `tieroff partition`. What it needs is imported inside it, as in `tieroff.cli`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tieroff.units import format_bytes

if TYPE_CHECKING:
    from tieroff.core.sharding import ShardingPlan, ShardingProblem

MARGIN_S = 1.0
"""Of a time limit: what checking and printing take."""
MARGIN_SHARE = 0.02


def partition(
    problem: Annotated[
        Path | None, typer.Option("--problem", help="A problem in the format of the IOPDDL contest, .json or .json.gz.")
    ] = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", min=1.0, help="Seconds for the whole command, reading the problem included.")
    ] = 60.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the search's random numbers.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Chooses how each operator of a step is split over devices: least cost within each device's memory."""
    if problem is None:
        raise typer.BadParameter("give --problem FILE")
    _solve(problem, time_limit, seed, as_json)


def _solve(path: Path, time_limit_s: float, seed: int, as_json: bool) -> None:
    from tieroff.core.io.iopddl import load_problem
    from tieroff.planner.sharding.search import search_sharding

    deadline = _started() + time_limit_s - MARGIN_S - MARGIN_SHARE * time_limit_s
    loaded = load_problem(path)
    # However slow the machine: what there is to find is found by a search that has some time.
    found = search_sharding(loaded, max(deadline - time.time(), 0.2), seed)
    if as_json:
        document = {
            "cost": found.cost,
            "bound": found.bound,
            "is_feasible": found.is_feasible,
            "strategies": list(found.strategies),
        }
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        _print(loaded, found)


def _started() -> float:
    """Returns when this process began, in seconds since the epoch."""
    import psutil

    return float(psutil.Process().create_time())


def _print(problem: ShardingProblem, found: ShardingPlan) -> None:
    from tieroff.core.check.sharding import count_sharding
    from tieroff.report.terminal import print_table

    bound = "none: nothing fits" if found.bound is None else f"{found.bound:.0f}"
    if found.cost is None:
        print_table("partition", ("problem", "cost", "bound"), [(problem.name, "nothing found", bound)])
        return
    peak = count_sharding(problem, found.strategies).peak_bytes
    gap = "-" if found.bound is None or not found.cost else f"{1 - found.bound / found.cost:.2%}"
    print_table(
        "partition",
        ("problem", "cost", "bound", "gap", "peak per device", "limit"),
        [(problem.name, str(found.cost), bound, gap, format_bytes(peak), format_bytes(problem.usage_limit))],
    )
