"""The command `tieroff rehearse`. What it needs is imported inside it, as in `tieroff.cli`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tieroff.rehearsal.rehearse import Outcome

SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}
"""How click reads the command line: what follows the script is the script's."""


def rehearse(
    script: Annotated[Path, typer.Argument(help="A training script.", exists=True, dir_okay=False)],
    machine: Annotated[Path, typer.Option("--machine", help="The machine to rehearse for: a machine.toml.")],
    device_budget: Annotated[str, typer.Option("--device-budget", help='Bytes, a share of the peak ("25%"), or "min".')],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own, as they are.")] = None,
    host_budget: Annotated[
        str | None, typer.Option("--host-budget", help="Bytes. Left out: the script's config, else the machine's.")
    ] = None,
    nvme_budget: Annotated[
        str | None, typer.Option("--nvme-budget", help="Bytes. Left out: the script's config, else the machine's.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the run and its page.")] = Path("rehearsal"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document; the script prints to stderr.")] = False,
) -> None:
    """Runs a training script with the real engine on a GPU that is not there, and says what limits it.

    Memory is counted and not touched, kernels only give shapes and take the time that the machine's clock says, and the host's
    time is its own. Numbers are zeros.
    """
    from tieroff.rehearsal.rehearse import Request
    from tieroff.rehearsal.rehearse import rehearse as run
    from tieroff.units import parse_bytes

    host_bytes = parse_bytes(host_budget) if host_budget is not None else None
    nvme_bytes = parse_bytes(nvme_budget) if nvme_budget is not None else None
    request = Request(script, tuple(arguments or ()), machine, device_budget, host_bytes, nvme_bytes, out, as_json)
    outcome = run(request)
    if as_json:
        sys.stdout.write(json.dumps(outcome.as_document(), indent=2) + "\n")
    else:
        _print(outcome)
    raise typer.Exit(1 if outcome.status else 0)


def _print(outcome: Outcome) -> None:
    """Prints the outcome to standard error: standard output is the script's."""
    for line in _lines(outcome):
        sys.stderr.write(f"{line}\n")


def _lines(outcome: Outcome) -> list[str]:
    from tieroff.units import format_bytes, format_seconds

    lines = [f"rehearsed on {outcome.machine}: {outcome.steps} steps, of which {outcome.timed_steps} settled ones are told of"]
    step = outcome.step
    if step is not None and outcome.interval_s is not None and outcome.host_s is not None:
        low, high = map(format_seconds, outcome.interval_s)
        lines.append(f"step: {format_seconds(step.step_s)} ({low} to {high} in nine cases of ten); {step.kernels} kernels")
        parts = {"kernels run": step.compute_s, "wait for copies": step.waiting_s, "wait for the host": step.host_bound_s}
        lines.append("of it: " + ", ".join(f"{what} {_percent(part, step.step_s)}" for what, part in parts.items()))
        cpu = format_seconds(outcome.host_cpu_s or 0.0)
        lines.append(f"the host's own time per step: {format_seconds(outcome.host_s)}, on this machine's CPU ({cpu} of it)")
        lines.append("moved per step: " + ", ".join(f"{link} {format_bytes(size)}" for link, size in step.moved_bytes.items()))
    if outcome.predicted_step_s is not None:
        lines.append(f"the plan predicts {format_seconds(outcome.predicted_step_s)}")
    lines.append("peak: " + ", ".join(f"{tier} {format_bytes(size)}" for tier, size in outcome.peak_bytes.items()))
    lines += outcome.explain.splitlines()
    lines += [f"note: {note}" for note in outcome.notes]
    if outcome.report is not None:
        lines.append(f"page: {outcome.report}")
    lines.append(f"real memory taken: {format_bytes(outcome.real_peak_bytes)}")
    return lines


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"
