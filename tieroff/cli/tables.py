"""Tables of the commands about this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieroff.report.terminal import print_table
from tieroff.units import format_bytes

if TYPE_CHECKING:
    from tieroff.core.machine import Machine
    from tieroff.probe.doctor import Diagnosis
    from tieroff.probe.survey import Survey


def print_probe(machine: Machine, found: Survey) -> None:
    """Prints folders, refused engines, cells and the host link."""
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
    names = ("folder", "engine", "path", "transfers", "write", "read", "write, both ways", "read, both ways")
    print_table("folders", names, lines)
    if found.refused:
        refused = [(str(row.dir), row.engine, row.reason) for row in found.refused]
        print_table("refused", ("folder", "engine", "why"), refused)
    cells = [
        (
            str(row.dir),
            row.rates.engine,
            format_bytes(cell.block_bytes),
            str(cell.depth),
            _rate(cell.write_bytes_per_s),
            _rate(cell.read_bytes_per_s),
        )
        for row in found.rows
        for cell in row.cells
    ]
    print_table("sizes of transfers", ("folder", "engine", "size", "under way", "write", "read"), cells)
    drives = [(str(folder), found.file_systems[folder], found.drives[folder] or "unknown") for folder in found.best]
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
    if found.updates.state_bytes_per_s:  # 0 without kernels
        updates = [_rate(getattr(found.updates, f"{key}_bytes_per_s")) for key in ("state", "beside", "copied")]
        print_table(
            "updates in host memory",
            ("state", "state, beside copies", "copies both ways meanwhile", "memory"),
            [(*updates, _rate(machine.host_memory_bytes_per_s))],
        )


def print_diagnosis(found: Diagnosis) -> None:
    """Prints what there is, per folder and engine."""
    lines = [(fact.name, "yes" if fact.is_ok else "no", fact.detail) for fact in found.facts]
    print_table("machine", ("what", "there", "detail"), lines)
    folders = [
        (row.dir, row.path, row.file_system, row.drive or "unknown", format_bytes(row.free_bytes), row.reason)
        for row in found.dirs
    ]
    print_table("folders", ("folder", "path", "file system", "drive", "free", "why not direct"), folders)
    engines = [(row.dir, engine.engine, engine.path, engine.reason) for row in found.dirs for engine in row.engines]
    print_table("engines", ("folder", "engine", "path", "why not a better one"), engines)


def _rate(bytes_per_s: int) -> str:
    return f"{format_bytes(bytes_per_s)}/s"
