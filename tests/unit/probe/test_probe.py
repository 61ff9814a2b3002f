"""The measurement of links and folders, limits, and results that cannot be true."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tieroff.config import Config
from tieroff.core.machine import load_machine, save_machine
from tieroff.core.tensor import Tier
from tieroff.errors import ConfigError, StoreError
from tieroff.probe import limits
from tieroff.probe import machine as machines
from tieroff.probe import survey as surveys
from tieroff.probe.checksum import measure_checksum
from tieroff.probe.drives import drive, file_system
from tieroff.probe.links import LinkRates, measure_links, measure_memory
from tieroff.probe.machine import compose_machine, measure_apart, measure_machine, surveyed_machine
from tieroff.probe.nvme import MIB, NvmeRates, Track, measure_dirs, open_track
from tieroff.probe.plausible import Counters, doubt, read_counters
from tieroff.probe.survey import choose_engine, survey
from tieroff.session.links import Links
from tieroff.session.ranks import Ranks
from tieroff.storage.engines import OpenFile, available
from tieroff.storage.nvme import files

RATES = NvmeRates("threads", True, 2 * 10**9, 3 * 10**9, 10**9, 10**9, 1e-4, 1e-4, MIB, 4)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def on_a_cpu() -> list[str]:
    """Engines that are measured without a GPU."""
    return [name for name in available() if name != "gds"]


def test_links_of_the_cpu_are_memory_copies() -> None:
    links = measure_links("cpu", 0.1)
    assert links.d2h_bytes_per_s > 10**8
    assert links.h2d_bytes_per_s > 10**8
    assert 0 < links.duplex_share <= 1
    assert 0 <= links.d2h_latency_s < 0.1


@pytest.mark.parametrize("engine", on_a_cpu())
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_folders_are_measured_and_nothing_is_left(tmp_path: Path, engine: str) -> None:
    before = open_descriptors()
    rates = measure_dirs([tmp_path], engine, 0.2)
    assert rates.engine == engine
    for speed in (rates.write_bytes_per_s, rates.read_bytes_per_s):
        assert speed > 10**6
    for speed in (rates.both_write_bytes_per_s, rates.both_read_bytes_per_s):
        assert speed > 10**6
    assert 0 < rates.write_latency_s < 1
    assert 0 < rates.read_latency_s < 1
    assert list(tmp_path.iterdir()) == []
    assert open_descriptors() == before


def test_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        measure_dirs([tmp_path / "nowhere"], "auto", 0.1)


def test_measured_machine_has_every_tier_and_survives_its_file(tmp_path: Path) -> None:
    machine = measure_machine("cpu", [tmp_path], seconds=0.5)
    assert machine.has_tier(Tier.HOST)
    assert machine.has_tier(Tier.NVME)
    assert machine.device_bytes > 0
    assert machine.host_bytes > 0
    assert not machine.nvme_shares_host_link
    assert machine.checksum_bytes_per_s > 0
    save_machine(machine, tmp_path / "machine.toml")
    assert load_machine(tmp_path / "machine.toml") == machine


def test_a_training_process_has_its_machine_measured_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def here(*_arguments: object) -> LinkRates:
        raise AssertionError("the buffers of a measurement are in this process")

    monkeypatch.setattr(machines, "measure_links", here)
    machine = Links(Config.load({"device": "cpu"}), torch.device("cpu"), (tmp_path,), Ranks.here()).machine
    assert machine.has_tier(Tier.HOST) and machine.has_tier(Tier.NVME)
    assert machine.move_compute_s > 0  # the thread that trains starts the transfers


def test_a_machine_is_measured_here_where_no_other_process_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    assert measure_apart([], engine="auto", seconds=0.1).has_tier(Tier.HOST)


def test_a_folder_that_the_other_process_cannot_measure_is_named_as_ever(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        measure_apart([tmp_path / "nowhere"], engine="auto", seconds=0.1)


def test_measured_machine_without_folders_has_no_nvme() -> None:
    machine = compose_machine("cpu", LinkRates(10, 20), [], None, "by a test")
    assert (machine.d2h_bytes_per_s, machine.h2d_bytes_per_s) == (10, 20)
    assert machine.nvme_bytes == 0
    assert machine.has_tier(Tier.HOST)
    assert not machine.has_tier(Tier.NVME)


@pytest.mark.gpu
def test_links_of_cuda_are_measured() -> None:
    links = measure_links("cuda", 0.3)
    assert links.d2h_bytes_per_s > 10**9
    assert links.h2d_bytes_per_s > 10**9
    assert 0 < links.d2h_latency_s < 0.01
    assert 0 < links.duplex_share <= 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_survey_of_cuda_measures_gds_on_the_devices_memory(tmp_path: Path) -> None:
    found = survey("cuda", [tmp_path], 1.0)
    assert {row.rates.engine for row in found.rows} | {row.engine for row in found.refused} == set(available())
    assert found.best[tmp_path] != "gds"


class Space:
    """As os.statvfs returns it."""

    f_frsize = 4096

    def __init__(self, free_bytes: int) -> None:
        self.f_bavail = free_bytes // 4096


@pytest.mark.parametrize(
    ("free_bytes", "expected_bytes"), [(100 * 2**30, 95 * 2**30), (10 * 2**30, 9 * 2**30), (2**30, 0), (0, 0)]
)
def test_folder_keeps_a_margin_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, expected_bytes: int
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda folder: Space(free_bytes))
    assert limits.available_folder_bytes(tmp_path) == expected_bytes


def test_folders_on_one_file_system_share_its_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda folder: Space(100 * 2**30))
    dirs = [tmp_path / "a", tmp_path / "b"]
    for folder in dirs:
        folder.mkdir()
    assert limits.default_nvme_bytes(dirs) == 95 * 2**30
    assert limits.default_nvme_bytes(dirs[:1]) == 95 * 2**30
    assert limits.default_nvme_bytes([]) == 0


def test_host_default_is_a_share_of_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "host_limit_bytes", lambda: 1000)
    assert limits.default_host_bytes() == 500


def test_several_threads_copy_in_memory() -> None:
    assert measure_memory(0.05) > 10**8


def test_checksums_have_a_rate() -> None:
    before = open_descriptors()
    assert 10**7 < measure_checksum(0.1) < 10**12
    assert open_descriptors() == before


# Tracks.


class Ended:
    """A transfer that has ended in some way."""

    def __init__(self, size_bytes: int, done_bytes: int, number: int, *, is_ended: bool = True) -> None:
        self.size_bytes, self.done_bytes, self.errno, self._is_ended = size_bytes, done_bytes, number, is_ended

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._is_ended


class FakeEngine:
    """Moves nothing; its transfers end as told."""

    name = "fake"

    def __init__(self, done_share: float = 1.0, number: int = 0, *, is_ended: bool = True) -> None:
        self.ranges: list[tuple[str, int, int]] = []
        self._done_share, self._number, self._is_ended = done_share, number, is_ended

    def write(self, file: OpenFile, offset: int, address: int, size_bytes: int, *, with_checksum: bool) -> Ended:
        self.ranges.append(("write", offset, size_bytes))
        return Ended(size_bytes, int(size_bytes * self._done_share), self._number, is_ended=self._is_ended)

    def read(
        self, file: OpenFile, offset: int, address: int, size_bytes: int, *, with_checksum: bool, is_mapped: bool
    ) -> Ended:
        self.ranges.append(("read", offset, size_bytes))
        return Ended(size_bytes, int(size_bytes * self._done_share), self._number, is_ended=self._is_ended)


def fake_track(engine: FakeEngine, filled_bytes: int = 64 * MIB, start: int = 0) -> Track:
    file = OpenFile(-1, "/somewhere", True, 4096, 4096)
    return Track([file], engine, start=start, filled_bytes=filled_bytes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engine", "number"),
    [(FakeEngine(number=errno.EIO), errno.EIO), (FakeEngine(done_share=0.5), 0), (FakeEngine(is_ended=False), errno.ETIMEDOUT)],
)
def test_transfer_that_fails_is_no_measurement(engine: FakeEngine, number: int) -> None:
    with pytest.raises(StoreError, match="/somewhere") as caught:
        fake_track(engine).run("read", MIB, 4, 0.01)
    assert caught.value.errno == number


def test_track_stays_in_what_is_filled_and_counts_all_of_it() -> None:
    engine = FakeEngine()
    track = fake_track(engine, filled_bytes=10 * MIB + 5, start=4096)
    done = track.run("write", 2 * MIB, 100, 0.001)
    assert {offset for _, offset, _ in engine.ranges} == {4096 + 2 * MIB * index for index in range(5)}
    assert done.done_bytes == 2 * MIB * len(engine.ranges) == track.moved_bytes["write"]


def test_both_ways_at_once_share_no_byte() -> None:
    engine = FakeEngine()
    fake_track(engine, filled_bytes=9 * MIB).run_both(MIB, 2, 0.001)
    written = {offset for kind, offset, _ in engine.ranges if kind == "write"}
    read = {offset for kind, offset, _ in engine.ranges if kind == "read"}
    assert len(written) == len(read) == 4
    assert not written & read


def test_track_refuses_a_block_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="filled"):
        fake_track(FakeEngine(), filled_bytes=MIB).run("write", 2 * MIB, 1, 0.0)


def test_every_byte_is_written_before_it_is_measured(tmp_path: Path) -> None:
    with open_track([tmp_path], "auto", 32 * MIB) as track:
        filled = track.fill(32 * MIB, 60.0, 0)
        assert filled.done_bytes == track.filled_bytes == 32 * MIB
        fd = track.files[0].fd
        assert os.lseek(fd, 0, os.SEEK_HOLE) == 32 * MIB
        assert os.fstat(fd).st_nlink == 0


# What cannot be true.


@pytest.mark.parametrize(
    ("counted", "memory", "told"),
    [
        (Counters(10**9, 10**9), 10**10, ""),
        (Counters(10**9, 4 * 10**8), 10**10, "page cache"),
        (Counters(10**9, 0), 10**10, "page cache"),
        (Counters(0, 0), 10**10, ""),
        (Counters(10**9, 10**9), 2 * 10**9, "faster than memory"),
    ],
)
def test_result_that_cannot_be_true_is_doubted(counted: Counters, memory: float, told: str) -> None:
    found = doubt(RATES, 10**9, counted, memory)
    assert told in found
    assert bool(found) == bool(told)


def test_counters_are_zero_where_the_system_keeps_none(tmp_path: Path) -> None:
    assert read_counters(tmp_path / "io") == Counters(0, 0)
    (tmp_path / "io").write_text("rchar: 5\nread_bytes: 4096\nwrite_bytes: 8192\n")
    assert read_counters(tmp_path / "io") == Counters(8192, 4096)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.alone  # reads are compared with copies in memory
def test_reads_from_the_page_cache_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of a buffered file that are not dropped: the real counters show where the bytes came from."""
    monkeypatch.setattr(surveys, "available", lambda: ["aiofiles"])
    monkeypatch.setattr(Track, "drop_pages", lambda self: None)
    with pytest.raises(ConfigError, match=r"aiofiles.*lay in the page cache"):
        survey("cpu", [tmp_path], 0.5)
    monkeypatch.undo()
    monkeypatch.setattr(surveys, "available", lambda: ["aiofiles"])
    assert survey("cpu", [tmp_path], 0.5).best == {tmp_path: "aiofiles"}


def test_folder_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveys, "is_in_memory", lambda fd: True)
    with pytest.raises(ConfigError, match="file system in memory"):
        survey("cpu", [tmp_path], 0.5)


def test_folder_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="each folder once"):
        survey("cpu", [tmp_path, tmp_path / "."], 0.5)


def test_file_that_would_be_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda folder: Space(600 * MIB))
    with pytest.raises(ConfigError, match=r"too small to measure"):
        survey("cpu", [tmp_path], 0.5)


def test_files_take_no_more_than_the_stated_share_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    real = files.preallocate

    def note(file: OpenFile, offset: int, size_bytes: int) -> None:
        taken.append(size_bytes)
        real(file, offset, size_bytes)

    free_bytes = 3000 * MIB
    monkeypatch.setattr(os, "statvfs", lambda folder: Space(free_bytes))
    monkeypatch.setattr(files, "preallocate", note)
    survey("cpu", [tmp_path], 0.3)
    assert len(taken) == len(on_a_cpu())
    assert min(taken) >= surveys.FILE_BYTES_MIN
    assert sum(taken) <= surveys.FILL_SHARE * free_bytes


# The survey.


@pytest.mark.parametrize(
    ("costs", "best"),
    [
        ({"threads": [1.0, 1.0, 1.0]}, "threads"),
        ({"threads": [1.0, 1.0, 1.0], "uring": [0.98, 0.98, 0.98]}, "threads"),
        ({"threads": [1.0, 1.0, 1.0], "uring": [0.96, 0.96, 0.96]}, "uring"),
        ({"threads": [1.0, 1.0, 1.0], "uring": [0.1, 0.99, 0.99]}, "threads"),
        ({"uring": [1.0, 1.0, 1.0], "threads": [1.1, 1.1, 1.1]}, "uring"),
        ({"threads": [1.0, 9.0, 1.0], "uring": [0.9, 8.0, 0.9]}, "uring"),
        ({"aiofiles": [1.0]}, "aiofiles"),
    ],
)
def test_threads_are_best_unless_another_engine_is_3_percent_faster(costs: dict[str, list[float]], best: str) -> None:
    assert choose_engine(costs) == best


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.alone  # it compares rates
def test_survey_measures_every_engine_and_its_machine_names_the_best(tmp_path: Path) -> None:
    dirs = [tmp_path / "a", tmp_path / "b"]
    for folder in dirs:
        folder.mkdir()
    before, told = open_descriptors(), []
    found = survey("cpu", dirs, 1.0, lambda what, share: told.append(share))
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert not found.refused
    assert {(row.dir, row.rates.engine) for row in found.rows} == {(d, name) for d in dirs for name in on_a_cpu()}
    assert all(cell.write_bytes_per_s > 10**6 and cell.read_bytes_per_s > 10**6 for row in found.rows for cell in row.cells)
    assert set(found.best) == set(dirs)
    assert set(found.best.values()) <= set(on_a_cpu()) - {"aiofiles"}
    assert found.together is not None
    machine = surveyed_machine("cpu", dirs, found, 1.0)
    save_machine(machine, tmp_path / "machine.toml")
    assert load_machine(tmp_path / "machine.toml") == machine
    for folder in dirs:
        table = machine.dirs[str(folder)]
        assert machine.best_engine([folder]) == table["engine"] == found.best[folder]
        assert table["file_system"] == file_system(folder)
        assert table[f"{table['engine']}_read_bytes_per_s"] == table["read_bytes_per_s"]
    assert machine.nvme_read_bytes_per_s == found.together.read_bytes_per_s
    assert machine.checksum_bytes_per_s == found.checksum_bytes_per_s > 0
    assert machine.cpu_update_bytes_per_s == found.updates.state_bytes_per_s > 0
    assert machine.host_memory_bytes_per_s > 2 * found.updates.copied_bytes_per_s > 0
    assert machine.kernel.startswith("Linux")
    assert [list(folder.iterdir()) for folder in dirs] == [[], []]
    assert open_descriptors() == before


@pytest.mark.alone  # reads are compared with copies in memory
def test_engine_that_cannot_run_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = open_track

    def fail(dirs: list[Path], engine: str, *rest: object) -> object:
        if engine == "other":
            raise StoreError("expected a ring, got none")
        return real(dirs, engine, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(surveys, "open_track", fail)
    monkeypatch.setattr(surveys, "available", lambda: ["threads", "other"])
    found = survey("cpu", [tmp_path], 0.3)
    assert [(row.engine, row.reason) for row in found.refused] == [("other", "expected a ring, got none")]
    assert found.best == {tmp_path: "threads"}


_WITHOUT_TMPFILE = """
import errno, os
plain = os.open
def refuse(path, flags, *rest, **options):
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, "no nameless files")
    return plain(path, flags, *rest, **options)
os.open = refuse
"""


@pytest.mark.parametrize("start", ["", _WITHOUT_TMPFILE], ids=["nameless", "unlinked"])
def test_interrupted_probe_leaves_nothing(tmp_path: Path, start: str) -> None:
    drive_folder, out = tmp_path / "drive", tmp_path / "machine.toml"
    drive_folder.mkdir()
    arguments = ["probe", "--dir", str(drive_folder), "--seconds", "6", "--out", str(out)]
    code = f"{start}\nfrom tieroff.cli import app\napp({arguments!r})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while process.poll() is None and not has_file_in(process.pid, drive_folder):
            time.sleep(0.01)
        assert process.poll() is None, process.stderr and process.stderr.read()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode != 0
    assert list(drive_folder.iterdir()) == []
    assert not out.exists()


def has_file_in(pid: int, folder: Path) -> bool:
    """Whether a process has a file of a folder open that has some bytes by now, named or not."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(entry).startswith(f"{folder}/") and entry.stat().st_size > 0:
                return True
        except FileNotFoundError:  # closed meanwhile
            continue
    return False


# Drives.


def test_drive_is_named_by_its_model_through_partitions_and_volumes(tmp_path: Path) -> None:
    number = os.stat(tmp_path).st_dev
    blocks, devices = tmp_path / "sys/dev/block", tmp_path / "devices"
    blocks.mkdir(parents=True)
    for name, model in (("nvme0n1", "Fast Drive 9 \n"), ("nvme1n1", "Other Drive")):
        (devices / name / "device").mkdir(parents=True)
        (devices / name / "device/model").write_text(model)
    (devices / "nvme0n1/nvme0n1p1").mkdir()
    (devices / "nvme0n1/nvme0n1p1/partition").write_text("1")
    (devices / "dm-0/slaves").mkdir(parents=True)
    (devices / "dm-0/slaves/nvme0n1p1").symlink_to(devices / "nvme0n1/nvme0n1p1")
    (devices / "dm-0/slaves/nvme1n1").symlink_to(devices / "nvme1n1")
    link = blocks / f"{os.major(number)}:{os.minor(number)}"
    link.symlink_to(devices / "nvme0n1/nvme0n1p1")
    assert drive(tmp_path, tmp_path) == "nvme0n1 (Fast Drive 9)"
    link.unlink()
    link.symlink_to(devices / "dm-0")
    assert drive(tmp_path, tmp_path) == "nvme0n1 (Fast Drive 9), nvme1n1 (Other Drive)"
    link.unlink()
    assert drive(tmp_path, tmp_path) == ""
