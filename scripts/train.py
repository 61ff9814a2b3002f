"""Trains the demo model twice, plain and within a quarter of the plain run's peak memory, and compares the two.

Each run has a process of its own. What the second one did lies in the run folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

from rich.console import Console

from shared.runs import RunFailed, fit_budget, run, wrapped
from tieroff.config import Config
from tieroff.errors import ConfigError
from tieroff.report.terminal import make_console, make_table
from tieroff.units import format_bytes, format_seconds
from train_gpt import Options, Result, add_options, choose_device

ROOT = Path(__file__).resolve().parent.parent
SAMPLE_BYTES = 200


def parse_arguments() -> tuple[argparse.Namespace, Options]:
    """Returns the arguments of this script and the options of the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/quarter.toml", help="everything but the budget")
    parser.add_argument("--share", type=float, default=0.25, help="budget over the plain run's peak")
    parser.add_argument("--out", type=Path, default=None, help="run folder; runs/<time> when left out")
    parser.add_argument("--nvme-dir", type=Path, default=None, help="folder of the NVMe tier; else the run folder")
    add_options(parser, leave_out=("config", "out"))
    parser.set_defaults(sample=SAMPLE_BYTES)
    arguments = parser.parse_args()
    chosen = {f.name: getattr(arguments, f.name) for f in fields(Options) if f.name not in ("config", "out")}
    return arguments, Options(**chosen)


def compare(plain: Result, own: Result, budget_bytes: int) -> dict[str, object]:
    """Returns the content of result.json."""
    stats = own.stats or {}
    return {
        "plain": {"tokens_per_s": plain.tokens_per_s, "peak_bytes": plain.peak_bytes},
        "wrapped": {
            "tokens_per_s": own.tokens_per_s,
            "peak_bytes": own.peak_bytes,
            "budget_bytes": budget_bytes,
            "moved_bytes": stats["moved_bytes"],
            "stall_s": stats["stall_s"],
        },
        "losses_equal": plain.losses == own.losses,
        "steps": len(plain.losses),
    }


def show(console: Console, plain: Result, own: Result, budget_bytes: int) -> None:
    """Prints the two runs side by side."""
    stats = own.stats or {}
    title = f"{plain.parameters / 1e6:.1f} M parameters, {len(plain.losses)} steps"
    table = make_table(title, ("", "plain", "tieroff"))
    table.add_row("budget", "none", f"{format_bytes(budget_bytes)} ({budget_bytes / plain.peak_bytes:.0%} of plain)")
    ratio = own.peak_bytes / budget_bytes
    table.add_row("peak memory", format_bytes(plain.peak_bytes), f"{format_bytes(own.peak_bytes)} ({ratio:.0%} of budget)")
    speed = own.tokens_per_s / plain.tokens_per_s
    table.add_row("tokens per second", f"{plain.tokens_per_s:,.0f}", f"{own.tokens_per_s:,.0f} ({speed:.0%} of plain)")
    for link, size_bytes in stats["moved_bytes"].items():
        table.add_row(f"{link.replace('_', ' ')}, last step", "", format_bytes(size_bytes))
    table.add_row("stalls, last step", "", f"{format_seconds(stats['stall_s'])} of {format_seconds(stats['step_s'])}")
    equal = sum(a == b for a, b in zip(plain.losses, own.losses, strict=True))
    table.add_row("losses equal bit for bit", "", f"{equal} of {len(plain.losses)}")
    last = [f"{float.fromhex(result.losses[-1]):.6f}" for result in (plain, own)]
    table.add_row("last loss", *last)
    console.print(table)


def main() -> int:
    """Runs the comparison; exit status 1 when a run failed or a loss differs."""
    arguments, options = parse_arguments()
    console = make_console()
    out = (arguments.out or ROOT / "runs" / time.strftime("%Y%m%d-%H%M%S")).resolve()
    nvme_dir = (arguments.nvme_dir or out).resolve()
    nvme_dir.mkdir(parents=True, exist_ok=True)
    try:
        config = Config.load(arguments.config)
        device = choose_device(options.device if options.device != "auto" else config.device)
        options = replace(options, device=device, data=options.data.resolve())
        plain = run(replace(options, out=out / "plain", sample=0))
        config, budget_bytes = fit_budget(config, int(plain.peak_bytes * arguments.share), device, nvme_dir)
        own = run(wrapped(replace(options, out=out), config))
    except (ConfigError, RunFailed) as error:
        print(f"train: {error}", file=sys.stderr)
        return 1
    result = compare(plain, own, budget_bytes)
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"\n[bold]A sample of the trained model[/bold]\n{'-' * 60}")
    console.print(own.sample.strip(), markup=False, highlight=False)
    console.print("-" * 60)
    show(console, plain, own, budget_bytes)
    console.print(f"run folder: {out}", highlight=False)
    return 0 if result["losses_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
