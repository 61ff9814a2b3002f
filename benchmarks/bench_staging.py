"""How fast tensors move between a device and files, against the slower of the link and the drive alone.

    python benchmarks/bench_staging.py --dir /mnt/nvme0 [--device cuda] [--json FILE]

`--device sim` (with the project's folder in PYTHONPATH) takes the simulated device of the tests, whose link is this machine's
memory.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from tieroff.runtime.backend.accelerator import AcceleratorBackend
from tieroff.runtime.backend.place import BlockPlace
from tieroff.runtime.backend.staging.staging import pinned
from tieroff.storage.engines import choose
from tieroff.storage.nvme.file_store import FileStore
from tieroff.units import parse_bytes

MIB = 2**20
WAIT_S = 120


def main(
    folder: Annotated[Path, typer.Option("--dir", help="A folder on the drive.")],
    device: Annotated[str, typer.Option(help="The accelerator.")] = "cuda",
    staging: Annotated[str, typer.Option(help="Pinned memory for both directions.")] = "64MiB",
    sizes: Annotated[str, typer.Option(help="Sizes of tensors, in MiB.")] = "1,8,64,512",
    rounds: Annotated[int, typer.Option(help="Rounds; medians are shown.")] = 5,
    out: Annotated[Path | None, typer.Option("--json", help="Where the rows are written.")] = None,
) -> None:
    """Measures copies of 512 MiB in tensors of each size, in turn with the link and the drive alone."""
    if device == "sim":
        from tests.accelerator import sim, vendor

        sim.load()
        vendor.install()
    rows = [
        measure(torch.device(device, 0), folder, int(size) * MIB, parse_bytes(staging), rounds) for size in sizes.split(",")
    ]
    if out is not None:
        out.write_text(json.dumps({"device": device, "staging_bytes": parse_bytes(staging), "rows": rows}, indent=2) + "\n")
    table = Table(title="of the slower one's speed; GB/s")
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=160).print(table)


def measure(device: torch.device, folder: Path, size_bytes: int, staging_bytes: int, rounds: int) -> dict[str, float | int]:
    """Returns one row: rates in GB/s, and the staged copies' rates over those of the slower part."""
    count = max(1, 512 * MIB // size_bytes)
    backend = AcceleratorBackend(device)
    backend.use_staging(staging_bytes)
    engine = choose()
    store = FileStore([folder], count * size_bytes + 64 * MIB, engine, checksum="off")
    slab = backend.slabs.make(size_bytes)
    host = pinned(slab.address, size_bytes)
    tensors = [backend.empty(size_bytes).fill_(index % 256) for index in range(count)]
    places = [BlockPlace(store, size_bytes) for _ in tensors]

    def drive(write: bool) -> None:
        started = [p.write(host.data_ptr(), host) if write else p.read(host.data_ptr(), host) for p in places]
        for copy in started:
            copy.wait(WAIT_S)

    def link(out: bool) -> None:
        for tensor in tensors:
            (host if out else tensor).copy_(tensor if out else host, non_blocking=True)
        torch.accelerator.synchronize(device)

    def staged(out: bool) -> None:
        started = [backend.copy_out(t, p) if out else backend.copy_in(p, t) for t, p in zip(tensors, places, strict=True)]
        for copy in started:
            copy.wait(WAIT_S)
        torch.accelerator.synchronize(device)

    total = count * size_bytes
    rates = _medians_in_turn(
        [
            lambda: drive(True),
            lambda: link(True),
            lambda: staged(True),
            lambda: drive(False),
            lambda: link(False),
            lambda: staged(False),
        ],
        total,
        rounds,
    )
    for place in places:
        place.free()
    store.close()
    engine.close()
    backend.slabs.release(slab)
    backend.close()
    write, d2h, out, read, h2d, into = rates
    return {
        "MiB": size_bytes // MIB,
        "drive write": write,
        "d2h": d2h,
        "staged out": out,
        "out/min": out / min(write, d2h),
        "drive read": read,
        "h2d": h2d,
        "staged in": into,
        "in/min": into / min(read, h2d),
    }


def _medians_in_turn(works: Sequence[Callable[[], None]], size_bytes: int, rounds: int) -> list[float]:
    """Returns each work's median rate in GB/s; rounds of all in turn, after one that warms up."""
    seconds: list[list[float]] = [[] for _ in works]
    for index in range(rounds + 1):
        for work, taken in zip(works, seconds, strict=True):
            begin = time.perf_counter()
            work()
            if index:
                taken.append(time.perf_counter() - begin)
    return [size_bytes / statistics.median(taken) / 1e9 for taken in seconds]


if __name__ == "__main__":
    typer.run(main)
