"""What `tieroff doctor` finds, and what it says of what is missing."""

from __future__ import annotations

import errno
import gzip
import os
import weakref
from pathlib import Path
from typing import Any

import pytest

from tieroff.probe import doctor, gds, kernel
from tieroff.storage import buffers
from tieroff.storage.engines import Direction, Transfer, available, choose
from tieroff.storage.nvme import gds_status as statuses


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


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
    assert "does not exist" in missing.reason

    def fail(fd: int, data: object, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite", fail)
    broken = doctor.folder_path(tmp_path)
    assert broken.path == "none"
    assert "Input/output error" in broken.reason


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_doctor_tries_every_engine_in_a_folder(tmp_path: Path) -> None:
    found = {row.engine: row for row in doctor.folder_path(tmp_path).engines}
    assert set(found) == {"gds", "uring", "threads", "aiofiles"}
    for name, row in found.items():
        if name != "gds":
            assert (row.path != "none") == (name in available()), row
        assert (row.path in ("direct", "nvidia-fs")) == (not row.reason)
    assert found["aiofiles"].path in ("buffered", "none")


def test_doctor_says_that_an_engine_reads_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros, source = choose("threads"), buffers.allocate(1 << 20)

    def read(file: Any, offset: int, address: int, size_bytes: int, **options: Any) -> Transfer:
        return zeros.copy(address, source.address, size_bytes, Direction.IN)

    monkeypatch.setattr(zeros, "read", read)
    monkeypatch.setattr(doctor, "choose", lambda name: zeros)
    row = doctor.engine_path(tmp_path, "threads")
    assert (row.path, row.reason) == ("none", "read other bytes than were written")


def test_doctor_keeps_memory_that_a_hanging_drive_still_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the engine is closed: what the drive does then would go to memory that is somebody else's."""
    engine: Any = choose("threads")
    memory, was_there = list[weakref.ref[Any]](), list[bool]()
    real_allocate, real_close = buffers.allocate, engine.close

    def allocate(size_bytes: int) -> Any:
        buffer = real_allocate(size_bytes)
        memory.append(weakref.ref(buffer))
        return buffer

    def close() -> None:
        was_there.extend(buffer() is not None for buffer in memory)
        real_close()

    engine.native.inject("read", hang=True)
    monkeypatch.setattr(engine, "close", close)
    monkeypatch.setattr(buffers, "allocate", allocate)
    monkeypatch.setattr(doctor, "choose", lambda name: engine)
    monkeypatch.setattr(doctor, "TIMEOUT_S", 0.1)
    assert doctor.engine_path(tmp_path, "threads").reason == "a read has not ended after 0.1 s"
    assert len(was_there) == 4 and all(was_there)  # closed once for the transfers, and once more in any case


def test_doctor_names_what_an_absent_engine_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available", list)
    monkeypatch.setattr(kernel, "setup_errno", lambda: errno.EPERM)
    assert "EPERM" in doctor.engine_path(tmp_path, "uring").reason
    assert "not built" in doctor.engine_path(tmp_path, "threads").reason
    monkeypatch.setattr(kernel, "setup_errno", lambda: 0)
    assert "built without" in doctor.engine_path(tmp_path, "uring").reason


@pytest.mark.parametrize(
    ("number", "disabled", "told"),
    [
        (0, "0", ""),
        (errno.EPERM, "2", "kernel.io_uring_disabled is 2"),
        (errno.EPERM, "0", "seccomp"),
        (errno.EPERM, None, "seccomp"),
        (errno.ENOSYS, None, "ENOSYS"),
        (errno.ENOMEM, "0", "locked memory"),
        (errno.EMFILE, "0", "EMFILE"),
    ],
)
def test_refusal_of_io_uring_has_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, disabled: str | None, told: str
) -> None:
    monkeypatch.setattr(kernel, "setup_errno", lambda: number)
    if disabled is not None:
        (tmp_path / "proc/sys/kernel").mkdir(parents=True)
        (tmp_path / "proc/sys/kernel/io_uring_disabled").write_text(f"{disabled}\n")
    found = kernel.uring_refusal(tmp_path)
    assert told in found
    assert bool(found) == bool(number)


def test_io_uring_is_asked_for_and_closed_again() -> None:
    before = open_descriptors()
    found = {fact.name: fact for fact in doctor.diagnose([]).facts}
    assert found["io_uring"].is_ok == (not kernel.uring_refusal())
    assert open_descriptors() == before


def test_p2pdma_needs_kernel_option_driver_and_cuda(tmp_path: Path) -> None:
    is_ok, text = kernel.p2pdma(None, tmp_path, "5.15.0-91-generic")
    assert not is_ok
    assert all(part in text for part in ("kernel from 6.2", "5.15.0", "CUDA from 12.8", "open driver"))
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.1\n")
    assert "another one is loaded" in kernel.p2pdma("12.8", tmp_path, "6.8.0")[1]
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module  570.1\n")
    assert kernel.p2pdma("12.8", tmp_path, "6.8.0")[0]
    (tmp_path / "proc/config.gz").write_bytes(gzip.compress(b"# CONFIG_PCI_P2PDMA is not set\n"))
    assert kernel.p2pdma("13.0", tmp_path, "6.8.0") == (False, "missing: a kernel with CONFIG_PCI_P2PDMA")
    (tmp_path / "proc/config.gz").write_bytes(gzip.compress(b"CONFIG_PCI=y\nCONFIG_PCI_P2PDMA=y\n"))
    assert kernel.p2pdma("13.0", tmp_path, "6.8.0")[0]


def test_nvidia_fs_and_cufile_say_what_is_there(tmp_path: Path) -> None:
    assert not kernel.nvidia_fs(tmp_path)[0]
    (tmp_path / "proc/driver/nvidia-fs").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia-fs/version").write_text("version: 2.25\n")
    assert kernel.nvidia_fs(tmp_path) == (True, "version: 2.25")
    assert kernel.cufile_compatibility(tmp_path)[0]
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/cufile.json").write_text('{\n  // "allow_compat_mode": true,\n  "allow_compat_mode": false\n}')
    assert kernel.cufile_compatibility(tmp_path) == (False, "not allowed by /etc/cufile.json")


def test_gds_is_reported_as_the_engine_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Status:
        path, reason = "compatibility", "the module nvidia-fs is not loaded"

    def gds_status(dirs: list[Path]) -> list[Status]:
        assert dirs == [tmp_path]
        return [Status()]

    monkeypatch.setattr(gds, "version_of", lambda names: "kvikio 1")
    monkeypatch.setattr(statuses, "gds_status", gds_status)
    assert doctor.engine_path(tmp_path, "gds") == doctor.EnginePath("gds", Status.path, Status.reason)
    monkeypatch.setattr(gds, "version_of", lambda names: None)
    assert doctor.engine_path(tmp_path, "gds") == doctor.EnginePath(
        "gds", "none", "kvikio is not installed: pip install tieroff[gds]"
    )
