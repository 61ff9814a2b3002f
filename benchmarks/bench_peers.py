"""Trains the demo model with today's alternatives and with tieroff: speed, peak memory, losses.

Every run has a process of its own, with the same model, data and seed; harness/peers.py has the one loop and what each
way changes in it. Repetitions are interleaved, in an order that changes; medians are taken. Peak memory is measured from
outside: CUDA's most allocated bytes; on the CPU the peak resident set above its level after the imports, when the ranks have
joined. Budgets of tieroff are bytes, or shares of the plain run's peak, with the same meaning as in benchmarks/bench_step.py.

With `--ranks N` each run has N processes under torchrun, each with data of its own, and the ways are those of shards: FSDP2
as it is, which the others are compared with, with `CPUOffloadPolicy`, DeepSpeed's ZeRO-3, and tieroff on FSDP2's shards at
budgets of its peak. Tokens are those of all ranks, a peak is the highest of a rank, losses are compared on every rank.

A way that is not installed here, fails, or takes too long has a row that says so, and is not tried again. DeepSpeed is
run where it can be imported; it builds its operators on first use, which needs a compiler and, for NVMe, libaio's headers.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console

from bench_step import MODEL, choose_budget
from harness import peers
from harness.pairs import order_of
from harness.peers import IN_BACKWARD, PEERS, SHARDED
from harness.results import command_of, save
from shared.runs import SHAPES, RunFailed, fit_budget, run, wrapped
from tieroff.config import Config
from tieroff.device_budget import DeviceBudget
from tieroff.errors import ConfigError
from tieroff.probe.drives import drive, file_system
from tieroff.report.terminal import make_console, make_table
from tieroff.units import format_bytes
from train_gpt import Options, Result, add_options, choose_device

ROOT = Path(__file__).resolve().parent.parent
STATUS = {"PeerAbsent": "absent", "InfeasiblePlanError": "infeasible"}
LIMIT_S = 1800.0
MEASURED = (
    *("tokens_per_s", "relative", "step_s", "peak_bytes", "peak_relative", "loss_last", "loss_gap_max", "losses_equal"),
    *("stall_s", "moved_bytes"),
)


@dataclass
class Row:
    """One way of training and its repetitions.

    Attributes:
        name: as shown.
        peer: its name in benchmarks/harness/peers.py.
        budget: of tieroff; None for the others.
        budget_bytes: what the budget came to; None where the free memory is the budget.
        results: one per repetition.
        status: "ok" (until it is something else), "absent" (not installed), "infeasible" (the budget) or "failed".
        reason: of another status than "ok".
    """

    name: str
    peer: str
    budget: DeviceBudget | None = None
    budget_bytes: int | None = None
    results: list[Result] = field(default_factory=list)
    status: str = "ok"
    reason: str = ""

    def fail(self, error: RunFailed) -> None:
        """Takes the row out of the repetitions still to come."""
        self.status, self.reason = STATUS.get(error.kind, "failed"), str(error)

    def summary(self, plain: Row) -> dict[str, Any]:
        """Returns the row as plain data; what was not measured, or has no plain run beside it, is null."""
        tokens_per_s = [result.tokens_per_s for result in self.results]
        peaks = [result.peak_bytes for result in self.results]
        head = {
            "peer": self.name,
            "status": self.status if self.results or self.status != "ok" else "not run",
            "reason": self.reason,
            "budget_bytes": self.budget_bytes,
            **dict.fromkeys(MEASURED),
            "runs": [{"tokens_per_s": t, "peak_bytes": p} for t, p in zip(tokens_per_s, peaks, strict=True)],
        }
        if self.status != "ok" or not self.results:
            return head
        stats = [result.stats for result in self.results if result.stats is not None]
        values: dict[str, Any] = {
            "tokens_per_s": statistics.median(tokens_per_s),
            "step_s": statistics.median(_tokens(result) / result.tokens_per_s for result in self.results),
            "peak_bytes": max(peaks),
            "loss_last": float.fromhex(self.results[0].losses[-1]),
            "stall_s": statistics.median(one["stall_s"] for one in stats) if stats else None,
            "moved_bytes": stats[-1]["moved_bytes"] if stats else None,
        }
        if plain.status == "ok" and plain.results:
            losses = plain.results[0].losses
            values["relative"] = values["tokens_per_s"] / statistics.median(r.tokens_per_s for r in plain.results)
            values["peak_relative"] = values["peak_bytes"] / max(result.peak_bytes for result in plain.results)
            values["losses_equal"] = all(result.losses == losses for result in self.results)
            values["loss_gap_max"] = max(_gap(result.losses, losses) for result in self.results)
        return {**head, **values}


def _tokens(result: Result) -> int:
    ranks = len(result.losses) // max(len(result.step_s), 1)
    return int(result.options["batch"]) * int(result.options["length"]) * ranks


def _gap(losses: Sequence[str], others: Sequence[str]) -> float:
    """Returns the largest difference between two lists of losses."""
    return max(abs(float.fromhex(a) - float.fromhex(b)) for a, b in zip(losses, others, strict=True))


def parse_budget(text: str) -> DeviceBudget:
    """Returns the budget that text such as "25%" or "6GiB" stands for."""
    try:
        return DeviceBudget.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_arguments(given: Sequence[str] | None = None) -> tuple[argparse.Namespace, Options]:
    """Returns the arguments of this script and the options of the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="demo", help="its sizes; each can be given on its own")
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=list(PEERS),
        default=None,
        help=f"default: all of them, {IN_BACKWARD} with --clip 0 alone; the plain loop always runs",
    )
    budgets = [parse_budget(text) for text in ("100%", "50%", "25%")]
    parser.add_argument("--budget", nargs="+", type=parse_budget, default=budgets, help='such as "25%%" or "6GiB"')
    parser.add_argument("--ranks", type=int, default=1, help="processes that train together")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of each run")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that a run may take")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/quarter.toml", help="of tieroff, but the budget")
    parser.add_argument("--nvme-dir", type=Path, default=Path(), help="folder for what lies on NVMe, and for scratch")
    parser.add_argument("--json", type=Path, default=None, help="also write what was found to this file")
    add_options(parser, leave_out=("config", "out", "sample"))
    parser.set_defaults(steps=16, **SHAPES[parser.parse_known_args(given)[0].model])
    arguments = parser.parse_args(given)
    if arguments.repeat < 1:
        parser.error(f"expected at least one repetition, got {arguments.repeat}")
    if arguments.ranks < 1:
        parser.error(f"expected at least one rank, got {arguments.ranks}")
    known = SHARDED if arguments.ranks > 1 else tuple(peer for peer in PEERS if peer == "fsdp2" or "fsdp2" not in peer)
    if arguments.peers is None:
        arguments.peers = [peer for peer in known if peer != IN_BACKWARD or not arguments.clip]
    elif not set(arguments.peers) <= set(known):
        parser.error(f"expected --peers of {', '.join(known)} with --ranks {arguments.ranks}, got {' '.join(arguments.peers)}")
    elif IN_BACKWARD in arguments.peers and arguments.clip:
        parser.error(f"expected --clip 0 with {IN_BACKWARD}, whose gradients are gone after backward, got {arguments.clip:g}")
    chosen = {f.name: getattr(arguments, f.name) for f in fields(Options) if hasattr(arguments, f.name)}
    return arguments, Options(**{**chosen, "config": None})


def make_rows(peers: Sequence[str], budgets: Sequence[DeviceBudget], first: str = "plain") -> list[Row]:
    """Returns a row per way of training and one per budget of tieroff; that of `first`, to compare with, is the first."""
    rows = [Row(first, first)]
    for peer in PEERS:
        if peer.startswith("tieroff") and peer in peers:
            rows += [Row(f"{peer} {budget_name(budget)}", peer, budget) for budget in budgets]
        elif peer != first and peer in peers:
            rows.append(Row(peer, peer))
    return rows


def budget_name(budget: DeviceBudget) -> str:
    """Returns the budget as a person writes it."""
    return f"{budget.share * 100:g}%" if budget.share is not None else format_bytes(budget.size_bytes or 0)


def options_for(row: Row, plain: Row, options: Options, config: Config, nvme_dir: Path, ranks: int = 1) -> Options:
    """Returns the options of a row's run; one of tieroff gets a config with its budget.

    Raises:
        RunFailed: the budget is a share of the plain run's peak, and that run failed.
    """
    if row.budget is None:
        return options
    if row.peer == IN_BACKWARD:
        config = config.model_copy(update={"plan": config.plan.model_copy(update={"update_in_backward": 1})})
    if row.budget.share is None:
        chosen, row.budget_bytes = fit_budget(config, row.budget.size_bytes or 0, options.device, nvme_dir)
    elif plain.results:
        peak_bytes = plain.results[0].peak_bytes
        chosen, row.budget_bytes = choose_budget(config, row.budget.share, peak_bytes, options.device, nvme_dir)
    else:
        raise RunFailed("there is no plain run whose peak this is a share of; give the budget in bytes")
    # The host's budget is the machine's, of which each rank has a part; the device's is of each.
    host = (chosen.budget.host or 0) * ranks
    return wrapped(options, chosen.model_copy(update={"budget": chosen.budget.model_copy(update={"host": host})}))


def measure(
    rows: Sequence[Row], options: Options, config: Config, repeat: int, limit_s: float, folder: Path, ranks: int = 1
) -> Iterator[None]:
    """Runs every row `repeat` times, in turn, and yields after each run; the plain loop is the first in the first turn."""
    nvme_dir = folder / "nvme"
    nvme_dir.mkdir()
    for turn in range(repeat):
        for row in order_of(rows, turn):
            if row.status != "ok":
                continue
            print(f"turn {turn + 1} of {repeat}: {row.name}", file=sys.stderr)
            own = replace(options, out=folder / f"{rows.index(row)}-{turn}")
            more = ("--peer", row.peer, "--nvme-dir", str(nvme_dir))
            try:
                own = options_for(row, rows[0], own, config, nvme_dir, ranks)
                script = Path(peers.__file__)
                row.results.append(run(own, is_quiet=True, script=script, more=more, limit_s=limit_s, ranks=ranks))
            except RunFailed as error:
                row.fail(error)
            yield


def describe_machine(device: str, nvme_dir: Path) -> dict[str, Any]:
    """Returns what the figures depend on, apart from the code."""
    return {
        "kernel": f"{platform.system()} {platform.release()}",
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "file_system": file_system(nvme_dir),
        "drive": drive(nvme_dir),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": _version("deepspeed"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def last_line(reason: str) -> str:
    """Returns the end of a message, where a traceback has its error."""
    return next((line.strip() for line in reversed(reason.splitlines()) if line.strip()), "")


def show(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Prints one line per row, and below why those are empty that are."""
    heads = ("peer", "budget", "tokens/s", "of plain", "peak memory", "of plain", "last loss", "losses")
    table = make_table("medians over repetitions; the highest peak of them", heads)
    for row in rows:
        budget = format_bytes(row["budget_bytes"]) if row["budget_bytes"] is not None else "-"
        if row["status"] != "ok":
            table.add_row(row["peer"], budget, row["status"], *["-"] * 5)
            continue
        table.add_row(
            row["peer"],
            budget,
            f"{row['tokens_per_s']:,.0f}",
            _share(row["relative"]),
            format_bytes(row["peak_bytes"]),
            _share(row["peak_relative"]),
            f"{row['loss_last']:.4f}",
            _equality(row["losses_equal"], row["loss_gap_max"]),
        )
    console.print(table)
    for row in rows:
        if row["status"] != "ok":
            reason = last_line(row["reason"]) if row["status"] == "failed" else row["reason"]
            console.print(f"{row['peer']}: {reason}", markup=False, highlight=False)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _equality(is_equal: bool | None, gap_max: float | None) -> str:
    if is_equal is None:
        return "-"
    return "equal" if is_equal else f"differ by {gap_max:.1g}"


def describe(options: Options, arguments: argparse.Namespace, command: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the document that is written to JSON, with what was found so far."""
    return {
        "date": date.today().isoformat(),
        "command": command,
        "machine": describe_machine(options.device, arguments.nvme_dir.resolve()),
        "model": {name: getattr(options, name) for name in (*MODEL, "seed")},
        "parameters": next((row.results[0].parameters for row in rows if row.results), None),
        "repeat": arguments.repeat,
        "ranks": arguments.ranks,
        "rows": [row.summary(rows[0]) for row in rows],
    }


def main(given: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 when the config or a folder is wrong, 0 whatever became of the peers."""
    arguments, options = parse_arguments(given)
    command = command_of(__file__, given)
    rows = make_rows(arguments.peers, arguments.budget, SHARDED[0] if arguments.ranks > 1 else "plain")
    options = replace(options, device=choose_device(options.device), data=options.data.resolve())
    try:
        config = Config.load(arguments.config)
        with tempfile.TemporaryDirectory(prefix="tieroff-bench-", dir=arguments.nvme_dir.resolve()) as folder:
            turns = measure(rows, options, config, arguments.repeat, arguments.limit, Path(folder), arguments.ranks)
            for _ in turns:
                save(arguments.json, describe(options, arguments, command, rows))  # after each run: an interruption loses none
    except (ConfigError, OSError) as error:
        print(f"bench_peers: {error}", file=sys.stderr)
        return 1
    show(make_console(), [row.summary(rows[0]) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
