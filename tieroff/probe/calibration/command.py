"""`tieroff calibrate`: what this machine's device reaches, as a machine file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    out: Annotated[Path | None, typer.Option("--out", help="Write a machine.toml.")] = None,
    machine: Annotated[Path | None, typer.Option("--machine", help="Keep this file's other figures.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.01, help="For each of five kernels, and for updates.")] = 2.5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Measures the device's kernels under sustained load, its link and the CPU's updates, for `tieroff plan --model`."""
    import torch

    from tieroff.core.machine import load_machine, save_machine
    from tieroff.probe.calibration.kernels import calibrate as measure
    from tieroff.probe.calibration.updates import measure_updates
    from tieroff.probe.machine import measure_machine

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = accelerator.type if accelerator is not None else "cpu"
    base = load_machine(machine) if machine is not None else measure_machine(device, seconds=seconds)
    found = measure(device, seconds)
    updates = measure_updates(device, seconds)
    measured = updates.of(found.machine(base, device))
    if out is not None:
        save_machine(measured, out)
    rates = {key: getattr(measured, key) for key in ("cpu_update_bytes_per_s", "host_memory_bytes_per_s")}
    figures = {"device_type": device, **asdict(found), **rates, "machine": str(out) if out else None}
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
    else:
        for key, value in figures.items():
            typer.echo(f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}")
