"""Every policy on every trace: those of G10, beside the published times, and those of this project's own models.

Rows are those of `tieroff compare`: `auto` runs last on each step and takes every row's plan as a candidate. With --json,
steps that the file has already are not planned again. With --page and --figure the page and its figure are made from it.
The exit status is 1 if a row is faster than `auto`, or if a policy needs more than 30 s of CPU time to plan a trace of G10.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from harness import g10_cells
from harness.data import OWN_FOLDER, SLOW_MACHINE
from harness.policy_tables import PUBLISHED, broken, figure, policy_names, with_tables
from harness.results import command_of, progress
from tieroff.core.machine import Machine
from tieroff.core.tensor import Tier
from tieroff.core.trace import Trace
from tieroff.errors import TieroffError
from tieroff.planner.problem.problem import live_bytes
from tieroff.study.compare.rows import compare_rows
from tieroff.study.profiles.files import load_trace

SHARES = (0.5, 0.25)
PLAN_S_MAX = 30.0
_LEFT_OUT = {"reason", "kind", "options"}
"""Columns of a row that are the same in every cell, or text for people."""


def published() -> dict[tuple[str, str], float | None]:
    """Returns the published seconds per step by trace and policy; None where it does not fit."""
    with (g10_cells.FOLDER / "published_times.csv").open(newline="") as file:
        return {
            (g10_cells.cell_name(row), policy): float(row[column]) if row[column] else None
            for row in csv.DictReader(file)
            for policy, column in PUBLISHED.items()
        }


def compared(
    trace: Trace, machine: Machine, budget: dict[Tier, int], policies: Sequence[str], effort: str
) -> Iterator[dict[str, Any]]:
    """Yields a row per policy, without what is the same in every cell, and with the CPU's time of planning it."""
    begun: list[float] = []
    results = compare_rows(
        trace, machine, budget, policies, effort, on_progress=lambda what, share: begun.append(time.process_time())
    )
    spent = [after - before for before, after in itertools.pairwise([*begun[: len(results)], time.process_time()])]
    planned = sorted(results, key=lambda r: (r.row.policy == "auto", r.row.policy))  # the order in which they are planned
    cpu_s = {result.row.policy: time_s for result, time_s in zip(planned, spent, strict=True)}
    for result in results:
        row = {key: value for key, value in result.row.as_dict().items() if key not in _LEFT_OUT}
        yield row | {"plan_cpu_s": cpu_s[result.row.policy]}


def g10_rows(cell: str, policies: Sequence[str], effort: str) -> list[dict[str, Any]]:
    """Returns the rows of a trace of G10, with the published times there are."""
    times = published()
    budget = g10_cells.budget_of(g10_cells.HOST_BYTES)
    rows = []
    for row in compared(load_trace(g10_cells.trace_folder(cell)), g10_cells.MACHINE, budget, policies, effort):
        key = cell, row["policy"]
        beside = {"published_s": times[key]} if key in times else {}
        rows.append({"part": "g10", "cell": cell, "share": None, **beside, **row})
    return rows


def own_rows(path: Path, share: float, policies: Sequence[str], effort: str) -> list[dict[str, Any]]:
    """Returns the rows of an own trace at a share of its peak, with as much host memory as the peak and an NVMe."""
    trace = load_trace(path)
    peak_bytes = int(live_bytes(trace).max())
    budget = {Tier.DEVICE: int(share * peak_bytes), Tier.HOST: peak_bytes, Tier.NVME: g10_cells.NVME_BYTES}
    head = {"part": "own", "cell": path.stem, "share": share}
    return [{**head, **row} for row in compared(trace, SLOW_MACHINE, budget, policies, effort)]


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of this script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--effort", choices=("fast", "high"), default="fast", help="of planning and bounds")
    parser.add_argument("--cells", nargs="*", default=None, metavar="TRACE", help="traces of G10; all when left out")
    parser.add_argument("--own", nargs="*", default=None, metavar="TRACE", help="own traces by name; all when left out")
    parser.add_argument("--policies", nargs="+", default=None, metavar="NAME", help="all when left out")
    parser.add_argument("--fresh", action="store_true", help="plan every step again")
    parser.add_argument("--json", type=Path, default=None, help="write the rows to this file, and use those it has")
    parser.add_argument("--page", type=Path, default=None, help="put the tables between the markers of this Markdown file")
    parser.add_argument("--figure", type=Path, default=None, help="write the figure to this SVG file")
    arguments = parser.parse_args(given)
    known = {"cells": g10_cells.all_cells(), "own": [path.stem for path in sorted(OWN_FOLDER.glob("*.json"))]}
    known["policies"] = policy_names()
    for option, names in known.items():
        for name in getattr(arguments, option) or ():
            if name not in names:
                parser.error(f"expected --{option} from {', '.join(names)}, got {name}")
        if getattr(arguments, option) is None:
            setattr(arguments, option, names)
    return arguments


def begin(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    """Returns the document to fill, with the rows that its file has."""
    found: dict[str, Any] = {"date": date.today().isoformat(), "command": command, "effort": arguments.effort, "rows": []}
    if arguments.json is not None and arguments.json.is_file() and not arguments.fresh:
        found["rows"] = json.loads(arguments.json.read_text())["rows"]
    return found


def save(path: Path, found: dict[str, Any]) -> None:
    """Writes the document, a row per line, so that two of them can be compared."""
    head = {key: value for key, value in found.items() if key != "rows"}
    lines = ",\n".join(json.dumps(row) for row in found["rows"])
    path.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n]\n}}\n')


def run(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    """Plans every step that the document lacks, and writes it after each."""
    known = {(row["part"], row["cell"], row["share"]) for row in found["rows"]}
    steps: list[tuple[str, str, float | None]] = [("g10", cell, None) for cell in arguments.cells]
    steps.extend(("own", name, share) for name in arguments.own for share in SHARES)
    left = [step for step in steps if step not in known]
    with progress(len(left)) as report:
        for _, cell, share in left:
            report(cell if share is None else f"{cell} {share:.0%}")
            if share is None:
                rows = g10_rows(cell, arguments.policies, arguments.effort)
            else:
                rows = own_rows(OWN_FOLDER / f"{cell}.json", share, arguments.policies, arguments.effort)
            found["rows"].extend(rows)
            if arguments.json is not None:
                save(arguments.json, found)
    found["rows"].sort(key=_place)


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    cells = g10_cells.all_cells()
    cell = cells.index(row["cell"]) if row["part"] == "g10" else row["cell"]
    return row["part"], cell, -(row["share"] or 0.0), policy_names().index(row["policy"])


def main(given: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = parse_arguments(given)
    found = begin(arguments, command_of(__file__, given))
    try:
        run(arguments, found)
    except TieroffError as error:
        print(f"bench_policies: {error}", file=sys.stderr)
        return 1
    if arguments.json is not None:
        save(arguments.json, found)
    if arguments.page is not None:
        arguments.page.write_text(with_tables(arguments.page.read_text(encoding="utf-8"), found), encoding="utf-8")
    if arguments.figure is not None:
        arguments.figure.write_text(figure(found), encoding="utf-8")
    messages = broken(found["rows"], PLAN_S_MAX)
    print(f"{len(found['rows'])} rows; {len(messages)} that should not be", *messages, sep="\n")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
