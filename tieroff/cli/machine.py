"""Commands about this machine: `probe` and `doctor`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tieroff.cli.options import AsJson
from tieroff.cli.output import check_out, print_json
from tieroff.cli.tables import print_diagnosis, print_probe
from tieroff.report.terminal import progress

if TYPE_CHECKING:
    from tieroff.probe.survey import Survey


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

    check_out(out)
    device = _device()
    with progress() as report:
        found = survey(device, dirs, seconds, report)
    machine = surveyed_machine(device, dirs, found, seconds)
    if out is not None:
        save_machine(machine, out)
    if as_json:
        print_json({**_probe_document(found), "machine": str(out) if out else None})
        return
    print_probe(machine, found)
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
        "updates": asdict(found.updates),
    }


def _device() -> str:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


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
        print_json(asdict(found))
    else:
        print_diagnosis(found)
