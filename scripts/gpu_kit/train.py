"""Trains one row in this process and writes what was measured.

    cd scripts && python -m gpu_kit.train --row full/3b-full/tieroff/25% --out row.json [--device cuda] [--tiny]

The figures are of the last quarter of the steps, by the device's own timing events where it has such, and the peak is the
allocator's of these steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_kit.rows import ROWS, Row
from gpu_kit.subjects import SUBJECTS, TINY_SUBJECTS, Subject, SubjectAbsent
from gpu_kit.ways import WAYS, Plain, WayAbsent
from tieroff.errors import InfeasiblePlanError

TIMED_SHARE = 0.25
SETTLED_SHARE, SETTLE_S_MAX = 0.01, 6.0


class Marks:
    """Times of the ends of steps: the device's where it has timing events, else this machine's."""

    def __init__(self, device: torch.device) -> None:
        self._is_timed = device.type == "cuda"
        self._marks: list[Any] = []

    def add(self) -> None:
        """A step was submitted."""
        if not self._is_timed:
            self._marks.append(time.perf_counter())
            return
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        self._marks.append(mark)

    def steps_s(self) -> list[float]:
        """Returns the time between each two marks; waits for the device."""
        if self._is_timed:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]


def settle_clock(device: torch.device) -> float:
    """Loads the GPU until its clock settles; returns the rate of products in FLOP/s, 0.0 elsewhere.

    A GPU that idled runs faster for some seconds than it does under load.
    """
    if device.type != "cuda":
        return 0.0
    size, rounds = 8192, 20
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    begun, last = time.monotonic(), 0.0
    while True:
        marks = Marks(device)
        marks.add()
        for _ in range(rounds):
            a @ a
        marks.add()
        rate = 2 * size**3 * rounds / marks.steps_s()[0]
        if abs(rate - last) <= SETTLED_SHARE * rate or time.monotonic() - begun > SETTLE_S_MAX:
            return rate
        last = rate


def run(row: Row, subject: Subject, device: torch.device, steps: int, scratch: Path) -> dict[str, Any]:
    """Returns what was measured of a row."""
    rate = settle_clock(device)
    way = WAYS[row.way](row, subject, device, scratch)
    begun = time.monotonic()
    way.prepare()
    prepared_s = time.monotonic() - begun
    try:
        return {"prepared_s": prepared_s, "matmul_flops_per_s": rate, **_train(way, subject, device, steps)}
    finally:
        way.close()


def _train(way: Plain, subject: Subject, device: torch.device, steps: int) -> dict[str, Any]:
    batches = subject.batches(device)
    timed = max(2, int(steps * TIMED_SHARE))
    marks, losses = Marks(device), []
    wall_s = []
    for number in range(steps):
        if number == steps - timed:
            _restart_peak(device)
        begun = time.monotonic()
        losses.append(way.step(batches[number % len(batches)]))
        marks.add()
        wall_s.append(time.monotonic() - begun)
    steps_s = marks.steps_s()[-timed:]
    step_s = statistics.median(steps_s)
    return {
        "step_s": step_s,
        "steps_s": steps_s,
        "host_s": statistics.median(wall_s[-timed:]),
        "tokens_per_s": subject.tokens / step_s,
        "peak_bytes": _peak_bytes(device),
        "losses": [float(loss) for loss in losses],
        **way.figures(),
    }


def _restart_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def _peak_bytes(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else None


def measured(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the row as plain data: with its figures, or why there are none."""
    subjects = TINY_SUBJECTS if options.tiny else SUBJECTS
    steps = options.steps or row.steps
    head: dict[str, Any] = {"key": row.key, "status": "ok", "reason": "", "torch": torch.__version__}
    device = torch.device(options.device)
    torch.manual_seed(0)
    try:
        with tempfile.TemporaryDirectory(prefix="tieroff-kit-", dir=options.scratch) as scratch:
            return {**head, **run(row, subjects[row.subject], device, steps, Path(scratch))}
    except (WayAbsent, SubjectAbsent) as error:
        return {**head, "status": "absent", "reason": str(error)}
    except InfeasiblePlanError as error:
        return {**head, "status": "infeasible", "reason": str(error)}
    except torch.OutOfMemoryError as error:
        return {**head, "status": "out of memory", "reason": str(error).splitlines()[0]}


def main(given: Sequence[str] | None = None) -> int:
    """Measures one row; exit status 0 wherever the row says what became of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", required=True, choices=list(ROWS))
    parser.add_argument("--out", type=Path, required=True, help="file for the row")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=0, help="default: the row's")
    parser.add_argument("--scratch", type=Path, default=Path.cwd(), help="folder on the drive that is measured")
    parser.add_argument("--tiny", action="store_true", help="the same model in small")
    options = parser.parse_args(given)
    found = measured(ROWS[options.row], options)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
