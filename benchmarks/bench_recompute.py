"""Recompute: predicted against measured cost of running layers again in backward.

A small language model trains on the real engine, with files behind a link of the given rate, within a budget that makes
`policy = "auto"` recompute layers. Three numbers per row: the price, from the forward ops of a run without recomputation; the
simulator's figure for the plan that ran; and the measured `stats().recompute_s`, the median over the steps under that plan.
Losses are compared with those of a plain run, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

import tieroff
from harness.results import document, make_parser, save
from harness.slow import SlowBackend
from tieroff.core.io.run_folder import Run, load_run
from tieroff.core.machine import Machine, save_machine
from tieroff.planner.layers import layer_runs
from tieroff.planner.predict import predict
from tieroff.report.terminal import make_console, make_table
from tieroff.runtime.backend.cpu import settle_vector_math
from tieroff.units import NS_PER_S
from train_gpt import GPT, VOCABULARY

CASES = {"float": (0.0, False), "dropout": (0.1, False), "dropout, autocast": (0.1, True)}
"""Name -> probability of dropout, and whether forward runs under autocast to bfloat16."""


@dataclass(frozen=True)
class Trained:
    """What one training did: its losses, the figures of its steps, and the run; of a plain one the losses alone."""

    losses: list[float]
    figures: list[tieroff.Stats]
    run: Run | None


def train(case: str, options: argparse.Namespace, folder: Path, *, recomputes: bool | None) -> Trained:
    """Trains in one of `CASES`; `recomputes` says whether plans may run layers again, None trains plain."""
    dropout, is_autocast = CASES[case]
    torch.manual_seed(0)
    model = GPT(options.layers, options.width, options.width // 32, options.length, dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if recomputes is not None:
        rate = int(options.rate)
        machine = Machine(
            name="slow link", measured="given", nvme_bytes=1 << 40, nvme_write_bytes_per_s=rate, nvme_read_bytes_per_s=rate
        )
        save_machine(machine, folder / "machine.toml")
        config = {
            "device": "cpu",
            "budget": {"device": options.budget, "nvme": "4GiB"},
            "nvme": {"dirs": [str(folder)]},
            "plan": {
                "min_bytes": "4KiB",
                "cover": ["activations"],
                "recompute": recomputes,
                "recompute_layers": ["blocks.*"],
                "machine": str(folder / "machine.toml"),
            },
        }
        tieroff.wrap(model, optimizer, config=config, backend=SlowBackend(options.rate))
    losses, figures = [], []
    for step in range(options.steps):
        torch.manual_seed(step)
        tokens = torch.randint(VOCABULARY, (options.batch, options.length))
        with torch.autocast("cpu", torch.bfloat16) if is_autocast else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if recomputes is not None:
            figures.append(tieroff.engine(model).stats())
    if recomputes is None:
        return Trained(losses, figures, None)
    tieroff.engine(model).save_run(folder / "run")
    tieroff.unwrap(model)
    return Trained(losses, figures, load_run(folder / "run"))


def measure(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the row of one case."""
    plain = train(case, options, Path(), recomputes=None)
    with tempfile.TemporaryDirectory(dir=".") as moving, tempfile.TemporaryDirectory(dir=".") as again:
        kept = train(case, options, Path(moving), recomputes=False)
        run_again = train(case, options, Path(again), recomputes=True)
    assert kept.run is not None
    assert run_again.run is not None
    plan = run_again.run.plan
    timeline, _ = predict(run_again.run)
    assert timeline is not None
    # The last plan's steps: those of the one before it took what that one's layers took.
    last = [seen for seen in run_again.figures if seen.phase == "planned" and seen.plans == run_again.figures[-1].plans]
    price_ns = sum(each.cost_ns for each in layer_runs(kept.run.trace) if each.path in plan.recompute)
    measured_s = statistics.median(seen.recompute_s for seen in last)
    predicted_s = timeline.recompute_ns / NS_PER_S
    steps_s = [statistics.median(s.step_s for s in of.figures if s.phase == "planned") for of in (kept, run_again)]
    return {
        "case": case,
        "layers": list(plan.recompute),
        "steps": len(last),
        "price_s": price_ns / NS_PER_S,
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "predicted_over_measured": predicted_s / measured_s if measured_s else None,
        "step_moving_s": steps_s[0],
        "step_again_s": steps_s[1],
        "losses_equal": plain.losses == kept.losses == run_again.losses,
    }


def show(rows: list[dict[str, Any]]) -> Table:
    """Returns the rows as a table."""
    columns = ("case", "layers", "steps", "price", "simulated", "measured", "off by", "step, moving", "again", "losses equal")
    table = make_table("Layers that run again in backward, per step", columns)
    for row in rows:
        ratio = row["predicted_over_measured"]
        table.add_row(
            row["case"],
            str(len(row["layers"])),
            str(row["steps"]),
            *(f"{row[key] * 1e3:.1f} ms" for key in ("price_s", "predicted_s", "measured_s")),
            f"{100 * (ratio - 1):+.1f} %" if ratio else "-",
            *(f"{row[key] * 1e3:.0f} ms" for key in ("step_moving_s", "step_again_s")),
            "yes" if row["losses_equal"] else "NO",
        )
    return table


def main() -> int:
    """Runs every case; returns the exit status: 1 where a loss differs from the plain run's, or nothing ran again."""
    parser = make_parser(__doc__, steps=14, width=256, layers=4, batch=8, length=128, budget="60%", rate="50MB")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    settle_vector_math()
    rows = [measure(case, options) for case in options.cases]
    make_console().print(show(rows))
    save(options.json, document(rows, torch=torch.__version__, rate_bytes_per_s=options.rate))
    return 0 if all(row["losses_equal"] and row["layers"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
