"""Runs the accelerator's tests on CUDA and three short benchmarks, and writes all to one JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from gpu_kit.programs import counts_of
from tieroff.report.terminal import make_console
from tieroff.units import format_bytes, format_seconds

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("tests", "bench", "staging", "clock")
ENVIRONMENT = {**os.environ, "TIEROFF_TEST_DEVICE": "cuda"}
PROCESSES = 8
TESTS_LIMIT_S = 200
BENCH_LIMIT_S = 160
STAGING_LIMIT_S = 60
CLOCK_LIMIT_S = 90
BENCH = (
    *("--budget", "50%", "25%", "--repeat", "1", "--steps", "12"),
    *("--layers", "8", "--width", "512", "--heads", "8", "--batch", "16", "--length", "512"),
)


def run_limited(arguments: list[str], limit_s: float) -> str:
    """Runs a program under a time limit; returns why it failed, or an empty text."""
    try:
        done = subprocess.run([sys.executable, *arguments], cwd=ROOT, timeout=limit_s, check=False, env=ENVIRONMENT)
    except subprocess.TimeoutExpired:
        return f"not done within {limit_s:.0f} s"
    return "" if done.returncode == 0 else f"exit status {done.returncode}"


def run_tests(out: Path) -> dict[str, Any]:
    """Returns how many tests passed, failed and were skipped."""
    report = out / "pytest.xml"
    report.unlink(missing_ok=True)
    # The accelerator's suite on the device, and what only a GPU has: GDS, and PyTorch's sanitizer in the race detector's place.
    arguments = [
        "-m",
        "pytest",
        "tests/accelerator/parity",
        "tests/accelerator/users",
        "tests/gpu",
        "-q",
        "-m",
        "not long or turn",
    ]
    # What else is installed beside torch may say that it is deprecated, or that it will not work in several processes.
    arguments += ["-W", "ignore::DeprecationWarning", "-p", "no:benchmark", "--numprocesses", str(PROCESSES)]
    failed = run_limited([*arguments, "-p", "no:cacheprovider", f"--junitxml={report}"], TESTS_LIMIT_S)
    counts = counts_of(report) if report.is_file() else {"passed": 0, "failed": 0, "skipped": 0}
    if not failed and counts["passed"] == 0:
        failed = "no test ran"
    return {**counts, "error": failed}


def run_bench(out: Path) -> dict[str, Any]:
    """Returns the rows of a short benchmark."""
    rows = out / "bench.json"
    rows.unlink(missing_ok=True)
    failed = run_limited(["benchmarks/bench_step.py", *BENCH, "--json", str(rows)], BENCH_LIMIT_S)
    return {**(json.loads(rows.read_text()) if rows.is_file() else {"rows": []}), "error": failed}


def run_staging(out: Path) -> dict[str, Any]:
    """Returns how fast tensors move between the GPU and a file in the scratch folder."""
    rows = out / "staging.json"
    rows.unlink(missing_ok=True)
    arguments = ["benchmarks/bench_staging.py", "--dir", str(out), "--sizes", "1,8,64", "--rounds", "3", "--json", str(rows)]
    failed = run_limited(arguments, STAGING_LIMIT_S)
    return {**(json.loads(rows.read_text()) if rows.is_file() else {"rows": []}), "error": failed}


def run_clock(out: Path) -> dict[str, Any]:
    """Returns what steps took by the device's clock, and what their plans predicted."""
    rows = out / "clock.json"
    rows.unlink(missing_ok=True)
    failed = run_limited(["benchmarks/bench_clock.py", "--json", str(rows)], CLOCK_LIMIT_S)
    return {**(json.loads(rows.read_text()) if rows.is_file() else {"rows": []}), "error": failed}


def show(result: dict[str, Any]) -> None:
    """Prints the table."""
    table = Table(title=f"{result['gpu']}, torch {result['torch']}, {result['seconds']:.0f} s", title_justify="left")
    for head in ("check", "result", "of plain", "peak", "losses"):
        table.add_column(head)
    tests = result["tests"]
    counts = f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped"
    table.add_row("tests", f"{counts} {tests['error']}".strip(), "", "", "")
    for row in result["bench"]["rows"]:
        if row["status"] != "ok":
            table.add_row(f"bench {row['budget']}", row["status"], "", "", "")
            continue
        # PyTorch's default kernels add in any order on a GPU, so not every plain run has the same losses.
        equal = "equal" if row["losses_equal"] else "differ, as plain runs may"
        peak = format_bytes(row["peak_bytes"])
        table.add_row(f"bench {row['budget']}", f"{row['tokens_per_s']:,.0f} tokens/s", f"{row['relative']:.1%}", peak, equal)
    if result["bench"]["error"]:
        table.add_row("bench", result["bench"]["error"], "", "", "")
    for row in result["staging"]["rows"]:
        shares = f"{row['out/min']:.0%} out, {row['in/min']:.0%} in, of the slower of link and drive"
        table.add_row(f"files, {row['MiB']} MiB", shares, "", "", "")
    if result["staging"]["error"]:
        table.add_row("files", result["staging"]["error"], "", "", "")
    for row in result["clock"]["rows"]:
        times = ", ".join(f"{name} {format_seconds(row[name])}" for name in ("predicted", "measured", "compute", "waits"))
        peak = format_bytes(row["peak"])
        table.add_row(f"clock, {row['model']}, {row['budget']}", times, f"{row['measured/predicted']:.1%} of plan", peak, "")
    if result["clock"]["error"]:
        table.add_row("clock", result["clock"]["error"], "", "", "")
    make_console().print(table)


def main() -> int:
    """Runs everything; exit status 1 when anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json")
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        print("gpu_check: expected a CUDA device, torch sees none", file=sys.stderr)
        return 1
    start = time.monotonic()
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "tests": run_tests(out),
        "bench": run_bench(out),
        "staging": run_staging(out),
        "clock": run_clock(out),
    }
    result["seconds"] = time.monotonic() - start
    (out / "gpu_check.json").write_text(json.dumps(result, indent=2) + "\n")
    show(result)
    return 1 if any(result[part]["error"] for part in PARTS) else 0


if __name__ == "__main__":
    sys.exit(main())
