"""Step time of the demo model under several budgets, relative to the plain loop.

Every run has a process of its own. Repetitions are interleaved (plain, first budget, second, ..., plain, ...) and
medians are taken, so that a change of the machine's speed in between hits all of them.

A budget is a share of the plain run's peak. On the CPU it covers the device tier, the host tier and the staging buffers
together. At 100 % and more, the device's free memory is the budget, so that everything fits.

Each measured step is shown with the time that its plan predicted, and with the planner's lower bound for that trace, machine
and budget: no plan that the runtime can execute is faster, given the measured durations of ops.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.results import command_of, save, when_and_where
from shared.runs import SHAPES, RunFailed, fit_budget, run, wrapped
from tieroff.config import Config
from tieroff.core.io.run_folder import load_run
from tieroff.errors import ConfigError
from tieroff.planner.predict import forecast
from tieroff.report.terminal import make_console, make_table
from tieroff.units import NS_PER_S, format_bytes, format_seconds
from train_gpt import Options, Result, add_options, choose_device

ROOT = Path(__file__).resolve().parent.parent
BOUNDS = {"cheap": "fast", "lp": "high"}
MODEL = ("layers", "width", "heads", "batch", "length", "clip", "steps")
_WARM = 10  # steps before it are recorded, timed and planned, or their plan settles
_TIMES = ("step_s", "predicted_s", "bound_s")
_MEASURED = (*_TIMES, "tokens_per_s", "relative", "stall_s", "peak_bytes", "moved_bytes", "losses_equal")


@dataclass
class Row:
    """The repetitions of one budget; `share` is None for the plain loop."""

    name: str
    share: float | None
    budget_bytes: int | None = None
    results: list[Result] = field(default_factory=list)
    predicted: list[tuple[float, float]] = field(default_factory=list)
    infeasible: str = ""

    def summary(self, plain: Row) -> dict[str, Any]:
        """Returns the row as plain data; numbers are null when the budget is infeasible."""
        head = {"budget": self.name, "budget_bytes": self.budget_bytes, "status": "infeasible" if self.infeasible else "ok"}
        if self.infeasible:
            return {**head, **dict.fromkeys(_MEASURED), "reason": self.infeasible}
        tokens_per_s = statistics.median(result.tokens_per_s for result in self.results)
        stats = [result.stats for result in self.results if result.stats is not None]
        step_s, plan_s, bound_s = (statistics.median(column) for column in zip(*self._steps(), strict=True))
        return {
            **head,
            "step_s": step_s,
            "predicted_s": plan_s if self.predicted else None,
            "bound_s": bound_s if self.predicted else None,
            "tokens_per_s": tokens_per_s,
            "relative": tokens_per_s / statistics.median(result.tokens_per_s for result in plain.results),
            "stall_s": statistics.median(one["stall_s"] for one in stats) if stats else 0.0,
            "peak_bytes": max(result.peak_bytes for result in self.results),
            "moved_bytes": stats[-1]["moved_bytes"] if stats else {},
            "losses_equal": all(result.losses == plain.results[0].losses for result in self.results),
        }

    def _steps(self) -> list[tuple[float, float, float]]:
        """Returns per run the median step, and what was predicted of it (0 where nothing was)."""
        predicted = self.predicted if len(self.predicted) == len(self.results) else [(0.0, 0.0)] * len(self.results)
        steps = [statistics.median(result.step_s[_WARM:] or result.step_s) for result in self.results]
        return [(step_s, *pair) for step_s, pair in zip(steps, predicted, strict=True)]


def look_up(folder: Path, effort: str) -> tuple[float, float] | None:
    """Returns the step that a run's plan predicted and the planner's lower bound for it, in seconds; None if nothing moves."""
    found = load_run(folder)
    if found.machine is None or found.plan.moves_nothing:
        return None
    step_ns, bound_ns = forecast(found.plan, found.trace, found.machine, effort)
    return step_ns / NS_PER_S, bound_ns / NS_PER_S


def parse_share(text: str) -> float:
    """Returns the share that text such as "25%" stands for."""
    if not text.endswith("%") or float(text[:-1]) <= 0:
        raise argparse.ArgumentTypeError(f'expected a share such as "25%", got {text!r}')
    return float(text[:-1]) / 100


def parse_arguments() -> tuple[argparse.Namespace, Options]:
    """Returns the arguments of this script and the options of the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", nargs="+", type=parse_share, default=[1.0, 0.5, 0.25, 0.125], help='such as "25%%"')
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of each run")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/quarter.toml", help="everything but the budget")
    parser.add_argument("--nvme-dir", type=Path, default=None, help="folder of the NVMe tier (default: a new one here)")
    parser.add_argument("--json", type=Path, default=None, help="also write the rows to this file")
    parser.add_argument("--bound", choices=list(BOUNDS), default="cheap", help="lp: also the linear program's, in minutes")
    parser.add_argument("--model", choices=list(SHAPES), default="demo", help="its sizes; each can be given on its own")
    add_options(parser, leave_out=("config", "out"))
    parser.set_defaults(steps=18, **SHAPES[parser.parse_known_args()[0].model])
    arguments = parser.parse_args()
    chosen = {f.name: getattr(arguments, f.name) for f in fields(Options) if f.name not in ("config", "out")}
    return arguments, Options(**chosen)


def measure(rows: list[Row], options: Options, config: Config, repeat: int, folder: Path, nvme_dir: Path, effort: str) -> None:
    """Fills the rows, of which the first is the plain loop; an infeasible budget is tried once."""
    for repetition in range(repeat):
        for row in rows:
            if row.infeasible:
                continue
            print(f"run {repetition + 1} of {repeat}: {row.name}", file=sys.stderr)
            own = replace(options, out=folder / f"{row.name}-{repetition}")
            if row.share is not None:
                chosen, row.budget_bytes = choose_budget(
                    config, row.share, rows[0].results[0].peak_bytes, options.device, nvme_dir
                )
                own = wrapped(own, chosen)
            try:
                row.results.append(run(own, is_quiet=row.share is not None))
                if row.share is not None and own.out is not None and (predicted := look_up(own.out, effort)) is not None:
                    row.predicted.append(predicted)
            except RunFailed as error:
                if error.kind != "InfeasiblePlanError":
                    raise
                row.infeasible = str(error)


def choose_budget(config: Config, share: float, peak_bytes: int, device: str, nvme_dir: Path) -> tuple[Config, int | None]:
    """Returns the config for a share of the plain run's peak, and the budget in bytes (None: all that is free)."""
    chosen, budget_bytes = fit_budget(config, int(peak_bytes * share), device, nvme_dir)
    if share < 1:
        return chosen, budget_bytes
    return chosen.model_copy(update={"budget": chosen.budget.model_copy(update={"device": None})}), None


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    """Prints one line per budget."""
    heads = ("budget", "bytes", "tokens/s", "of plain", "step", "predicted", "bound", "stalls", "peak", "moved", "losses")
    table = make_table("medians over repetitions", heads)
    for row in rows:
        budget = format_bytes(row["budget_bytes"]) if row["budget_bytes"] is not None else "-"
        if row["status"] != "ok":
            table.add_row(row["budget"], budget, "infeasible", *["-"] * 8)
            continue
        table.add_row(
            row["budget"],
            budget,
            f"{row['tokens_per_s']:,.0f}",
            f"{row['relative']:.1%}",
            *(format_seconds(row[key]) if row[key] is not None else "-" for key in _TIMES),
            format_seconds(row["stall_s"]),
            format_bytes(row["peak_bytes"]),
            format_bytes(sum(row["moved_bytes"].values())),
            "equal" if row["losses_equal"] else "DIFFERENT",
        )
    console.print(table)
    for row in rows:
        if row["status"] != "ok":
            console.print(f"{row['budget']}: {row['reason']}", markup=False, highlight=False)


def main() -> int:
    """Runs the benchmark."""
    arguments, options = parse_arguments()
    rows = [Row("plain", None), *(Row(f"{share * 100:g}%", share) for share in arguments.budget)]
    try:
        config = Config.load(arguments.config)
        options = replace(options, device=choose_device(options.device), data=options.data.resolve())
        with tempfile.TemporaryDirectory(prefix="tieroff-bench-", dir=Path.cwd()) as folder:
            nvme_dir = arguments.nvme_dir or Path(folder)
            measure(rows, options, config, arguments.repeat, Path(folder), nvme_dir, BOUNDS[arguments.bound])
    except (ConfigError, RunFailed) as error:
        print(f"bench_step: {error}", file=sys.stderr)
        return 1
    summary = [row.summary(rows[0]) for row in rows]
    show(make_console(), summary)
    sizes = {name: getattr(options, name) for name in MODEL}
    about = {"device": options.device, "model": sizes, "parameters": rows[0].results[0].parameters}
    save(arguments.json, {**when_and_where(command_of(__file__)), **about, "repeat": arguments.repeat, "rows": summary})
    return 0


if __name__ == "__main__":
    sys.exit(main())
