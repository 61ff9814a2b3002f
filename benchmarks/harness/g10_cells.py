"""The published cells of G10: their traces, machine, budgets and times."""

from __future__ import annotations

import csv
from pathlib import Path

from harness.data import outside_data
from tieroff.core.machine import Machine
from tieroff.core.tensor import Tier
from tieroff.units import GIB, TIB

FOLDER = outside_data("g10")
MACHINE = Machine(
    name="G10's",
    measured="the configuration of its published simulations",
    d2h_bytes_per_s=round(15.754 * GIB),
    h2d_bytes_per_s=round(15.754 * GIB),
    nvme_write_bytes_per_s=round(3.2 * GIB),
    nvme_read_bytes_per_s=round(3.2 * GIB),
    nvme_write_latency_s=16e-6,
    nvme_read_latency_s=12e-6,
    nvme_shares_host_link=True,
)
DEVICE_BYTES = 40 * GIB
HOST_BYTES = 128 * GIB
NVME_BYTES = 16 * TIB


def cell_name(row: dict[str, str]) -> str:
    """Returns the folder name of a row's trace."""
    return f"{row['model']}-b{row['batch']}"


def trace_folder(name: str) -> Path:
    """Returns the folder of a cell's trace."""
    return FOLDER / "traces" / name


def published_times(folder: Path = FOLDER) -> dict[tuple[str, int], float]:
    """Returns G10's published seconds per iteration by trace and bytes of host memory."""
    times: dict[tuple[str, int], float] = {}
    with (folder / "published_host_memory_sweep.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            times[cell_name(row), int(row["host_gib"]) * GIB] = float(row["g10_s"])
    with (folder / "published_times.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            times[cell_name(row), HOST_BYTES] = float(row["g10_s"])
    return times


def published_cells(folder: Path = FOLDER) -> list[str]:
    """Returns the traces of the published table, in its order."""
    with (folder / "published_times.csv").open(newline="") as file:
        return [cell_name(row) for row in csv.DictReader(file)]


def all_cells(folder: Path = FOLDER) -> list[str]:
    """Returns the traces of the published table, then those of the sweep alone."""
    return list(dict.fromkeys([*published_cells(folder), *(name for name, _ in published_times(folder))]))


def budget_of(host_bytes: int) -> dict[Tier, int]:
    """Returns the budget of a G10 cell."""
    return {Tier.DEVICE: DEVICE_BYTES, Tier.HOST: host_bytes, Tier.NVME: NVME_BYTES}


def is_slower(step_s: float, published_s: float) -> bool:
    """True when a step takes longer than a published time, which is rounded to four decimals."""
    return step_s > published_s + 0.5e-4
