"""Turns a half hour on a GPU into figures: tieroff beside other ways to train, within less memory than a step takes.

    python scripts/gpu_evidence.py --minutes 12 --out runs/evidence [--case curve full] [--tiny]

Cases run in order of worth, each run in a process of its own with a limit of its own, and each row is written to
`rows.jsonl` the moment it is known; what did not fit into the minutes is named. Models are made from sizes, with random weights
and tokens; nothing is downloaded. Rows are compared with what `docs/results/expected_*.json` predicted before.

`--tiny` runs everything with small models where there is no GPU: tieroff's rows and the plain ones on the rehearsed device, the
other ways on the CPU. It shows whether the kit works, and no speed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from rich.table import Table

from gpu_kit.places import MACHINES, RESULTS, ROOT
from gpu_kit.programs import environment, program_of
from gpu_kit.rows import CASES, Case, Row
from tieroff.report.terminal import make_console, make_table
from tieroff.units import format_bytes, format_seconds

TRAIN = ROOT / "scripts" / "gpu_kit" / "train.py"
TINY_LIMIT_S, TINY_STEPS = 150, 6
BUILD_LIMIT_S = 300
LEAST_S = 15
"""No run begins with less time left than this."""
MESSAGE_CHARACTERS = 3000
EXPECTED = {"H100": "expected_h100.json", "H200": "expected_h200.json"}
REHEARSED = ("plain", "tieroff")


@dataclass(frozen=True)
class Ran:
    """How a process ended.

    Attributes:
        status: "ok", "failed" or "out of time".
        said: the end of what it said.
        took_s: how long it ran.
    """

    status: str
    said: str
    took_s: float


def run_limited(arguments: Sequence[str], limit_s: float, env: dict[str, str]) -> Ran:
    """Runs Python in a session of its own and ends all of it at the limit."""
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = "ok" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "out of time"
            os.killpg(process.pid, signal.SIGKILL)  # its own children too, or a rank would keep the GPU's memory
            process.wait()
        said.seek(0)
        return Ran(status, said.read()[-MESSAGE_CHARACTERS:], time.monotonic() - begun)


class Sitting:
    """One run of the kit.

    Attributes:
        rows: what is known so far.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._out = options, options.out
        self._begun = time.monotonic()
        self.rows: list[dict[str, Any]] = []
        (self._out / "rows.jsonl").unlink(missing_ok=True)

    def left_s(self) -> float:
        """Returns how much of the minutes is left."""
        return float(self._options.minutes * 60 - (time.monotonic() - self._begun))

    def run(self, cases: Iterable[Case]) -> None:
        """Runs the cases in turn."""
        for case in cases:
            if case.rows:
                self._run_rows(case)
            else:
                self._run_program(case)

    def _run_rows(self, case: Case) -> None:
        case_ends = time.monotonic() + case.limit_s
        for row in case.rows:
            limit_s = min(TINY_LIMIT_S if self._options.tiny else row.limit_s, case_ends - time.monotonic(), self.left_s())
            if limit_s < LEAST_S:
                self._note({"key": row.key, "case": case.name, "status": "no time left"})
                continue
            self._note({"case": case.name, **self._trained(row, limit_s)})

    def _trained(self, row: Row, limit_s: float) -> dict[str, Any]:
        file = self._out / "row.json"
        file.unlink(missing_ok=True)
        arguments = [str(TRAIN), "--row", row.key, "--out", str(file), "--scratch", str(self._out)]
        if self._options.tiny:
            arguments = self._tiny(row, arguments)
        ran = run_limited(arguments, limit_s, environment(self._options.tiny))
        found = json.loads(file.read_text()) if file.is_file() else {"key": row.key, "status": ran.status, "reason": ran.said}
        return {**found, "took_s": ran.took_s}

    def _tiny(self, row: Row, arguments: list[str]) -> list[str]:
        small = ["--tiny", "--steps", str(TINY_STEPS)]
        if row.way not in REHEARSED or row.subject == "8b-nf4":  # bitsandbytes has no kernels for the rehearsed device
            return [*arguments, *small, "--device", "cpu"]
        machine = [
            "--machine",
            str(MACHINES / "h100_80gb.toml"),
            "--host-budget",
            "1GiB",
            "--out",
            str(self._out / "rehearsal"),
        ]
        drive = ["--nvme-budget", "1GiB"] if row.is_on_drive else []
        budget = ["--device-budget", row.budget if row.budget is not None and "GiB" not in row.budget else "60%"]
        return ["-m", "tieroff", "rehearse", *machine, *drive, *budget, *arguments, *small]

    def _run_program(self, case: Case) -> None:
        limit_s = min(TINY_LIMIT_S if self._options.tiny else case.limit_s, self.left_s())
        if limit_s < LEAST_S:
            self._note({"key": case.name, "case": case.name, "status": "no time left"})
            return
        program = program_of(case.name, self._out, is_tiny=self._options.tiny)
        program.result.unlink(missing_ok=True)
        ran = run_limited(program.arguments, limit_s, environment(self._options.tiny))
        row = {"key": case.name, "case": case.name, "status": ran.status, "reason": "" if ran.status == "ok" else ran.said}
        self._note({**row, "took_s": ran.took_s, "rows": program.rows()})

    def _note(self, row: dict[str, Any]) -> None:
        """Writes a row at once, so that whatever ends this process leaves it."""
        self.rows.append(row)
        with (self._out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{row['key']}: {row['status']}", file=sys.stderr, flush=True)


def build() -> str:
    """Builds the native module where it cannot be loaded; returns why that failed, or an empty text.

    Without it every row would fail, each after the time that PyTorch takes to load.
    """
    env = environment(is_tiny=True)
    if run_limited(["-c", "import tieroff._native"], BUILD_LIMIT_S, env).status == "ok":
        return ""
    with tempfile.TemporaryDirectory() as scratch:
        built = run_limited(["setup.py", "--quiet", "build_ext", "--inplace", "--build-temp", scratch], BUILD_LIMIT_S, env)
    return "" if built.status == "ok" else f"{built.status}: {built.said}"


def card() -> str:
    """Returns the GPU's name, asked of the driver: PyTorch would keep memory of it in this process."""
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout.splitlines()[0].strip() if asked.stdout.strip() else ""


def expected_of(gpu: str) -> dict[str, dict[str, Any]]:
    """Returns what was predicted for the rows on this GPU."""
    for name, file in EXPECTED.items():
        if name in gpu and (RESULTS / file).is_file():
            return {row["key"]: row for row in json.loads((RESULTS / file).read_text())["rows"]}
    return {}


def with_expected(row: dict[str, Any], expected: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns a measured row with its prediction beside it."""
    prediction = expected.get(row["key"])
    if prediction is None or row.get("step_s") is None or prediction["step_s"] is None:
        return row
    low, high = prediction["interval_s"]
    own = {
        "expected_step_s": prediction["step_s"],
        "of_expected": row["step_s"] / prediction["step_s"],
        "is_in_interval": low <= row["step_s"] <= high,
    }
    return {**row, **own}


def show(rows: Iterable[dict[str, Any]], title: str) -> Table:
    """Returns a line per row."""
    heads = ("row", "status", "step", "tokens/s", "expected", "of it", "peak", "stalls", "moved", "host ahead", "took")
    table = make_table(title, heads, text_columns=2)
    for row in rows:
        moved = sum((row.get("moved_bytes") or {}).values())
        cells = (
            _cell(row.get("step_s"), format_seconds),
            _cell(row.get("tokens_per_s"), lambda value: f"{value:,.0f}"),
            _cell(row.get("expected_step_s"), format_seconds),
            _cell(row.get("of_expected"), lambda value: f"{value:.2f}"),
            _cell(row.get("peak_bytes"), format_bytes),
            _cell(row.get("stall_s"), format_seconds),
            format_bytes(moved) if moved else "",
            _cell(row.get("host_ahead_s"), format_seconds),
            _cell(row.get("took_s"), lambda value: f"{value:.0f} s"),
        )
        table.add_row(row["key"], row["status"], *cells)
    return table


def _cell(value: Any, written: Any) -> str:
    return "" if value is None else str(written(value))


def main(given: Sequence[str] | None = None) -> int:
    """Runs the kit; exit status 0 when each row says what became of it, 1 without a GPU or where the library does not build."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for what was measured, and for scratch")
    parser.add_argument("--case", nargs="+", choices=[case.name for case in CASES], default=[case.name for case in CASES])
    parser.add_argument("--row", nargs="+", default=None, help="only rows whose names contain one of these")
    parser.add_argument("--tiny", action="store_true", help="small models, no GPU")
    options = parser.parse_args(given)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    gpu = card()
    if not gpu and not options.tiny:
        print("gpu_evidence: expected a GPU of NVIDIA's, nvidia-smi names none; --tiny does without", file=sys.stderr)
        return 1
    failed = build()
    if failed:
        print(f"gpu_evidence: expected the native module to build, it did not: {failed}", file=sys.stderr)
        return 1
    sitting = Sitting(options)
    sitting.run(chosen(options.case, options.row))
    expected = {} if options.tiny else expected_of(gpu)
    rows = [with_expected(row, expected) for row in sitting.rows]
    head = {
        "date": date.today().isoformat(),
        "gpu": gpu or "none",
        "torch": next((row["torch"] for row in rows if "torch" in row), None),
        "command": shlex.join(["python", "scripts/gpu_evidence.py", *(sys.argv[1:] if given is None else given)]),
        "minutes": options.minutes,
        "is_tiny": options.tiny,
    }
    (options.out / "evidence.json").write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    make_console().print(show(rows, gpu or "small models, no GPU"))
    return 0


def chosen(cases: Sequence[str], names: Sequence[str] | None) -> list[Case]:
    """Returns the cases asked for, in order, with the rows asked for."""
    found = []
    for case in CASES:
        if case.name not in cases:
            continue
        rows = tuple(row for row in case.rows if names is None or any(name in row.key for name in names))
        if rows or not case.rows:
            found.append(Case(case.name, case.limit_s, case.about, rows))
    return found


if __name__ == "__main__":
    sys.exit(main())
