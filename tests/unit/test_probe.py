"""The measurement of links and folders, limits, and what `doctor` finds."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tieroff.core.machine import load_machine, save_machine
from tieroff.core.tensor import Tier
from tieroff.errors import ConfigError
from tieroff.probe import doctor, limits
from tieroff.probe.links import LinkRates, measure_links
from tieroff.probe.machine import compose_machine, measure_machine
from tieroff.probe.nvme import measure_dirs
from tieroff.storage.engines import available


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_links_of_the_cpu_are_memory_copies() -> None:
    links = measure_links("cpu", 0.1)
    assert links.d2h_bytes_per_s > 10**8
    assert links.h2d_bytes_per_s > 10**8
    assert 0 < links.duplex_share <= 1
    assert 0 <= links.d2h_latency_s < 0.1


@pytest.mark.parametrize("engine", available())
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
    save_machine(machine, tmp_path / "machine.toml")
    assert load_machine(tmp_path / "machine.toml") == machine


def test_measured_machine_without_folders_has_no_nvme() -> None:
    machine = compose_machine("cpu", LinkRates(10, 20), [], None, {})
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


class Space:
    """As os.statvfs returns it."""

    f_frsize = 4096

    def __init__(self, free_bytes: int) -> None:
        self.f_bavail = free_bytes // 4096


@pytest.mark.parametrize(
    ("free_bytes", "expected_bytes"),
    [(100 * 2**30, 95 * 2**30), (10 * 2**30, 9 * 2**30), (2**30, 0), (0, 0)],
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


def test_doctor_finds_torch_and_engines(tmp_path: Path) -> None:
    import torch

    found = {fact.name: fact for fact in doctor.diagnose([tmp_path]).facts}
    assert found["torch"].is_ok
    assert found["torch"].detail == torch.__version__
    assert found["cuda"].is_ok == torch.cuda.is_available()
    assert found["I/O engines"].detail == ", ".join(available())
    assert found["native module"].is_ok == ("threads" in available())


def test_doctor_leaves_nothing_in_a_folder(tmp_path: Path) -> None:
    before = open_descriptors()
    row = doctor.folder_path(tmp_path)
    assert row.path in ("direct", "buffered")
    assert row.free_bytes > 0
    assert list(tmp_path.iterdir()) == []
    assert open_descriptors() == before


def test_doctor_says_why_a_folder_is_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refuse_direct(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refuse_direct)
    row = doctor.folder_path(tmp_path)
    assert row.path == "buffered"
    assert row.reason == "O_DIRECT was refused: Invalid argument (EINVAL)"
    assert list(tmp_path.iterdir()) == []


def test_doctor_says_why_a_folder_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = doctor.folder_path(tmp_path / "nowhere")
    assert missing.path == "none"
    assert "nothing there" in missing.reason

    def fail(fd: int, data: object, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite", fail)
    broken = doctor.folder_path(tmp_path)
    assert broken.path == "none"
    assert "Input/output error" in broken.reason
