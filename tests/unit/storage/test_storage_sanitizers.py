"""The native engines under the compiler's sanitizers, without Python."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tieroff.storage.engines import available

PARTS = ("io", "memory")  # of native/src: what the engines need
COMPILER = shutil.which("g++") or shutil.which("clang++")


def build(project: Path, program: Path, sanitizers: str, *, with_uring: bool) -> None:
    """Builds the program of that name from native/tests."""
    native = project / "native"
    sources = [file for part in PARTS for file in sorted((native / "src" / part).glob("*.cpp"))]
    sources.append(native / "tests" / f"{program.name}.cpp")
    flags = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-fno-omit-frame-pointer"]
    uring = ["-DTIEROFF_WITH_LIBURING", "-luring"] if with_uring else []
    subprocess.run(
        [
            str(COMPILER),
            *flags,
            f"-fsanitize={sanitizers}",
            "-fno-sanitize-recover=all",
            f"-I{native / 'include'}",
            *map(str, sources),
            *uring,
            "-o",
            str(program),
        ],
        check=True,
        timeout=300,
    )


@pytest.mark.long
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_native_engines_are_clean_under_sanitizers(tmp_path: Path, project: Path, sanitizers: str) -> None:
    program = tmp_path / "engine_test"
    names = [name for name in ("threads", "uring") if name in available()]
    build(project, program, sanitizers, with_uring="uring" in names)
    leave_out_fork = ["without-fork"] if sanitizers == "thread" else []
    for name in names:
        # A forked child leaks the engine on purpose; it leaves by _exit, so the leak check sees the parent alone.
        done = subprocess.run(
            [str(program), name, *leave_out_fork], capture_output=True, text=True, timeout=300, env=os.environ
        )
        assert (name, done.returncode, done.stderr) == (name, 0, "")


@pytest.mark.long
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_page_pool_is_clean_under_sanitizers(tmp_path: Path, project: Path, sanitizers: str) -> None:
    program = tmp_path / "page_pool_test"
    build(project, program, sanitizers, with_uring=False)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_native_engine_works_in_a_build_without_liburing(tmp_path: Path, project: Path) -> None:
    program = tmp_path / "engine_test"
    build(project, program, "undefined", with_uring=False)
    done = subprocess.run([str(program), "threads"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    refused = subprocess.run([str(program), "uring"], capture_output=True, text=True, timeout=300)
    assert refused.returncode != 0 and "built without liburing: Function not implemented" in refused.stderr
