"""Speed of the I/O engines over that of a raw io_uring loop, side by side on one drive.

All move bytes between memory and ranges of their own of one file, which has no name and was written once before. Slices
of 0.2 s are taken in turn, in an order that changes; every turn gives each of them one ratio over the reference of that
turn. Shown are the medians of these ratios, with the interval of 95 % confidence, and the reference over itself as a
control: where that is outside 0.97-1.03, the row is void.

Close what else uses the machine: with 2 cores, an engine's threads and the reference share them with everything.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from harness.io_subjects import (
    DEPTHS,
    RAW_BLOCK_BYTES,
    RAW_DEPTH,
    EngineSubject,
    Kind,
    LibrarySubject,
    Matmul,
    Moved,
    RawLoop,
    Subject,
    SubjectFailed,
    build_raw,
    fio_rate,
    make_memory,
    path_of,
)
from harness.pairs import Ratio, order_of, ratio_of
from harness.results import save
from tieroff.errors import TieroffError
from tieroff.probe.drives import drive, file_system
from tieroff.probe.nvme import FREE_BYTES_MIN, Track
from tieroff.report.terminal import make_console
from tieroff.storage.engines import OpenFile, available, choose
from tieroff.storage.nvme import files
from tieroff.units import format_bytes, parse_bytes

KINDS: tuple[Kind, ...] = ("read", "write", "both")
MATMUL_BYTES = 4 * 2**20
REFERENCE, CONTROL = "raw", "raw again"
LIBRARIES = ("kvikio", "deepnvme")
FIO_PAIRS = 3
FIO_S = 1.0


@dataclass
class Cell:
    """The slices of one kind and size, by subject; with `matmul`, products per second while each was measured."""

    kind: Kind
    block_bytes: int
    has_matmul: bool = False
    slices: dict[str, list[Moved]] = field(default_factory=dict)
    matmul: dict[str, list[float]] = field(default_factory=dict)

    def rates(self, name: str, way: str) -> list[float]:
        """Returns the bytes per second of a subject's slices: written, read, or their sum."""
        attribute = {"write": "written_bytes", "read": "read_bytes", "sum": "all_bytes"}[way]
        return [getattr(one, attribute) / one.wall_s for one in self.slices[name]]

    def cpu_s_per_gb(self, name: str) -> float:
        """Returns the seconds of all cores per 1e9 bytes moved."""
        slices = self.slices[name]
        return sum(one.cpu_s or 0.0 for one in slices) / (sum(one.all_bytes for one in slices) / 1e9)

    def rows(self) -> list[dict[str, Any]]:
        """Returns one row per subject and way, the reference itself left out."""
        ways = ("write", "read", "sum") if self.kind == "both" else (self.kind,)
        return [self._row(name, way) for way in ways for name in self.slices if name not in (REFERENCE, CONTROL)]

    def _row(self, name: str, way: str) -> dict[str, Any]:
        reference = self.rates(REFERENCE, way)
        ratio, control = ratio_of(self.rates(name, way), reference), ratio_of(self.rates(CONTROL, way), reference)
        cpu, raw_cpu = self.cpu_s_per_gb(name), self.cpu_s_per_gb(REFERENCE)
        row: dict[str, Any] = {
            "subject": name,
            "kind": self.kind,
            "way": way,
            "block_bytes": self.block_bytes,
            "matmul": self.has_matmul,
            "bytes_per_s": statistics.median(self.rates(name, way)),
            "raw_bytes_per_s": statistics.median(reference),
            **_written("", ratio),
            **_written("control_", control),
            "is_void": not control.is_control_good,
        }
        if self.has_matmul:
            # The matmul runs in the same process, so the CPU time of the slices alone is not known.
            left, alone = self.matmul[name], self.matmul["alone"]
            raw_left = ratio_of(self.matmul[REFERENCE], alone)
            return row | {"matmul_left": ratio_of(left, alone).median, "raw_matmul_left": raw_left.median}
        return row | {"cpu_s_per_gb": cpu, "raw_cpu_s_per_gb": raw_cpu, "cpu_ratio": cpu / raw_cpu if raw_cpu else None}


def _written(prefix: str, ratio: Ratio) -> dict[str, Any]:
    return {f"{prefix}ratio": ratio.median, f"{prefix}low": ratio.low, f"{prefix}high": ratio.high, "pairs": ratio.pairs}


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of this script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=None, help="a folder on the drive (default: a new one here)")
    parser.add_argument("--pairs", type=int, default=12, help="turns, each of which gives every subject one ratio")
    parser.add_argument("--slice", type=float, default=0.2, help="seconds of a slice")
    parser.add_argument("--sizes", type=parse_sizes, default=list(DEPTHS), help='sizes of transfers, such as "1MiB,64MiB"')
    parser.add_argument("--kinds", type=parse_kinds, default=list(KINDS), help="read, write, both; with commas")
    parser.add_argument("--engines", type=lambda text: text.split(","), default=None, help="with commas; all when left out")
    parser.add_argument("--range", type=parse_bytes, default=512 * 2**20, help="each subject's part of the file")
    parser.add_argument("--no-matmul", action="store_true", help="leave out the part beside a two-thread matmul")
    parser.add_argument("--no-fio", action="store_true", help="do not show the reference beside fio")
    parser.add_argument("--kvikio", action="store_true", help="compare kvikio on host memory too, if it is installed")
    parser.add_argument("--deepnvme", action="store_true", help="compare DeepSpeed's I/O too, if it is installed")
    parser.add_argument("--json", type=Path, default=None, help="also write everything to this file")
    arguments = parser.parse_args(given)
    if arguments.pairs < 1 or arguments.slice <= 0:
        parser.error("expected --pairs of at least 1 and a --slice above 0")
    if arguments.range < 4 * max(arguments.sizes):
        parser.error(f"expected a --range of at least four transfers of the largest size, got {arguments.range} bytes")
    return arguments


def parse_sizes(text: str) -> list[int]:
    """Returns sizes from text with commas; for argparse."""
    try:
        sizes = [parse_bytes(part) for part in text.split(",")]
    except TieroffError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if any(size < RAW_BLOCK_BYTES or size % RAW_BLOCK_BYTES for size in sizes):
        raise argparse.ArgumentTypeError(f"expected multiples of {format_bytes(RAW_BLOCK_BYTES)}, got {text!r}")
    return sizes


def parse_kinds(text: str) -> list[str]:
    """Returns kinds from text with commas; for argparse."""
    kinds = text.split(",")
    if not set(kinds) <= set(KINDS):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(KINDS)}, got {text!r}")
    return kinds


@contextmanager
def preconditioned(folder: Path, size_bytes: int) -> Iterator[OpenFile]:
    """Gives a file without a name, all of which was written once with noise."""
    directory = files.open_directory(str(folder), free_bytes_min=size_bytes + FREE_BYTES_MIN)
    try:
        file = files.open_nameless(str(folder), directory, is_direct=True)
    finally:
        os.close(directory)
    try:
        files.preallocate(file, 0, size_bytes)
        engine = choose()
        try:
            Track([file], engine, make_memory=make_memory).fill(size_bytes, float("inf"), size_bytes)
        finally:
            engine.close()
        yield file
    finally:
        os.close(file.fd)


@contextmanager
def opened(folder: Path, arguments: argparse.Namespace, absent: dict[str, str]) -> Iterator[tuple[OpenFile, list[Subject]]]:
    """Gives the file and what is compared on it: reference and control first. What is not to be had goes to `absent`."""
    engines = [name for name in arguments.engines or available() if name != "gds"]  # which moves a GPU's memory
    libraries = [name for name in LIBRARIES if getattr(arguments, name)]
    range_bytes = arguments.range
    with tempfile.TemporaryDirectory(prefix="tieroff-bench-") as build, ExitStack() as stack:
        program = build_raw(Path(build))
        count = 2 + len(engines) + len(libraries)
        file = stack.enter_context(preconditioned(folder, count * range_bytes))
        subjects: list[Subject] = []
        for index, name in enumerate([REFERENCE, CONTROL, *engines, *libraries]):
            start = index * range_bytes
            try:
                if name in (REFERENCE, CONTROL):
                    subject: Subject = RawLoop(program, file, start, range_bytes, name)
                elif name in libraries:
                    subject = LibrarySubject(name, path_of(file), start, range_bytes)
                else:
                    subject = EngineSubject(name, file, start, range_bytes)
            except (SubjectFailed, TieroffError) as error:
                absent[name] = str(error)
                continue
            stack.callback(subject.close)
            subjects.append(subject)
        yield file, subjects


def measure_cell(cell: Cell, subjects: Sequence[Subject], pairs: int, slice_s: float) -> int:
    """Fills a cell, after one slice each that is not counted. Returns the growth of resident memory since then, in bytes."""
    matmul = Matmul() if cell.has_matmul else None
    for subject in subjects:
        subject.run(cell.kind, cell.block_bytes, slice_s / 2)
    if matmul is not None:
        _sleep_beside(matmul, slice_s)
    before = _resident_bytes()
    for turn in range(pairs):
        if matmul is not None:
            _sleep_beside(matmul, slice_s)
            cell.matmul.setdefault("alone", []).append(matmul.per_s)
        for subject in order_of(subjects, turn):
            if matmul is None:
                moved = subject.run(cell.kind, cell.block_bytes, slice_s)
            else:
                with matmul:
                    moved = subject.run(cell.kind, cell.block_bytes, slice_s)
                cell.matmul.setdefault(subject.name, []).append(matmul.per_s)
            cell.slices.setdefault(subject.name, []).append(moved)
    return _resident_bytes() - before


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _sleep_beside(matmul: Matmul, seconds: float) -> None:
    with matmul:
        time.sleep(seconds)


def compare_with_fio(reference: Subject, file: OpenFile, range_bytes: int) -> list[dict[str, Any]]:
    """Returns the reference over fio, whole seconds in turn. fio runs in the control's range."""
    rows = []
    for kind in ("read", "write"):
        raw: list[float] = []
        fio: list[float] = []
        for _turn in range(FIO_PAIRS):
            moved = reference.run(kind, RAW_BLOCK_BYTES, FIO_S)
            raw.append(moved.all_bytes / moved.wall_s)
            fio.append(fio_rate(path_of(file), kind, range_bytes, range_bytes, FIO_S))
        rows.append(
            {
                "kind": kind,
                "raw_bytes_per_s": statistics.median(raw),
                "fio_bytes_per_s": statistics.median(fio),
                **_written("raw_over_fio_", ratio_of(raw, fio)),
            }
        )
    return rows


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns everything that was measured, as it is written to JSON."""
    absent: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    growth: list[dict[str, Any]] = []
    fio: list[dict[str, Any]] = []
    with opened(folder, arguments, absent) as (file, subjects):
        cells = [Cell(kind, size) for kind in arguments.kinds for size in arguments.sizes]
        if not arguments.no_matmul:
            cells += [Cell(kind, MATMUL_BYTES, has_matmul=True) for kind in arguments.kinds if kind != "both"]
        for number, cell in enumerate(cells, 1):
            beside = " beside a matmul" if cell.has_matmul else ""
            print(f"{number} of {len(cells)}: {cell.kind} {format_bytes(cell.block_bytes)}{beside}", file=sys.stderr)
            grown = measure_cell(cell, subjects, arguments.pairs, arguments.slice)
            growth.append({"kind": cell.kind, "block_bytes": cell.block_bytes, "matmul": cell.has_matmul, "bytes": grown})
            rows += cell.rows()
        if not arguments.no_fio:
            try:
                fio = compare_with_fio(subjects[0], file, arguments.range)
            except SubjectFailed as error:
                absent["fio"] = str(error)
        is_direct = file.is_direct
    return {
        "date": date.today().isoformat(),
        "kernel": f"{platform.system()} {platform.release()}",
        "cores": len(os.sched_getaffinity(0)),
        "file_system": file_system(folder),
        "drive": drive(folder),
        "is_direct": is_direct,
        "slice_s": arguments.slice,
        "reference": f"one io_uring, {RAW_DEPTH} transfers of {RAW_BLOCK_BYTES} bytes",
        "rows": rows,
        "fio": fio,
        "resident_growth": growth,
        "absent": absent,
    }


def show(console: Console, found: dict[str, Any]) -> None:
    """Prints the tables."""
    _table(console, "over the raw loop", [row for row in found["rows"] if not row["matmul"]], ("CPU s/GB", "of raw's"))
    beside = [row for row in found["rows"] if row["matmul"]]
    if beside:
        _table(console, "beside a two-thread matmul", beside, ("matmul left", "by raw"))
    for row in found["fio"]:
        console.print(
            f"raw loop over fio, {row['kind']}: {row['raw_over_fio_ratio']:.2f} "
            f"({row['raw_over_fio_low']:.2f}-{row['raw_over_fio_high']:.2f}); fio {row['fio_bytes_per_s'] / 1e9:.2f} GB/s",
            highlight=False,
        )
    largest = max(found["resident_growth"], key=lambda one: int(one["bytes"]))
    console.print(
        f"largest growth of resident memory over the slices of a row: {format_bytes(largest['bytes'])} "
        f"({largest['kind']}, {format_bytes(largest['block_bytes'])})",
        highlight=False,
    )
    for name, reason in found["absent"].items():
        console.print(f"{name}: not measured: {reason}", markup=False, highlight=False)


def _table(console: Console, title: str, rows: Sequence[dict[str, Any]], last: tuple[str, str]) -> None:
    table = Table(title=title, title_justify="left")
    for head in ("kind", "transfers", "subject", "GB/s", "raw GB/s", "ratio", "95 %", "control", *last):
        table.add_column(head, justify="left" if head in ("kind", "subject") else "right", no_wrap=True)
    for row in rows:
        if row["matmul"]:
            ends = (f"{row['matmul_left']:.0%}", f"{row['raw_matmul_left']:.0%}")
        else:
            share = row["cpu_ratio"]
            ends = (f"{row['cpu_s_per_gb']:.3f}", f"{share:.2f}" if share is not None else "-")
        table.add_row(
            row["kind"] if row["kind"] == row["way"] else f"{row['kind']}: {row['way']}",
            format_bytes(row["block_bytes"]),
            row["subject"],
            f"{row['bytes_per_s'] / 1e9:.2f}",
            f"{row['raw_bytes_per_s'] / 1e9:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['low']:.3f}-{row['high']:.3f}",
            f"{row['control_ratio']:.3f}" + (" VOID" if row["is_void"] else ""),
            *ends,
        )
    console.print(table)


def main(given: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = parse_arguments(given)
    try:
        if arguments.dir is not None:
            found = run(arguments, arguments.dir)
        else:
            with tempfile.TemporaryDirectory(prefix="tieroff-bench-", dir=Path.cwd()) as folder:
                found = run(arguments, Path(folder))
    except (TieroffError, SubjectFailed) as error:
        print(f"bench_io: {error}", file=sys.stderr)
        return 1
    show(make_console(), found)
    save(arguments.json, found, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
