"""The `tieroff` command.

What a command needs is imported inside it, so that `tieroff --version` loads neither torch nor the native module.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tieroff.errors import TieroffError
from tieroff.launch import command as launching
from tieroff.probe.calibration import command as calibrating
from tieroff.report.terminal import print_rows, print_table, progress
from tieroff.units import NS_PER_S, format_bytes, parse_bytes

if TYPE_CHECKING:
    from tieroff.core.machine import Machine
    from tieroff.core.tensor import Tier
    from tieroff.core.trace import Trace
    from tieroff.planner.rows import Result
    from tieroff.probe.doctor import Diagnosis
    from tieroff.probe.survey import Survey

EXIT_ERROR = 1
EXIT_INFEASIBLE = 3


class Effort(StrEnum):
    """How long the planner may search."""

    fast = "fast"
    high = "high"


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
TraceOption = Annotated[
    Path, typer.Option("--trace", help="A saved trace, or a folder of kernels.csv and tensors.csv.")
]
AnyTraceOption = Annotated[
    Path | None, typer.Option("--trace", help="A saved trace, or a folder of kernels.csv and tensors.csv.")
]
ExecutionTraceOption = Annotated[
    Path | None,
    typer.Option("--execution-trace", help="With what torch's profiler wrote as --trace: the execution trace beside it."),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="MODULE:FACTORY, a function that returns (model, inputs) or a tieroff.DryModel."),
]
MachineOption = Annotated[Path, typer.Option("--machine", help="A file written by `tieroff probe --out`.")]
DeviceBudgetOption = Annotated[str, typer.Option("--device-budget", help='Bytes, or a share of the peak ("25%").')]
HostBudgetOption = Annotated[str | None, typer.Option("--host-budget", help="Bytes; the machine's when left out.")]
NvmeBudgetOption = Annotated[str | None, typer.Option("--nvme-budget", help="Bytes; the machine's when left out.")]
EffortOption = Annotated[Effort, typer.Option("--effort", help="fast: seconds; high: minutes.")]

app = typer.Typer(
    help="Trains PyTorch models within a memory budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Runs the command line. Exit status: 0 done, 1 an error, 2 usage, 3 `plan` found nothing feasible."""
    app()


def _reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Makes a command's error a message (or with --json a document) and exit status 1."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except (TieroffError, OSError) as error:
            _print_error(error, as_json=options["as_json"])
            raise typer.Exit(EXIT_ERROR) from None
        except (typer.Exit, typer.BadParameter):
            raise
        except Exception as error:
            if not options["as_json"]:
                raise
            _print_error(error, as_json=True)
            raise typer.Exit(EXIT_ERROR) from None

    return run


def _print_error(error: Exception, *, as_json: bool) -> None:
    if as_json:
        _print_json({"error": {"type": type(error).__name__, "message": str(error)}})
    else:
        print(f"tieroff: {type(error).__name__}: {error}", file=sys.stderr)


def _print_json(document: object) -> None:
    print(json.dumps(document, indent=2, default=str))


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from tieroff import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
@_reports_errors
def probe(
    dirs: Annotated[list[Path], typer.Option("--dir", help="A folder on a drive to measure; may be repeated.")],
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="Time to spend, roughly.")] = 30.0,
    out: Annotated[Path | None, typer.Option("--out", help="Write a machine.toml.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measures folders, every engine in each, and the link between device and host memory.

    Takes at most a tenth of a folder's free bytes, and leaves nothing there. Close what else uses the drives.
    """
    from tieroff.core.machine import save_machine
    from tieroff.probe.machine import surveyed_machine
    from tieroff.probe.survey import survey

    device = _device()
    with progress() as report:
        found = survey(device, dirs, seconds, report)
    machine = surveyed_machine(device, dirs, found, seconds)
    if out is not None:
        save_machine(machine, out)
    if as_json:
        _print_json({**_probe_document(found), "machine": str(out) if out else None})
        return
    _print_probe(machine, found)
    if out is not None:
        print(f"written to {out}")


def _probe_document(found: Survey) -> dict[str, Any]:
    rows = [
        {
            "dir": str(row.dir),
            "gds": row.gds,
            **asdict(row.rates),
            "is_best": found.best[row.dir] == row.rates.engine,
            "file_system": found.file_systems[row.dir],
            "drive": found.drives[row.dir],
            "cells": [asdict(cell) for cell in row.cells],
        }
        for row in found.rows
    ]
    return {
        "dirs": rows,
        "refused": [{"dir": str(row.dir), "engine": row.engine, "reason": row.reason} for row in found.refused],
        "links": asdict(found.links),
        "memory_bytes_per_s": found.memory_bytes_per_s,
        "checksum_bytes_per_s": found.checksum_bytes_per_s,
    }


@app.command()
@_reports_errors
def doctor(
    config: Annotated[Path | None, typer.Option("--config", help="Look at this config's folders.")] = None,
    as_json: AsJson = False,
) -> None:
    """Says what this machine can do for a run, and why not."""
    from tieroff.config import Config
    from tieroff.probe.doctor import diagnose

    chosen = Config.load(config)
    found = diagnose(chosen.nvme.dirs or (Path(),))
    if as_json:
        _print_json(asdict(found))
    else:
        _print_diagnosis(found)


@app.command()
@_reports_errors
def plan(
    machine: MachineOption,
    device_budget: DeviceBudgetOption,
    trace: AnyTraceOption = None,
    execution_trace: ExecutionTraceOption = None,
    model: ModelOption = None,
    host_budget: HostBudgetOption = None,
    nvme_budget: NvmeBudgetOption = None,
    policy: Annotated[str, typer.Option("--policy", help='"auto" or the name of a policy.')] = "auto",
    effort: EffortOption = Effort.fast,
    out: Annotated[Path | None, typer.Option("--out", help="Write the plan as JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Plans a step for a machine and a budget, and says what would make it faster.

    The step is a traced one, or that of a model that is never materialised, its op times estimated for the machine.
    """
    from tieroff.core.files import save_plan
    from tieroff.core.machine import load_machine
    from tieroff.planner.advice import advice, explain
    from tieroff.planner.policies import find_policy
    from tieroff.planner.rows import plan_row
    from tieroff.tracing.files import load_trace

    find_policy(policy)
    if (model is None) == (trace is None):
        raise typer.BadParameter("give either --model MODULE:FACTORY or --trace PATH")
    loaded = load_machine(machine)
    with progress() as report:
        report(f"tracing {model or trace}", None)
        step = _dry_trace(model, loaded) if model is not None else load_trace(trace or Path(), execution_trace)
        problem = step, loaded, _budget(step, device_budget, host_budget, nvme_budget)
        report(f"planning and bounding {len(step.ops)} ops and {len(step.tensors)} tensors", None)
        found = plan_row(*problem, policy, effort.value)
        if out is not None and found.plan is not None:
            save_plan(found.plan, out)
        report("planning with more of each resource", None)
        text = "\n".join([*explain(*problem, found), *advice(*problem, found, effort.value)])
    row = found.row.as_dict()
    if as_json:
        _print_json({**row, "explain": text})
    else:
        print_rows([row])
        print(text)
    if found.plan is None:
        raise typer.Exit(EXIT_INFEASIBLE)


@app.command()
@_reports_errors
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="What engine.save_run or scripts/train.sh wrote.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The page; RUN_DIR/report.html when left out.")] = None,
    perfetto: Annotated[Path | None, typer.Option("--perfetto", help="Write a trace for ui.perfetto.dev.")] = None,
    tensorboard: Annotated[Path | None, typer.Option("--tensorboard", help="Write scalars into this folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draws what a run did: memory, lanes, waits, decisions, predicted and measured. No page with another output alone."""
    from tieroff.core.run import load_run
    from tieroff.planner.predict import predict
    from tieroff.report.page import check_page, write_page
    from tieroff.report.perfetto import write_perfetto
    from tieroff.report.tensorboard import write_scalars

    if out is None and perfetto is None and tensorboard is None:
        out = run_dir / "report.html"
    if out is not None and run_dir.is_dir():
        check_page(out)
    run = load_run(run_dir)
    predicted, note = predict(run)
    if out is not None:
        write_page(out, run, predicted, note)
    if perfetto is not None:
        write_perfetto(perfetto, run, predicted)
    if tensorboard is not None:
        write_scalars(tensorboard, run)
    written = {"report": out, "perfetto": perfetto, "tensorboard": tensorboard}
    if as_json:
        _print_json({name: str(path) if path is not None else None for name, path in written.items()})
    else:
        for path in filter(None, written.values()):
            print(f"written to {path}")


@app.command()
@_reports_errors
def compare(
    trace: TraceOption,
    machine: MachineOption,
    device_budget: DeviceBudgetOption,
    execution_trace: ExecutionTraceOption = None,
    host_budget: HostBudgetOption = None,
    nvme_budget: NvmeBudgetOption = None,
    policies: Annotated[str | None, typer.Option("--policies", help="Names, with commas; all when left out.")] = None,
    effort: EffortOption = Effort.fast,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw the rows into this .html file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Plans one traced step with several policies, one row each; `auto` runs last and takes every plan as a candidate."""
    from tieroff.core.machine import load_machine
    from tieroff.planner.policies import POLICIES
    from tieroff.planner.rows import compare_rows
    from tieroff.report.comparison import check_page
    from tieroff.tracing.files import load_trace

    if plot is not None:
        check_page(plot)
    names = [name.strip() for name in policies.split(",")] if policies else sorted(POLICIES, key=lambda n: n == "auto")
    step = load_trace(trace, execution_trace)
    loaded = load_machine(machine)
    budget = _budget(step, device_budget, host_budget, nvme_budget)
    with progress() as report:
        found = compare_rows(step, loaded, budget, names, effort.value, on_progress=report)
    if plot is not None:
        _write_plot(plot, step, loaded, budget, found)
    rows = [result.row.as_dict() for result in found]
    if as_json:
        _print_json(rows)
    else:
        print_rows(rows)
        print("faithful step: under the row's own options; with options it is not compared with auto, whose step is "
              "at most that of every row")  # fmt: skip
        for row in rows:
            if row["reason"]:
                print(f"{row['policy']}: {row['reason']}")


app.command("calibrate")(_reports_errors(calibrating.calibrate))
app.command("launch", context_settings=launching.SETTINGS)(_reports_errors(launching.launch))


def _write_plot(path: Path, trace: Trace, machine: Machine, budget: dict[Tier, int], found: Sequence[Result]) -> None:
    from tieroff.core.tensor import Tier
    from tieroff.report.comparison import Compared, write_comparison

    device_bytes = budget[Tier.DEVICE]
    ideal_s = trace.ideal_ns / NS_PER_S
    rows = [(r.row, r.row.faithful_step_s if r.row.options else None, r.timeline) for r in found]
    compared = [Compared(row.policy, ideal_s, row.step_s, row.bound_s, line, own_s) for row, own_s, line in rows]
    title = f"{trace.name or 'trace'} on {machine.name or 'the machine'}, device budget {format_bytes(device_bytes)}"
    write_comparison(path, title, device_bytes, compared)


def _dry_trace(model: str, machine: Machine) -> Trace:
    """Returns the trace of a model's step; modules in the working directory are found too, as by `python -m`."""
    from tieroff.tracing.dry import dry_trace, find_factory

    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    # Figures of a datasheet are peaks of an accelerator, of which the clock knows what is reached.
    kernels = machine.device_type or ("cuda" if machine.measured.startswith("datasheet") else "cpu")
    return dry_trace(find_factory(model), machine, name=model, kernels=kernels)


def _budget(
    trace: Trace, device_budget: str, host_budget: str | None, nvme_budget: str | None
) -> dict[Tier, int]:
    """Returns the budget per tier; a tier that none is given for has the machine's bytes."""
    from tieroff.config import DeviceBudget
    from tieroff.core.tensor import Tier
    from tieroff.planner.problem import live_bytes

    given = DeviceBudget.parse(device_budget)
    lower = {Tier.HOST: host_budget, Tier.NVME: nvme_budget}
    budget = {tier: parse_bytes(text) for tier, text in lower.items() if text is not None}
    budget[Tier.DEVICE] = given.resolve(int(live_bytes(trace).max()))
    return budget


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _print_probe(machine: Machine, found: Survey) -> None:
    speeds = ("write_bytes_per_s", "read_bytes_per_s", "both_write_bytes_per_s", "both_read_bytes_per_s")
    lines = [
        (
            str(row.dir),
            row.rates.engine + (" (best)" if found.best[row.dir] == row.rates.engine else ""),
            "direct" if row.rates.is_direct else "buffered",
            f"{row.rates.depth} x {format_bytes(row.rates.block_bytes)}",
            *(_rate(getattr(row.rates, key)) for key in speeds),
        )
        for row in found.rows
    ]
    print_table(
        "folders",
        ("folder", "engine", "path", "transfers", "write", "read", "write, both ways", "read, both ways"),
        lines,
    )
    if found.refused:
        refused = [(str(row.dir), row.engine, row.reason) for row in found.refused]
        print_table("refused", ("folder", "engine", "why"), refused)
    cells = [
        (str(row.dir), row.rates.engine, format_bytes(cell.block_bytes), str(cell.depth),
         _rate(cell.write_bytes_per_s), _rate(cell.read_bytes_per_s))
        for row in found.rows
        for cell in row.cells
    ]  # fmt: skip
    print_table("sizes of transfers", ("folder", "engine", "size", "under way", "write", "read"), cells)
    drives = [(str(folder), found.file_systems[folder], found.drives[folder] or "not told") for folder in found.best]
    print_table("drives", ("folder", "file system", "drive"), drives)
    link = (
        machine.name,
        _rate(machine.d2h_bytes_per_s),
        _rate(machine.h2d_bytes_per_s),
        f"{machine.duplex_share:.0%} of the sum",
        f"{1e9 / machine.checksum_bytes_per_s:.2f} s/GB" if machine.checksum_bytes_per_s else "not measurable",
    )
    print_table(
        "link between device and host memory",
        ("machine", "device to host", "host to device", "both ways at once", "checksum, per core"),
        [link],
    )


def _print_diagnosis(found: Diagnosis) -> None:
    lines = [(fact.name, "yes" if fact.is_ok else "no", fact.detail) for fact in found.facts]
    print_table("machine", ("what", "there", "detail"), lines)
    folders = [
        (row.dir, row.path, row.file_system, row.drive or "not told", format_bytes(row.free_bytes), row.reason)
        for row in found.dirs
    ]
    print_table("folders", ("folder", "path", "file system", "drive", "free", "why not direct"), folders)
    engines = [(row.dir, engine.engine, engine.path, engine.reason) for row in found.dirs for engine in row.engines]
    print_table("engines", ("folder", "engine", "path", "why not a better one"), engines)


def _rate(bytes_per_s: int) -> str:
    return f"{format_bytes(bytes_per_s)}/s"


if __name__ == "__main__":
    main()
