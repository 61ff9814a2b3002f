"""What `auto` reaches: on the traces of G10 beside its published times, and on traces of small PyTorch models.

Every result is shown with a lower bound: the cheap one and, with `--bound lp` or `--effort high`, that of the linear program,
which takes longer with more slots and is not always tighter. With `--json`, bounds in the file are reused where trace,
machine, budgets and slots are the same. Rows of one trace form a sweep: more memory is never slower.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness import g10_cells
from harness.data import OWN_FOLDER, ROOT, SLOW_MACHINE
from harness.plan_tables import show
from harness.results import Report, command_of, parse_size, progress, save, when_and_where
from tieroff.core.machine import Machine, load_machine
from tieroff.core.plan import IDEAL_EXECUTOR, Capabilities
from tieroff.core.tensor import Tier
from tieroff.core.trace import Trace
from tieroff.errors import TieroffError
from tieroff.planner.bounds.bounds import Scope, relaxed_bound_ns, scope_of
from tieroff.planner.problem.problem import Problem, live_bytes, make_problem
from tieroff.report.terminal import make_console
from tieroff.study.compare.sweep import noise_rows, sweep
from tieroff.study.profiles.files import load_trace
from tieroff.units import GIB, NS_PER_S

HOSTS = (0, 32 * GIB, g10_cells.HOST_BYTES)

EXECUTORS = {
    "runtime": Capabilities(gradient_follows_parameter=True, min_bytes=64 * 2**10, granule_bytes=4096),
    "ideal": IDEAL_EXECUTOR,
}
MOVES_ALONE = replace(IDEAL_EXECUTOR, repeats_ops=False, recompute=False, updates_on_host=False)
SHARES = (0.9, 0.7, 0.5, 0.35, 0.25)
OWN_HOST_SHARE = 0.25
NOISE_SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25)
NOISE_SEEDS = (0, 1, 2)
PARTS = ("g10", "own", "noise")


LEFT_OUT = (
    "The model leaves out: page faults and the software's own time per transfer beyond the stated latency, memory that "
    "an allocator loses in pieces, ops that run slower while transfers use the same memory, drives whose speed changes "
    "with what was written before, and durations that differ from the trace's. G10's times come from its own simulator, "
    "which counts pages of 4 KiB and faults; all others from this one."
)

Bounds = dict[str, float]


def geometric_mean(values: Sequence[float]) -> float | None:
    """Returns the geometric mean of values above 0, None of none."""
    return math.exp(statistics.fmean(math.log(value) for value in values)) if values else None


def bound_key(problem: Problem, scope: Scope, slot_counts: Sequence[int]) -> str:
    """Returns a digest of what a bound of the linear program depends on, apart from the code."""
    trace, limits = problem.trace, {tier.value: size for tier, size in problem.budget.items()}
    durations = [op.duration_ns for op in trace.ops]
    allowed = [repr(problem.capabilities), asdict(scope), list(slot_counts)]
    parts = [trace.digest, durations, asdict(problem.machine), limits, *allowed]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def swept_rows(
    trace: Trace,
    machine: Machine,
    budgets: Sequence[dict[Tier, int]],
    capabilities: Capabilities,
    arguments: argparse.Namespace,
    known: Bounds,
) -> list[dict[str, Any]]:
    """Returns a row per budget: that of `tieroff plan` with its shares; its planning time is the median of repetitions."""
    runs = [sweep(trace, machine, budgets, "auto", arguments.effort, capabilities) for _ in range(arguments.repeat)]
    rows: list[dict[str, Any]] = []
    for index, budget in enumerate(budgets):
        plan = runs[0][index].plan
        row: dict[str, Any] = runs[0][index].row.as_dict()
        row |= {f"{tier.value}_budget_bytes": size for tier, size in budget.items()}
        row["lp_bound_s"] = row["ideal_share"] = row["above_bound"] = None
        if plan is not None:
            row["plan_s"] = statistics.median(one[index].row.plan_s or 0.0 for one in runs)
            if arguments.bound == "lp":
                problem, scope = make_problem(trace, machine, budget, capabilities), scope_of(plan)
                key = bound_key(problem, scope, arguments.slots)
                if key not in known:
                    known[key] = relaxed_bound_ns(problem, scope, slot_counts=tuple(arguments.slots)) / NS_PER_S
                row["lp_bound_s"] = known[key]
                row["bound_s"] = max(row["bound_s"], known[key])
            row["ideal_share"] = row["ideal_s"] / row["step_s"]
            row["above_bound"] = row["step_s"] / row["bound_s"] - 1
        rows.append(row)
    return rows


def g10_rows(arguments: argparse.Namespace, known: Bounds, report: Report) -> Iterator[dict[str, Any]]:
    """Yields a row per trace and amount of host memory."""
    published = g10_cells.published_times(arguments.data)
    capabilities = MOVES_ALONE if arguments.moves_alone else IDEAL_EXECUTOR
    for name in arguments.cells or g10_cells.all_cells(arguments.data):
        report(name)
        trace = load_trace(arguments.data / name)
        budgets = [g10_cells.budget_of(host) for host in arguments.host]
        for host, row in zip(
            arguments.host, swept_rows(trace, g10_cells.MACHINE, budgets, capabilities, arguments, known), strict=True
        ):
            yield {"cell": name, "host_bytes": host, "g10_s": published.get((name, host)), **row}


def own_rows(arguments: argparse.Namespace, known: Bounds, report: Report) -> Iterator[dict[str, Any]]:
    """Yields a row per trace, machine, executor and share of the peak."""
    machines = {SLOW_MACHINE.name: SLOW_MACHINE, **{path.stem: load_machine(path) for path in arguments.machine}}
    for path in sorted(arguments.own.glob("*.json")):
        trace = load_trace(path)
        peak_bytes = int(live_bytes(trace).max())
        for machine_name, machine in machines.items():
            report(f"{path.stem} on {machine_name}")
            lower = {
                Tier.HOST: int(OWN_HOST_SHARE * peak_bytes),
                Tier.NVME: g10_cells.NVME_BYTES if machine.has_tier(Tier.NVME) else 0,
            }
            budgets = [{Tier.DEVICE: int(share * peak_bytes), **lower} for share in SHARES]
            for executor, capabilities in EXECUTORS.items():
                rows = swept_rows(trace, machine, budgets, capabilities, arguments, known)
                for share, row in zip(SHARES, rows, strict=True):
                    yield {"cell": path.stem, "machine": machine_name, "executor": executor, "share": share, **row}


def noisy_rows(arguments: argparse.Namespace, report: Report) -> Iterator[dict[str, Any]]:
    """Yields a row per published trace and share of noise, over all seeds: the largest step over ideal."""
    for name in arguments.cells or g10_cells.published_cells(arguments.data):
        report(f"{name}, noise")
        trace = load_trace(arguments.data / name)
        found = noise_rows(
            trace, g10_cells.MACHINE, g10_cells.budget_of(g10_cells.HOST_BYTES), NOISE_SHARES, NOISE_SEEDS, arguments.effort
        )
        for share in NOISE_SHARES:
            rows = [row for row in found if row.share == share]
            yield {
                "cell": name,
                "noise": share,
                "step_over_ideal": max(row.step_s / row.ideal_s for row in rows),
                "informed_step_over_ideal": max(row.informed_step_s / row.ideal_s for row in rows),
            }


def summaries(rows: Sequence[dict[str, Any]], cells: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the geometric means of ideal/step per amount of host memory: of `auto`, and of G10 where it is published."""
    found = []
    for host in dict.fromkeys(row["host_bytes"] for row in rows):
        planned = [row for row in rows if row["host_bytes"] == host and row["step_s"] is not None]
        in_table = [row for row in planned if row["cell"] in cells]
        beside = [row for row in planned if row["g10_s"] is not None]
        found.append(
            {
                "host_bytes": host,
                "cells": len(planned),
                "infeasible": sum(row["host_bytes"] == host and row["step_s"] is None for row in rows),
                "ideal_share": geometric_mean([row["ideal_share"] for row in planned]),
                "table_cells": len(in_table),
                "table_ideal_share": geometric_mean([row["ideal_share"] for row in in_table]),
                "published_cells": len(beside),
                "published_ideal_share": geometric_mean([row["ideal_share"] for row in beside]),
                "g10_ideal_share": geometric_mean([row["ideal_s"] / row["g10_s"] for row in beside]),
                "slower_than_g10": [row["cell"] for row in beside if g10_cells.is_slower(row["step_s"], row["g10_s"])],
                "above_bound_max": max((row["above_bound"] for row in planned), default=None),
                "plan_s_max": max((row["plan_s"] for row in planned), default=None),
            }
        )
    return found


def begin(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    """Returns the document that is written to JSON, with no rows yet."""
    return {
        **when_and_where(command),
        "effort": arguments.effort,
        "machine": asdict(g10_cells.MACHINE),
        "device_bytes": g10_cells.DEVICE_BYTES,
        "left_out": LEFT_OUT,
        "summary": [],
        "rows": [],
        "own": [],
        "noise": [],
        "bounds": known_bounds(arguments.json) if arguments.json is not None and not arguments.fresh else {},
    }


def run(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    """Fills the document row by row, so that what was found before an interruption is in it."""
    known: Bounds = found["bounds"]
    cells = len(arguments.cells or g10_cells.all_cells(arguments.data))
    noisy = len(arguments.cells or g10_cells.published_cells(arguments.data))
    own = len(list(arguments.own.glob("*.json"))) * (1 + len(arguments.machine))
    total = sum({"g10": cells, "own": own, "noise": noisy}[part] for part in arguments.parts)
    with progress(total) as report:
        if "g10" in arguments.parts:
            found["rows"].extend(g10_rows(arguments, known, report))
            found["summary"] = summaries(found["rows"], g10_cells.published_cells(arguments.data))
        if "own" in arguments.parts:
            found["own"].extend(own_rows(arguments, known, report))
        if "noise" in arguments.parts:
            found["noise"].extend(noisy_rows(arguments, report))


def known_bounds(path: Path) -> Bounds:
    """Returns the bounds of the linear program in a file that this script wrote, {} if there is none."""
    bounds: Bounds = json.loads(path.read_text())["bounds"] if path.is_file() else {}
    return bounds


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of this script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["g10", "own"], help="which tables (default: g10 own)")
    parser.add_argument("--effort", choices=("fast", "high"), default="fast", help="fast: seconds a row; high: minutes")
    parser.add_argument("--bound", choices=("cheap", "lp"), default="cheap", help="lp: also that of the linear program")
    parser.add_argument("--slots", nargs="+", type=int, default=[30], help="of the linear program, to try in turn")
    parser.add_argument("--moves-alone", action="store_true", help="G10's traces without recomputing, as G10 itself does")
    parser.add_argument("--cells", nargs="+", default=None, metavar="TRACE", help="folders of --data; all when left out")
    parser.add_argument("--host", nargs="+", type=parse_size, default=list(HOSTS), help="host memory (default: 0 32GiB 128GiB)")
    parser.add_argument("--repeat", type=int, default=1, help="plan each row this often; planning time is the median")
    parser.add_argument(
        "--machine",
        nargs="*",
        type=Path,
        default=[ROOT / "configs/machines/rtx4090_1xgen4.toml"],
        help="machine files for the own traces, beside a slow one",
    )
    parser.add_argument("--data", type=Path, default=g10_cells.FOLDER, help="folder of G10's traces and published times")
    parser.add_argument("--own", type=Path, default=OWN_FOLDER, help="folder of own traces")
    parser.add_argument(
        "--record", type=Path, default=None, metavar="DIR", help="record the own traces again into DIR, and end"
    )
    parser.add_argument("--fresh", action="store_true", help="use no bound that --json has already")
    parser.add_argument("--json", type=Path, default=None, help="also write everything to this file")
    arguments = parser.parse_args(given)
    if arguments.repeat < 1:
        parser.error(f"expected --repeat of at least 1, got {arguments.repeat}")
    if min(arguments.slots) < 1:
        parser.error(f"expected --slots of at least 1, got {min(arguments.slots)}")
    known = g10_cells.all_cells(arguments.data)
    for name in arguments.cells or ():
        if name not in known:
            parser.error(f"expected --cells from {', '.join(known)}, got {name}")
    return arguments


def main(given: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = parse_arguments(given)
    if arguments.record is not None:
        from harness.own_traces import record_all  # torch is needed for this alone

        for path in record_all(arguments.record):
            print(path)
        return 0
    found = begin(arguments, command_of(__file__, given))
    try:
        run(arguments, found)
    except TieroffError as error:
        print(f"bench_plan: {error}", file=sys.stderr)
        return 1
    finally:
        save(arguments.json, found, indent=2)
    show(make_console(), found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
