"""The I/O benchmark: its statistics, its arguments, what it compares, and one tiny run of it."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import bench_io
from bench_io import CONTROL, Cell, main, parse_arguments, preconditioned
from harness import io_subjects
from harness.io_subjects import MIB, LibrarySubject, Moved, RawLoop, SubjectFailed, build_raw, depth_of, random_memory
from harness.pairs import Ratio, order_of, ratio_of
from tieroff.probe.kernel import uring_refusal
from tieroff.storage.engines import OpenFile, available

# Statistics.


def test_ratio_is_the_median_of_the_pairs_not_of_the_sides() -> None:
    found = ratio_of([1.0, 20.0, 3.0], [1.0, 10.0, 3.0])
    assert (found.median, found.pairs) == (1.0, 3)
    assert found.low <= found.median <= found.high


def test_ratio_does_not_see_a_drift_that_both_share() -> None:
    drift = [1.0 + 0.2 * turn for turn in range(20)]
    found = ratio_of([0.9 * speed for speed in drift], drift)
    assert found.low == pytest.approx(0.9) == found.high


def test_interval_holds_the_true_median_in_most_samples() -> None:
    hits = 0
    for seed in range(100):
        chance = random.Random(seed)
        values = [1.05 * chance.lognormvariate(0, 0.1) for _ in range(12)]
        found = ratio_of(values, [1.0] * 12, seed)
        hits += found.low <= 1.05 <= found.high
    assert 85 <= hits <= 100


def test_interval_is_that_of_its_seed() -> None:
    values, references = [1.0, 2.0, 3.0, 5.0], [1.0] * 4
    assert ratio_of(values, references, 7) == ratio_of(values, references, 7)


@pytest.mark.parametrize(("values", "references"), [([], []), ([1.0], [1.0, 2.0])])
def test_ratio_needs_pairs(values: list[float], references: list[float]) -> None:
    with pytest.raises(ValueError, match=r"pair|argument"):
        ratio_of(values, references)


@pytest.mark.parametrize(("median", "is_good"), [(0.96, False), (0.97, True), (1.0, True), (1.03, True), (1.04, False)])
def test_control_decides_whether_a_row_counts(median: float, is_good: bool) -> None:
    assert Ratio(median, 0.5, 2.0, 12).is_control_good == is_good


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_subject_is_in_every_place_equally_often(count: int) -> None:
    items = list(range(count))
    orders = [order_of(items, turn) for turn in range(2 * count)]
    assert all(sorted(order) == items for order in orders)
    for place in range(count):
        assert set(Counter(order[place] for order in orders).values()) == {2}


def cell_of(kind: Any, **rates: list[tuple[int, int]]) -> Cell:
    cell = Cell(kind, MIB)
    cell.slices = {name: [Moved(written, read, 1.0, 0.5) for written, read in slices] for name, slices in rates.items()}
    cell.slices[CONTROL] = cell.slices.pop("again")
    return cell


def test_row_has_ratio_control_and_cpu() -> None:
    cell = cell_of("read", raw=[(0, 100), (0, 200)], again=[(0, 110), (0, 220)], threads=[(0, 90), (0, 180)])
    [row] = cell.rows()
    assert (row["subject"], row["ratio"], row["control_ratio"]) == ("threads", 0.9, 1.1)
    assert row["is_void"]
    assert row["cpu_ratio"] == pytest.approx(300 / 270)
    assert row["bytes_per_s"] == 135


def test_both_ways_are_a_row_each_and_their_sum() -> None:
    cell = cell_of("both", raw=[(100, 50)], again=[(100, 50)], threads=[(50, 50)])
    rows = {row["way"]: row for row in cell.rows()}
    assert {way: row["ratio"] for way, row in rows.items()} == {"write": 0.5, "read": 1.0, "sum": pytest.approx(2 / 3)}
    assert not any(row["is_void"] for row in rows.values())


# Arguments.


def test_arguments_have_the_stated_defaults() -> None:
    found = parse_arguments([])
    assert (found.pairs, found.slice, found.sizes) == (12, 0.2, [MIB, 4 * MIB, 16 * MIB, 64 * MIB])
    assert found.kinds == ["read", "write", "both"]
    assert parse_arguments(["--sizes", "2MiB,8MiB", "--kinds", "read"]).sizes == [2 * MIB, 8 * MIB]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--pairs", "0"], "--pairs"),
        (["--slice", "0"], "--slice"),
        (["--sizes", "1.5MiB"], "multiples"),
        (["--sizes", "big"], "expected bytes"),
        (["--kinds", "read,append"], "append"),
        (["--sizes", "64MiB", "--range", "128MiB"], "--range"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(given)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_depth_keeps_at_least_two_under_way() -> None:
    assert [depth_of(size * MIB) for size in (1, 2, 4, 8, 16, 32, 64)] == [16, 8, 4, 2, 2, 2, 2]


def test_memory_is_noise() -> None:
    content = bytes(memoryview(random_memory(2 * MIB + 5)))
    assert len(set(content[:MIB])) == 256
    assert content[2 * MIB : 2 * MIB + 5] != bytes(5)


# Subjects.


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference. Without io_uring there is none, and nothing to compare with."""
    if refusal := uring_refusal():
        pytest.skip(refusal)
    return build_raw(tmp_path_factory.mktemp("raw"))


@pytest.fixture
def file(tmp_path: Path) -> Iterator[OpenFile]:
    with preconditioned(tmp_path, 96 * MIB) as opened:
        yield opened


def content_of(file: OpenFile, start: int, size_bytes: int) -> bytes:
    fd = os.open(io_subjects.path_of(file), os.O_RDONLY)
    try:
        return os.pread(fd, size_bytes, start)
    finally:
        os.close(fd)


def test_raw_loop_stays_in_its_range_and_tells_what_it_moved(program: Path, file: OpenFile) -> None:
    before = content_of(file, 0, 96 * MIB)
    raw = RawLoop(program, file, 32 * MIB, 32 * MIB)
    try:
        wrote, read, both = (raw.run(kind, MIB, 0.02) for kind in ("write", "read", "both"))
    finally:
        raw.close()
    assert wrote.written_bytes >= 16 * MIB
    assert wrote.read_bytes == read.written_bytes == 0
    assert read.read_bytes >= 16 * MIB
    assert both.written_bytes >= 16 * MIB <= both.read_bytes
    assert wrote.wall_s > 0.02
    assert wrote.cpu_s is not None
    after = content_of(file, 0, 96 * MIB)
    assert after[: 32 * MIB] == before[: 32 * MIB]
    assert after[64 * MIB :] == before[64 * MIB :]
    assert after[32 * MIB : 48 * MIB] != before[32 * MIB : 48 * MIB]


def test_raw_loop_that_fails_says_why(program: Path, file: OpenFile) -> None:
    beyond = RawLoop(program, file, 96 * MIB, 32 * MIB)
    try:
        with pytest.raises(SubjectFailed, match="short transfer"):
            beyond.run("read", MIB, 0.02)
        with pytest.raises(SubjectFailed, match="could not read"):
            beyond.run("read", MIB, 0.02)
    finally:
        beyond.close()


def test_raw_loop_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SubjectFailed, match=r"C\+\+ compiler"):
        build_raw(tmp_path)


class FakeLibrary:
    """Reads and writes with plain system calls, as another library would be driven."""

    def __init__(self, path: str, stack: ExitStack) -> None:
        self.fd = os.open(path, os.O_RDWR)
        stack.callback(os.close, self.fd)
        self.offsets: set[int] = set()

    def start(self, kind: str, buffer: Any, offset: int) -> int:
        self.offsets.add(offset)
        view = memoryview(buffer.numpy())
        return os.pwrite(self.fd, view, offset) if kind == "write" else os.preadv(self.fd, [view], offset)

    def wait(self, kind: str, pending: int, size_bytes: int) -> None:
        assert pending == size_bytes


def test_other_libraries_get_the_same_slices(file: OpenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(io_subjects._LIBRARIES, "kvikio", FakeLibrary)
    subject = LibrarySubject("kvikio", io_subjects.path_of(file), 32 * MIB, 32 * MIB)
    try:
        assert subject.calls.offsets  # a trial of both ways, since some libraries fail only there
        subject.calls.offsets.clear()
        moved = subject.run("write", 4 * MIB, 0.01)
        assert moved.written_bytes >= 4 * 4 * MIB
        assert subject.calls.offsets <= {32 * MIB + 4 * MIB * index for index in range(8)}
        both = subject.run("both", MIB, 0.01)
        assert both.written_bytes >= 16 * MIB <= both.read_bytes
    finally:
        subject.close()


def test_library_that_is_not_installed_is_absent_with_its_reason(file: OpenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    for name in ("kvikio", "deepnvme"):
        with pytest.raises(SubjectFailed, match=rf"{name} cannot be used here: ModuleNotFoundError"):
            LibrarySubject(name, io_subjects.path_of(file), 0, 32 * MIB)


def test_fio_that_fails_is_absent_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SubjectFailed, match="not installed"):
        io_subjects.fio_rate("/nowhere", "read", 0, MIB, 0.1)
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/fio")
    failed = subprocess.CompletedProcess([], 1, "", "no such ioengine")
    monkeypatch.setattr(subprocess, "run", lambda *rest, **options: failed)
    with pytest.raises(SubjectFailed, match="no such ioengine"):
        io_subjects.fio_rate("/nowhere", "read", 0, MIB, 0.1)


# The whole.


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.usefixtures("program")
def test_one_tiny_run_measures_every_engine_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr(bench_io, "MATMUL_BYTES", MIB)
    out, folder = tmp_path / "result.json", tmp_path / "drive"
    folder.mkdir()
    given = ["--dir", str(folder), "--pairs", "2", "--slice", "0.01", "--sizes", "1MiB", "--range", "64MiB", "--no-fio"]
    assert main([*given, "--kvikio", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    engines = {name for name in available() if name != "gds"}
    plain = [row for row in found["rows"] if not row["matmul"]]
    assert {row["subject"] for row in plain} == engines
    assert {(row["kind"], row["way"]) for row in plain} == {
        ("read", "read"),
        ("write", "write"),
        ("both", "write"),
        ("both", "read"),
        ("both", "sum"),
    }
    for row in plain:
        assert row["pairs"] == 2
        assert 0 < row["low"] <= row["ratio"] <= row["high"]
        assert row["is_void"] == (not 0.97 <= row["control_ratio"] <= 1.03)
        assert row["cpu_s_per_gb"] > 0
    beside = [row for row in found["rows"] if row["matmul"]]
    assert {(row["kind"], row["subject"]) for row in beside} == {(k, e) for k in ("read", "write") for e in engines}
    assert all(row["matmul_left"] > 0 and row["raw_matmul_left"] > 0 for row in beside)
    assert "kvikio" in found["absent"]
    assert list(folder.iterdir()) == []


def test_run_in_a_folder_that_is_missing_ends_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dir", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err
