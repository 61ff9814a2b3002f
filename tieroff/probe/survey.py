"""The full measurement: every engine in every folder, beside each other, and the link to the device."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tieroff.errors import ConfigError, TieroffError
from tieroff.probe.calibration.updates import UpdateRates, measure_updates
from tieroff.probe.checksum import measure_checksum
from tieroff.probe.drives import drive, file_system
from tieroff.probe.gds import is_gds
from tieroff.probe.links import LinkRates, measure_links, measure_memory
from tieroff.probe.nvme import MIB, Memory, NvmeRates, Slice, Track, open_track, touched_memory
from tieroff.probe.plausible import Counters, doubt, read_counters
from tieroff.storage.engines import available
from tieroff.storage.memory import is_in_memory
from tieroff.storage.nvme import files
from tieroff.units import format_bytes

FILL_SHARE = 0.1
"""Share of a folder's free bytes that all files of a measurement may take together."""

FILE_BYTES_MAX = 512 * MIB
FILE_BYTES_MIN = 64 * MIB
"""Of one engine's file in one folder. A smaller one is refused: too few blocks, and the drive's own memory holds it."""

GRID = tuple((size, depth) for size in (MIB // 4, MIB, 4 * MIB, 16 * MIB) for depth in (1, 4))
"""Sizes of transfers, and how many are in flight at once."""

BUFFERED_GRID = ((4 * MIB, 4),)
"""Buffered engines are a last resort: one cell and one separate round measure them."""

ROUNDS = 9
GAIN_MIN = 1.03
"""How much faster than `threads` another engine must be to be named the best; below that, noise would choose."""

LINK_SHARE, MEMORY_SHARE, CHECKSUM_SHARE, UPDATES_SHARE = 0.1, 0.03, 0.03, 0.05
FILL_TIME_SHARE, GRID_TIME_SHARE, ROUNDS_TIME_SHARE = 0.15, 0.4, 0.45
"""Of the whole time, and of one folder's."""

Report = Callable[[str, float], None]
"""Called with what is being measured and the share of the time that has passed."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Bandwidth at one size of transfers, with `depth` in flight."""

    block_bytes: int
    depth: int
    write_bytes_per_s: int
    read_bytes_per_s: int

    @property
    def cost(self) -> float:
        """Seconds to write and read a byte."""
        return 1 / self.write_bytes_per_s + 1 / self.read_bytes_per_s


@dataclass(frozen=True, slots=True)
class Measured:
    """One engine in one folder.

    Attributes:
        gds: bytes went between device and drive past host memory.
    """

    dir: Path
    rates: NvmeRates
    cells: tuple[Cell, ...]
    gds: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """An engine that was not measured in a folder, or whose result cannot be true, and why."""

    dir: Path
    engine: str
    reason: str


@dataclass(slots=True)
class Survey:
    """Everything that was measured.

    Attributes:
        links: the link between device and host memory.
        memory_bytes_per_s: what several cores copy at once.
        checksum_bytes_per_s: what one core makes a checksum of; 0 where that is not measurable.
        updates: what the CPU updates in host memory.
        rows, refused: per folder and engine.
        best: per folder the fastest engine.
        together: rates of all folders used in turn, by an engine that is best in the first of them.
        file_systems, drives: per folder.
    """

    links: LinkRates
    memory_bytes_per_s: int
    checksum_bytes_per_s: int
    updates: UpdateRates = field(default_factory=UpdateRates)
    rows: list[Measured] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    best: dict[Path, str] = field(default_factory=dict)
    together: NvmeRates | None = None
    file_systems: dict[Path, str] = field(default_factory=dict)
    drives: dict[Path, str] = field(default_factory=dict)

    def row(self, folder: Path, engine: str) -> Measured:
        """Returns what was measured of an engine in a folder; KeyError if nothing was."""
        return {(row.dir, row.rates.engine): row for row in self.rows}[folder, engine]


class _Subject:
    """An engine in one folder, with what the system counted while it moved bytes."""

    def __init__(self, track: Track) -> None:
        self.track = track
        self.is_slow = not track.is_direct
        self.cells: list[Cell] = []
        self.write: list[float] = []
        self.read: list[float] = []
        self.both: list[tuple[float, float]] = []
        self._read_bytes = 0
        self._counted = Counters(0, 0)

    def watched(self, call: Callable[[], tuple[Slice, ...]]) -> list[float]:
        """Returns the rates of slices, while the system's counters are read before and after."""
        before, read_before = read_counters(), self.track.moved_bytes["read"]
        slices = call()
        counted = read_counters().since(before)
        self._counted = Counters(
            self._counted.written_bytes + counted.written_bytes, self._counted.read_bytes + counted.read_bytes
        )
        self._read_bytes += self.track.moved_bytes["read"] - read_before
        return [part.bytes_per_s for part in slices]

    def measure_cell(self, block_bytes: int, depth: int, seconds: float) -> None:
        track = self.track
        write, read = self.watched(
            lambda: (track.run("write", block_bytes, depth, seconds), track.run("read", block_bytes, depth, seconds))
        )
        self.cells.append(Cell(block_bytes, depth, int(write), int(read)))

    def measure_round(self, seconds: float) -> None:
        """At the best cell. Apart from the cells, since the best of many is best by luck too."""
        track, cell = self.track, self.best_cell
        write, read = self.watched(
            lambda: (
                track.run("write", cell.block_bytes, cell.depth, seconds),
                track.run("read", cell.block_bytes, cell.depth, seconds),
            )
        )
        both = self.watched(lambda: track.run_both(cell.block_bytes, cell.depth, seconds))
        self.write.append(write)
        self.read.append(read)
        self.both.append((both[0], both[1]))

    @property
    def best_cell(self) -> Cell:
        return min(self.cells, key=lambda cell: cell.cost)

    def cost(self, turn: int) -> float:
        """Seconds to write and read a byte, in one round."""
        return 1 / self.write[turn] + 1 / self.read[turn]

    def result(self) -> NvmeRates:
        both_write, both_read = (statistics.median(part) for part in zip(*self.both, strict=True))
        write, read = statistics.median(self.write), statistics.median(self.read)
        return self.track.rates(self.best_cell.block_bytes, self.best_cell.depth, write, read, (both_write, both_read))

    def doubt(self, rates: NvmeRates, memory_bytes_per_s: float) -> str:
        return doubt(rates, self._read_bytes, self._counted, memory_bytes_per_s)


def survey(device: str, dirs: Sequence[Path], seconds: float, report: Report = lambda what, share: None) -> Survey:
    """Returns what folders and links do now.

    In each folder every engine gets its own file, written once before anything is timed. The engines are measured in turn,
    slice by slice, so that a change of the drive's speed hits all of them. Nothing stays in the folders, however this ends.

    Args:
        device: "cuda" or "cpu".
        dirs: existing folders, at least one.
        seconds: time to spend, roughly.
        report: called between measurements.

    Raises:
        ConfigError: a folder is missing, read-only, in memory or too small, or no engine gives a plausible result there.
    """
    # On a CPU gds has no bounce buffer to save, and its other transfers run on another engine.
    names = [name for name in available() if name != "gds" or device == "cuda"]
    if len({os.path.realpath(folder) for folder in dirs}) < len(dirs):
        raise ConfigError(f"--dir: expected each folder once, got {', '.join(map(str, dirs))}")
    for folder in dirs:  # before any time is spent
        _check_folder(folder, len(names))
    report("link between device and host memory", 0.0)
    links = measure_links(device, LINK_SHARE * seconds)
    memory = measure_memory(MEMORY_SHARE * seconds)
    done = LINK_SHARE + MEMORY_SHARE
    report("checksums", done)
    found = Survey(links, int(memory), measure_checksum(CHECKSUM_SHARE * seconds))
    done += CHECKSUM_SHARE
    report("updates in host memory", done)
    found.updates = measure_updates(device, UPDATES_SHARE * seconds)
    done += UPDATES_SHARE
    share = (1 - done) / (len(dirs) + (len(dirs) > 1))
    for folder in dirs:
        _measure_folder(found, folder, names, device, share * seconds, _scaled(report, done, share))
        found.file_systems[folder], found.drives[folder] = file_system(folder), drive(folder)
        done += share
    if len(dirs) == 1:
        found.together = found.row(dirs[0], found.best[dirs[0]]).rates
    else:
        report("all folders together", done)
        found.together = _measure_together(found, dirs, share * seconds)
    report("done", 1.0)
    return found


def choose_engine(subjects: dict[str, list[float]]) -> str:
    """Returns the name of the best engine, given what each one took per byte in each round, in the same order.

    It is `threads`, unless another one takes at most 1/1.03 of its time in the median round.
    """
    names = list(subjects)
    base = "threads" if "threads" in names else names[0]

    def gain(name: str) -> float:
        return statistics.median(ours / theirs for ours, theirs in zip(subjects[base], subjects[name], strict=True))

    fastest = max(names, key=gain)
    return fastest if gain(fastest) >= GAIN_MIN else base


def _scaled(report: Report, done: float, share: float) -> Report:
    return lambda what, part: report(what, done + share * part)


def _check_folder(folder: Path, engine_count: int) -> None:
    """Raises ConfigError if nothing plausible can be measured."""
    directory = files.open_directory(str(folder), free_bytes_min=0)
    try:
        if is_in_memory(directory):
            raise ConfigError(
                f"--dir {folder}: this is a file system in memory ({file_system(folder) or 'tmpfs'}), so bytes moved there "
                "would still take memory; name a folder on a drive"
            )
    finally:
        os.close(directory)
    size_bytes = _file_bytes(folder, engine_count)
    if size_bytes < FILE_BYTES_MIN:
        needed = math.ceil(FILE_BYTES_MIN * engine_count / FILL_SHARE)
        raise ConfigError(
            f"--dir {folder}: {format_bytes(_free_bytes(folder))} are free, {format_bytes(needed)} are needed, because a "
            f"measurement fills at most {FILL_SHARE:.0%} and a file of {format_bytes(size_bytes)} is too small to measure; "
            "free some space, or name another folder"
        )


def _free_bytes(folder: Path) -> int:
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def _file_bytes(folder: Path, count: int) -> int:
    """Returns the size of each of `count` files in a folder, in whole MiB."""
    return min(FILE_BYTES_MAX, int(_free_bytes(folder) * FILL_SHARE / count) // MIB * MIB)


def _measure_folder(found: Survey, folder: Path, names: Sequence[str], device: str, seconds: float, report: Report) -> None:
    size_bytes = _file_bytes(folder, len(names))
    subjects: dict[str, _Subject] = {}
    with ExitStack() as stack:
        for index, name in enumerate(names):
            report(f"{folder}: {name}", (FILL_TIME_SHARE + GRID_TIME_SHARE) * index / len(names))
            try:
                memory = _device_memory if name == "gds" and device == "cuda" else touched_memory
                track = stack.enter_context(open_track([folder], name, size_bytes, memory))
                if track.engine.name != name:
                    raise ConfigError(f"the engine {name} does not work here; it falls back to {track.engine.name}")
                slice_s = GRID_TIME_SHARE * seconds / (2 * len(GRID) * len(names))
                fill = track.fill(size_bytes, FILL_TIME_SHARE * seconds / len(names), FILE_BYTES_MIN)
                subject = _Subject(track)
                _measure_grid(subject, fill, slice_s)
                subjects[name] = subject
            except (TieroffError, ImportError, OSError) as error:
                found.refused.append(Refused(folder, name, str(error)))
        _measure_rounds(list(subjects.values()), folder, seconds, report)
        accepted = _judge(found, folder, subjects)
    if not accepted:
        reasons = "; ".join(f"{row.engine}: {row.reason}" for row in found.refused if row.dir == folder)
        raise ConfigError(f"--dir {folder}: no engine gave a plausible result: {reasons}")
    # Not gds: it moves device memory and spares the bounce, which bandwidth alone does not show; where it works is
    # for `doctor` to say. Not what is buffered, if anything else is there.
    candidates = {name: subject for name, subject in accepted.items() if name != "gds"} or accepted
    direct = {name: subject for name, subject in candidates.items() if not subject.is_slow} or candidates
    found.best[folder] = choose_engine(
        {name: [subject.cost(turn) for turn in range(len(subject.write))] for name, subject in direct.items()}
    )


def _measure_grid(subject: _Subject, fill: Slice, slice_s: float) -> None:
    """Cells that would take far longer than a slice are left out, but for the first."""
    in_time_bytes = 2 * fill.bytes_per_s * slice_s
    for index, (block_bytes, depth) in enumerate(BUFFERED_GRID if subject.is_slow else GRID):
        fits = 2 * block_bytes <= subject.track.filled_bytes
        if index == 0 or (fits and block_bytes * depth <= in_time_bytes):
            subject.measure_cell(block_bytes, depth, slice_s)


def _measure_rounds(subjects: Sequence[_Subject], folder: Path, seconds: float, report: Report) -> None:
    direct = [subject for subject in subjects if not subject.is_slow]
    slice_s = ROUNDS_TIME_SHARE * seconds / (3 * ROUNDS * max(1, len(direct)))
    for turn in range(ROUNDS):
        report(f"{folder}: engines in turn", 1 - ROUNDS_TIME_SHARE * (ROUNDS - turn) / ROUNDS)
        for subject in direct if turn % 2 == 0 else reversed(direct):
            subject.measure_round(slice_s)
    for subject in subjects:
        if subject.is_slow:
            subject.measure_round(slice_s)


def _judge(found: Survey, folder: Path, subjects: dict[str, _Subject]) -> dict[str, _Subject]:
    """Returns the engines whose results can be true; the others are refused."""
    accepted = {}
    for name, subject in subjects.items():
        rates = subject.result()
        reason = subject.doubt(rates, found.memory_bytes_per_s)
        if reason:
            found.refused.append(Refused(folder, name, reason))
        else:
            found.rows.append(Measured(folder, rates, tuple(subject.cells), name == "gds" and is_gds(folder)))
            accepted[name] = subject
    return accepted


def _measure_together(found: Survey, dirs: Sequence[Path], seconds: float) -> NvmeRates:
    """Returns the rates of all folders, at the size and depth that was best in the first."""
    rates = found.row(dirs[0], found.best[dirs[0]]).rates
    size_bytes = min(_file_bytes(folder, len(dirs)) for folder in dirs)
    block, depth = rates.block_bytes, rates.depth * len(dirs)
    with open_track(dirs, rates.engine, size_bytes) as track:
        track.fill(size_bytes, FILL_TIME_SHARE * seconds, FILE_BYTES_MIN // len(dirs))
        slice_s = (1 - FILL_TIME_SHARE) * seconds / 3
        write = track.run("write", block, depth, slice_s).bytes_per_s
        read = track.run("read", block, depth, slice_s).bytes_per_s
        both_write, both_read = (part.bytes_per_s for part in track.run_both(block, depth, slice_s))
        return track.rates(block, depth, write, read, (both_write, both_read))


class _DeviceMemory:
    """Memory of a CUDA device."""

    def __init__(self, size_bytes: int) -> None:
        import torch

        self._tensor = torch.ones(size_bytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()  # transfers are not ordered with the stream that fills it
        self.address = int(self._tensor.data_ptr())


def _device_memory(size_bytes: int) -> Memory:
    return _DeviceMemory(size_bytes)
