"""The `gds` engine without a GPU: on the real kvikio with a stand-in for the driver, and where parts are missing."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tieroff.errors import ConfigError
from tieroff.storage.engines import choose
from tieroff.storage.engines.cuda_memory import CudaMemory
from tieroff.storage.engines.gds import GdsEngine, errno_in
from tieroff.storage.nvme.gds_status import gds_status

HAS_WHEEL = platform.machine() in ("x86_64", "aarch64") and platform.libc_ver()[0] == "glibc"


@pytest.fixture(scope="module")
def stand_in(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1 of our own."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    assert compiler is not None, "expected a C compiler, which the native module needs too"
    folder = tmp_path_factory.mktemp("driver")
    source, library = project / "tests/gds/libcuda.c", folder / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source), "-lpthread"]
    subprocess.run(command, check=True, timeout=60)
    return folder


@pytest.mark.skipif(not HAS_WHEEL, reason="kvikio has wheels for glibc on x86-64 and aarch64 only")
@pytest.mark.parametrize("memory", ["device", pytest.param("host", marks=pytest.mark.long)])
def test_engine_keeps_the_contract_on_the_real_kvikio(memory: str, stand_in: Path, project: Path, tmp_path: Path) -> None:
    assert importlib.util.find_spec("kvikio"), "expected kvikio: pip install --no-deps -r tests/gds/requirements.txt"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path / 'tests'}",
        "tests/gds/engine_tests.py",
    ]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(stand_in), "STAND_IN_MEMORY": memory, "KVIKIO_COMPAT_MODE": "ON"}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 60, done.stdout


def test_missing_kvikio_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio.defaults", None)
    makes: tuple[Callable[[], object], ...] = (GdsEngine, lambda: choose("gds"))
    for make in makes:
        with pytest.raises(ConfigError, match=r"pip install tieroff\[gds\]"):
            make()


def test_missing_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(ConfigError, match=r"libcuda\.so\.1.*install the driver"):
        CudaMemory()


def test_status_without_kvikio_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "kvikio.defaults", None)
    status = gds_status([tmp_path])[0]
    assert (status.dir, status.path) == (str(tmp_path), "none")
    assert "tieroff[gds]" in status.reason


@pytest.mark.parametrize(
    ("message", "number"),
    [
        (f"KvikIO failure at: posix_io.hpp:90: POSIX error on pwrite: {os.strerror(errno.ENOSPC)}", errno.ENOSPC),
        (f"POSIX error on pread: {os.strerror(errno.EIO)}.\n", errno.EIO),
        (f"POSIX error on pwrite: {os.strerror(errno.EDQUOT)}", errno.EDQUOT),
        ("POSIX error on pread: EOF", errno.EIO),
        ("CUDA error at: posix_io.hpp:251: CUDA_ERROR_ILLEGAL_ADDRESS(an illegal memory access)", errno.EIO),
        ("", errno.EIO),
    ],
)
def test_number_is_found_in_the_words_of_an_error(message: str, number: int) -> None:
    assert errno_in(message) == number
