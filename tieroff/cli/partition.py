"""The command `tieroff partition`. What it needs is imported inside it, as in `tieroff.cli`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tieroff.cli.output import check_out
from tieroff.units import format_bytes

if TYPE_CHECKING:
    from tieroff.study.sharding.partition_model import Partitioned
    from tieroff.study.sharding.problem import ShardingPlan, ShardingProblem

MARGIN_S = 1.0
"""Of a time limit: what checking and printing take."""
MARGIN_SHARE = 0.02


def partition(
    problem: Annotated[
        Path | None, typer.Option("--problem", help="A problem in the format of the IOPDDL contest, .json or .json.gz.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="MODULE:FACTORY, a function that returns (model, inputs) or a tieroff.DryModel."),
    ] = None,
    devices: Annotated[int, typer.Option("--devices", min=1, help="How many: 1, 2, 4, 8 …")] = 2,
    machine: Annotated[Path | None, typer.Option("--machine", help="A file with peer_bytes_per_s.")] = None,
    device_budget: Annotated[
        str, typer.Option("--device-budget", help='Of each device: bytes, or a share of the peak on one device ("25%").')
    ] = "100%",
    out: Annotated[Path | None, typer.Option("--out", help="Write the placements, for tieroff.parallelize.")] = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", min=1.0, help="Seconds for the whole command, reading the problem included.")
    ] = 60.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the search's random numbers.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Chooses how each operator of a step is split over devices: least cost within each device's memory."""
    if (problem is None) == (model is None):
        raise typer.BadParameter("give either --problem FILE or --model MODULE:FACTORY")
    check_out(out)
    if problem is not None:
        _solve(problem, time_limit, seed, as_json)
    elif machine is None:
        raise typer.BadParameter("give --machine FILE with --model")
    else:
        _partition_model(model or "", devices, machine, device_budget, out, as_json)


def _partition_model(model: str, devices: int, machine: Path, device_budget: str, out: Path | None, as_json: bool) -> None:
    from tieroff.core.machine import load_machine
    from tieroff.core.sharding.placements import save_placements
    from tieroff.core.tensor import Tier
    from tieroff.device_budget import DeviceBudget
    from tieroff.errors import ConfigError
    from tieroff.report.terminal import progress
    from tieroff.study.sharding.capture import capture_step
    from tieroff.study.sharding.partition_model import as_document, partition_model
    from tieroff.tracing.factory import find_factory

    if str(Path.cwd()) not in sys.path:  # modules there are found too, as by `python -m`
        sys.path.insert(0, str(Path.cwd()))
    loaded = load_machine(machine)
    budget = DeviceBudget.parse(device_budget)
    if budget.is_least:
        raise ConfigError(
            '--device-budget: expected bytes like "6GiB" or a share like "25%", got "min": give the bytes per device'
        )
    with progress() as report:
        report(f"tracing {model}", None)
        graph = capture_step(find_factory(model), loaded, name=model)
        report(f"partitioning {len(graph.ops)} ops over {devices} devices", None)
        found = partition_model(graph, loaded, devices, lambda step: {Tier.DEVICE: budget.resolve(step.peak_bytes)})
    if out is not None:
        save_placements(found.placements, out)
    if as_json:
        sys.stdout.write(json.dumps(as_document(found), default=str) + "\n")
    else:
        _print_model(found, out)


def _print_model(found: Partitioned, out: Path | None) -> None:
    from tieroff.report.terminal import print_table
    from tieroff.units import format_seconds

    print_table(
        f"{2 ** len(found.placements.mesh_shape)} devices: exchanged in a step, and held by each",
        ("scheme", "bytes exchanged", "by level", "of the parameters", "peak"),
        [
            (
                row.scheme,
                format_bytes(sum(row.exchanged_bytes)),
                " ".join(format_bytes(size) for size in row.exchanged_bytes),
                f"{row.held_share:.1%}",
                format_bytes(row.peak_bytes),
            )
            for row in found.schemes
        ],
    )
    print_table(
        "Tofu's partition, and what is left of it moved off each device",
        ("devices", "status", "step", "of it stalls", "peak with nothing moved", "bytes exchanged"),
        [
            (
                str(row.devices),
                row.plan.status,
                format_seconds(row.plan.step_s) if row.plan.step_s is not None else "-",
                format_seconds(row.plan.stall_s) if row.plan.stall_s is not None else "-",
                format_bytes(row.peak_bytes),
                format_bytes(row.exchanged_bytes),
            )
            for row in found.devices
        ],
    )
    if found.unknown_ops:
        typer.echo(f"run whole on every device, for nobody says how to split them: {', '.join(found.unknown_ops)}")
    typer.echo(f"fastest within the budget: {found.fastest} devices" if found.fastest else "nothing fits the budget")
    if out is not None:
        typer.echo(f"written to {out}")


def _solve(path: Path, time_limit_s: float, seed: int, as_json: bool) -> None:
    from tieroff.study.sharding.iopddl import load_problem
    from tieroff.study.sharding.search import search_sharding

    deadline = _started() + time_limit_s - MARGIN_S - MARGIN_SHARE * time_limit_s
    loaded = load_problem(path)
    # However slow the machine: what there is to find is found by a search that has some time.
    found = search_sharding(loaded, max(deadline - time.time(), 0.2), seed)
    if as_json:
        document = {
            "cost": found.cost,
            "bound": found.bound,
            "is_feasible": found.is_feasible,
            "strategies": list(found.strategies),
        }
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        _print(loaded, found)


def _started() -> float:
    """Returns when this process began, in seconds since the epoch."""
    import psutil

    return float(psutil.Process().create_time())


def _print(problem: ShardingProblem, found: ShardingPlan) -> None:
    from tieroff.report.terminal import print_table
    from tieroff.study.sharding.check import count_sharding

    bound = "none: nothing fits" if found.bound is None else f"{found.bound:.0f}"
    if found.cost is None:
        print_table("partition", ("problem", "cost", "bound"), [(problem.name, "nothing found", bound)])
        return
    peak = count_sharding(problem, found.strategies).peak_bytes
    gap = "-" if found.bound is None or not found.cost else f"{1 - found.bound / found.cost:.2%}"
    print_table(
        "partition",
        ("problem", "cost", "bound", "gap", "peak per device", "limit"),
        [(problem.name, str(found.cost), bound, gap, format_bytes(peak), format_bytes(problem.usage_limit))],
    )
