"""The minimal measurement of a machine: what its tiers hold and what its links move."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tieroff.core.machine import Machine
from tieroff.probe import limits
from tieroff.probe.links import LinkRates, measure_links
from tieroff.probe.nvme import NvmeRates, measure_dirs
from tieroff.storage.limits import host_limit_bytes

LINKS_SHARE = 0.3
"""Share of the time that goes to the host link when there are folders to measure too."""


def measure_machine(device: str, dirs: Sequence[Path] = (), *, engine: str = "auto", seconds: float = 1.5) -> Machine:
    """Returns the machine as measured now.

    Args:
        device: "cuda" or "cpu".
        dirs: folders of the NVMe tier; none leaves that tier out.
        engine: I/O engine to measure them with.
        seconds: time to spend in total, roughly.

    Raises:
        ConfigError: a folder is missing, read-only or too small.
        StoreError: a transfer failed.
    """
    links = measure_links(device, seconds * LINKS_SHARE if dirs else seconds)
    rates = measure_dirs(dirs, engine, seconds * (1 - LINKS_SHARE)) if dirs else None
    tables = {",".join(map(str, dirs)): rates} if rates else {}
    return compose_machine(device, links, dirs, rates, tables)


def compose_machine(
    device: str,
    links: LinkRates,
    dirs: Sequence[Path],
    rates: NvmeRates | None,
    tables: Mapping[str, NvmeRates],
) -> Machine:
    """Returns the machine that measurements describe.

    Args:
        device: "cuda" or "cpu".
        links: rates of the host link.
        dirs: folders of the NVMe tier.
        rates: of all folders together, or None without any.
        tables: rates to keep with the machine, by folder.
    """
    return Machine(
        name=_device_name(device),
        measured=f"{datetime.date.today().isoformat()}, short copies at the start of a run",
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
        # Without direct storage every byte between a GPU and a drive passes through host memory.
        nvme_shares_host_link=device == "cuda",
        dirs={name: asdict(table) for name, table in tables.items()},
    )


def _device_name(device: str) -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return f"{platform.node()} ({platform.machine()}, cpu)"


def _device_bytes(device: str) -> int:
    """Returns the device's free memory; on the CPU the memory that this process may still use."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    return host_limit_bytes()
