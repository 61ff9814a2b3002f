"""Turns measurements into a Machine: bytes per tier, bandwidth per link."""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tieroff.core.io.interpreter import module_command
from tieroff.core.machine import Machine
from tieroff.probe import limits
from tieroff.probe.calibration.updates import measure_updates
from tieroff.probe.checksum import measure_checksum
from tieroff.probe.links import LinkRates, measure_links
from tieroff.probe.nvme import NvmeRates, measure_dirs
from tieroff.storage.limits import host_limit_bytes

if TYPE_CHECKING:
    from tieroff.probe.survey import Survey

log = logging.getLogger("tieroff")

UPDATES_SHARE = 0.1
"""Share of the time that goes to updates where they are asked for."""

LINKS_SHARE, CHECKSUM_SHARE = 0.3, 0.02
"""Shares of the time that go to the host link and to checksums when there are folders to measure too."""
# What a planned step takes of the host for each of its transfers, on a GPU: (72.5 - 52.3) ms over 240 - 66 transfers, two plans
# of benchmarks/bench_clock.py's GPT (NVIDIA H100, 2026-11-26).
_MOVE_HOST_S = 116e-6
_START_S = 60.0  # that another interpreter may take beside its measuring, on a machine that is busy


def measure_machine(
    device: str, dirs: Sequence[Path] = (), *, engine: str = "auto", seconds: float = 1.5, has_updates: bool = False
) -> Machine:
    """Returns the machine as measured now, in short: one engine, one size of transfers.

    Args:
        device: "cpu", or the kind of torch's accelerator, such as "cuda".
        dirs: folders of the NVMe tier; none leaves that tier out.
        engine: I/O engine to measure them with.
        seconds: time to spend in total, roughly.
        has_updates: with what the CPU updates in host memory.

    Raises:
        ConfigError: a folder is missing, read-only or too small.
        StoreError: a transfer failed.
    """
    if has_updates:
        updates, seconds = measure_updates(device, seconds * UPDATES_SHARE), seconds * (1 - UPDATES_SHARE)
        return updates.of(measure_machine(device, dirs, engine=engine, seconds=seconds))
    links = measure_links(device, seconds * LINKS_SHARE if dirs else seconds)
    rates = measure_dirs(dirs, engine, seconds * (1 - LINKS_SHARE - CHECKSUM_SHARE)) if dirs else None
    checksum = measure_checksum(seconds * CHECKSUM_SHARE) if dirs else 0
    return compose_machine(device, links, dirs, rates, "short copies at the start of a run", checksum)


def measure_apart(dirs: Sequence[Path], *, engine: str, seconds: float) -> Machine:
    """Returns the machine of the CPU backend as measured now, by a process of its own; by this one where there can be none.

    On the CPU backend a budget is about the memory of this process, and small models need less in all than the buffers that
    measuring takes. The other process is a fresh interpreter without torch.

    Args:
        dirs: folders of the NVMe tier.
        engine: I/O engine to measure them with.
        seconds: time to spend in total, roughly.

    Raises:
        ConfigError: a folder is missing, read-only or too small.
        StoreError: a transfer failed.
    """
    try:
        command, environment = module_command(__name__, engine, str(seconds), *map(os.path.abspath, dirs))
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds + _START_S, check=True
        )
        return Machine(**json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, TypeError) as error:
        # What is wrong with a folder is an error of this process too, which says it as it is.
        log.info("no other process could measure the machine (%s): this one does", error)
        return measure_machine("cpu", dirs, engine=engine, seconds=seconds)


def surveyed_machine(device: str, dirs: Sequence[Path], found: Survey, seconds: float) -> Machine:
    """Returns the machine that a survey describes, with a table per folder.

    A folder's table has the rates of its best engine, and those of each engine under keys that begin with its name.

    Args:
        device: "cpu", or the kind of torch's accelerator, such as "cuda".
        dirs: the folders of the survey.
        found: what was measured.
        seconds: what it was given.
    """
    method = f"tieroff probe for {seconds:g} s: files written once before, medians of slices in turn"
    tables = {os.path.abspath(folder): _table(folder, found) for folder in dirs}
    return found.updates.of(
        compose_machine(device, found.links, dirs, found.together, method, found.checksum_bytes_per_s, tables)
    )


def _table(folder: Path, found: Survey) -> dict[str, Any]:
    best = found.row(folder, found.best[folder]).rates
    table: dict[str, Any] = {
        "engine": best.engine,
        "is_direct": best.is_direct,
        "file_system": found.file_systems[folder],
        "drive": found.drives[folder],
        "block_bytes": best.block_bytes,
        "depth": best.depth,
        **_speeds(best, ""),
        "write_latency_s": best.write_latency_s,
        "read_latency_s": best.read_latency_s,
    }
    for row in found.rows:
        if row.dir == folder:
            table |= _speeds(row.rates, f"{row.rates.engine}_")
    return table


def _speeds(rates: NvmeRates, prefix: str) -> dict[str, int]:
    names = ("write_bytes_per_s", "read_bytes_per_s", "both_write_bytes_per_s", "both_read_bytes_per_s")
    return {prefix + name: getattr(rates, name) for name in names}


def compose_machine(
    device: str,
    links: LinkRates,
    dirs: Sequence[Path],
    rates: NvmeRates | None,
    method: str,
    checksum_bytes_per_s: int = 0,
    tables: Mapping[str, dict[str, Any]] | None = None,
) -> Machine:
    """Returns the machine that measurements describe.

    Args:
        device: "cpu", or the kind of torch's accelerator, such as "cuda".
        links: rates of the host link.
        dirs: folders of the NVMe tier.
        rates: of all folders together, or None without any.
        method: how it was measured; the date is put before it.
        checksum_bytes_per_s: what one core makes a checksum of, or 0.
        tables: what to keep with the machine, by folder.
    """
    return Machine(
        name=_device_name(device),
        measured=f"{datetime.date.today().isoformat()}, {method}",
        device_bytes=_device_bytes(device),
        host_bytes=limits.default_host_bytes(),
        nvme_bytes=limits.default_nvme_bytes(dirs),
        d2h_bytes_per_s=links.d2h_bytes_per_s,
        h2d_bytes_per_s=links.h2d_bytes_per_s,
        nvme_write_bytes_per_s=rates.write_bytes_per_s if rates else 0,
        nvme_read_bytes_per_s=rates.read_bytes_per_s if rates else 0,
        d2h_latency_s=links.d2h_latency_s,
        h2d_latency_s=links.h2d_latency_s,
        nvme_write_latency_s=rates.write_latency_s if rates else 0.0,
        nvme_read_latency_s=rates.read_latency_s if rates else 0.0,
        duplex_share=links.duplex_share,
        move_host_s=0.0 if device == "cpu" else _MOVE_HOST_S,
        # Without direct storage every byte between a GPU and a drive passes through host memory.
        nvme_shares_host_link=device != "cpu",
        checksum_bytes_per_s=checksum_bytes_per_s,
        device_type=device,
        kernel=f"{platform.system()} {platform.release()}",
        dirs=dict(tables or {}),
    )


def _device_name(device: str) -> str:
    if device == "cpu":
        return f"{platform.node()} ({platform.machine()}, cpu)"
    import torch

    named = getattr(getattr(torch, device, None), "get_device_name", None)  # torch.accelerator has no call for it
    return str(named()) if named is not None else f"{platform.node()} ({platform.machine()}, {device})"


def _device_bytes(device: str) -> int:
    """Returns the device's free memory; on the CPU the memory that this process may still use."""
    if device == "cpu":
        return host_limit_bytes()
    import torch

    return int(torch.accelerator.get_memory_info()[0])


def main(engine: str, seconds: str, *dirs: str) -> None:
    """Prints the machine that is measured, as `measure_apart` reads it."""
    machine = measure_machine("cpu", [Path(folder) for folder in dirs], engine=engine, seconds=float(seconds))
    sys.stdout.write(json.dumps(dataclasses.asdict(machine)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
