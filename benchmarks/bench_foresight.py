"""Steps that never repeat: paging on demand against the correlation predictor, on the real engine with a slowed store.

Three models take another path, or another length, in every step: a mixture of experts with changing routing, layers that are
dropped at random, and sequences of random length. Each is trained plain, with `policy = "demand"` (evicts the least recently
used tensor, prefetches nothing) and with `policy = "auto"`, which prefetches predicted tensors. Copies run on real files of
the NVMe tier, delayed so that each takes as long as on a drive with the given rate in each direction.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from harness.results import document, make_parser, save
from harness.slow import SlowBackend
from harness.varied import MODELS, train
from tieroff.report.terminal import make_console, make_table
from tieroff.runtime.backend.cpu import settle_vector_math

POLICIES = ("demand", "auto")


def measure(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns the row of one model: medians over the steps without a plan, by policy."""
    sizes = {key: getattr(options, key) for key in ("steps", "width", "layers", "rows", "budget")}
    plain, _ = train(name, None, folder, backend=None, **sizes)
    row: dict[str, Any] = {"model": name}
    for policy in POLICIES:
        losses, figures = train(name, policy, folder, backend=SlowBackend(options.rate), **sizes)
        free = [seen for seen in figures if seen.phase == "on demand"]
        row[policy] = {
            "steps": len(free),
            "step_s": statistics.median(seen.step_s for seen in free),
            "stall_s": statistics.median(seen.stall_s for seen in free),
            "faults": statistics.median(seen.faults for seen in free),
            "moved_bytes": statistics.median(sum(seen.moved_bytes.values()) for seen in free),
            "losses_equal": losses == plain,
        }
    return row


def show(rows: list[dict[str, Any]]) -> Table:
    """Returns the rows as a table."""
    heads = ("model", "policy", "step", "stalls", "faults", "moved", "losses equal")
    table = make_table("Steps that never repeat, medians per step", heads, text_columns=2)
    for row in rows:
        for policy in POLICIES:
            seen = row[policy]
            table.add_row(
                row["model"],
                policy,
                f"{seen['step_s']:.3f} s",
                f"{seen['stall_s']:.3f} s",
                f"{seen['faults']:g}",
                f"{seen['moved_bytes'] / 2**20:.0f} MiB",
                "yes" if seen["losses_equal"] else "NO",
            )
    return table


def main() -> int:
    """Runs every model under both policies; returns the exit status: 1 where a loss differs from the plain run's."""
    parser = make_parser(__doc__, steps=32, width=256, layers=4, rows=256, budget="50%", rate="200MB")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args()
    settle_vector_math()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        rows = [measure(name, options, Path(folder)) for name in options.models]
    make_console().print(show(rows))
    save(options.json, document(rows, torch=torch.__version__, rate_bytes_per_s=options.rate))
    return 0 if all(row[policy]["losses_equal"] for row in rows for policy in POLICIES) else 1


if __name__ == "__main__":
    sys.exit(main())
