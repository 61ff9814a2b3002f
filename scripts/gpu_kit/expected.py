"""Writes what is expected of the kit's rows on a GPU, before any is measured there.

    cd scripts && python -m gpu_kit.expected --machine ../configs/machines/h100_80gb.toml --host 96GiB \
        --out ../docs/results/expected_h100.json

A prediction is what `tieroff plan` says of the same model on fake tensors: step, interval, peak of the device, bytes that
move. Rows of other libraries have none.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from gpu_kit.rows import ROWS, Row
from gpu_kit.subjects import SUBJECTS, SubjectAbsent, adamw, foreach_adamw
from tieroff.core.machine import Machine, load_machine
from tieroff.core.plan import Capabilities
from tieroff.core.tensor import Tier
from tieroff.core.trace import Trace
from tieroff.device_budget import DeviceBudget
from tieroff.errors import CaptureError
from tieroff.planner.least import least
from tieroff.planner.make_plan import default_capabilities
from tieroff.planner.problem.problem import make_problem
from tieroff.study.compare.rows import plan_row
from tieroff.tracing.clock.interval import interval
from tieroff.tracing.clock.model import Constants
from tieroff.tracing.dry import dry_trace
from tieroff.units import parse_bytes

WAYS = ("plain", "tieroff", "tieroff-host")


def budget_bytes(row: Row, trace: Trace, machine: Machine, lower: dict[Tier, int]) -> int:
    """Returns the device budget of a row; of a plain one, which moves nothing, the step's peak."""
    if row.budget is None:
        return trace.peak_bytes
    wanted = DeviceBudget.parse(row.budget).resolve(trace.peak_bytes)
    problem = make_problem(trace, machine, {Tier.DEVICE: wanted, **lower}, capabilities_of(row, trace), "fast")
    return max(wanted, least(problem).enough_bytes)  # as a budget that is not strict is raised


def capabilities_of(row: Row, trace: Trace) -> Capabilities:
    """Returns what plans of a row may ask for."""
    found = default_capabilities(trace)
    return found if row.way == "tieroff-host" else replace(found, updates_on_host=False, updates_cross=False)


def expected(row: Row, trace: Trace, machine: Machine, host_bytes: int, nvme_bytes: int) -> dict[str, Any]:
    """Returns the prediction of one row."""
    lower = (
        {Tier.HOST: 0, Tier.NVME: nvme_bytes} if row.is_on_drive else {Tier.HOST: host_bytes * 7 // 8}
    )  # a plan leaves an eighth free
    budget = {Tier.DEVICE: budget_bytes(row, trace, machine, lower), **lower}
    found = plan_row(trace, machine, budget, capabilities=capabilities_of(row, trace)).row
    low, high = interval(machine, Constants.shipped().of(machine.clock))
    return {
        "key": row.key,
        "status": found.status,
        "reason": found.reason,
        "step_s": found.step_s,
        "interval_s": None if found.step_s is None else [low * found.step_s, high * found.step_s],
        "ideal_s": found.ideal_s,
        "bound_s": found.bound_s,
        "peak_device_bytes": found.peak_device_bytes,
        "peak_host_bytes": found.peak_host_bytes,
        "d2h_bytes": found.d2h_bytes,
        "h2d_bytes": found.h2d_bytes,
    }


def main(given: Sequence[str] | None = None) -> int:
    """Writes the file; rows whose model needs what is not installed are named in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=Path, required=True)
    parser.add_argument("--host", type=parse_bytes, required=True, help="host memory for tieroff")
    parser.add_argument("--nvme", type=parse_bytes, default=40 << 30, help="of the drive, for tieroff")
    parser.add_argument("--nvme-write", type=parse_bytes, default=1_700_000_000, help="bytes per second")
    parser.add_argument("--nvme-read", type=parse_bytes, default=3_400_000_000, help="bytes per second")
    parser.add_argument("--cpu-update", type=parse_bytes, default=39_000_000_000, help="bytes of state per second, of 16 cores")
    parser.add_argument("--host-memory", type=parse_bytes, default=140_000_000_000, help="bytes per second")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--row", nargs="+", default=(), help="make these rows anew, and keep what the file has of others")
    options = parser.parse_args(given)
    machine = replace(
        load_machine(options.machine),
        nvme_bytes=options.nvme,
        nvme_write_bytes_per_s=options.nvme_write,
        nvme_read_bytes_per_s=options.nvme_read,
        cpu_update_bytes_per_s=options.cpu_update,
        host_memory_bytes_per_s=options.host_memory,
    )
    traces: dict[tuple[str, str], Trace] = {}
    before = json.loads(options.out.read_text())["rows"] if options.out.is_file() and options.row else []
    known = {row["key"]: row for row in before}
    rows = []
    for row in ROWS.values():
        if row.way not in WAYS:
            continue
        if row.key in known and not any(name in row.key for name in options.row):
            rows.append(known[row.key])
            continue
        print(row.key, file=sys.stderr, flush=True)
        try:
            optimizer = foreach_adamw if row.way == "tieroff-host" else adamw
            key = (row.subject, optimizer.__name__)
            if key not in traces:
                make = partial(SUBJECTS[row.subject].dry, optimizer)
                traces[key] = dry_trace(make, machine, kernels="cuda", name=row.subject)
            rows.append(expected(row, traces[key], machine, options.host, options.nvme))
        except (SubjectAbsent, CaptureError) as error:
            rows.append({"key": row.key, "status": "absent", "reason": str(error), "step_s": None, "interval_s": None})
    head = {"date": date.today().isoformat(), "machine": machine.name, "host_bytes": options.host}
    options.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
