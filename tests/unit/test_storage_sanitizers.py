"""The native engine under the compiler's sanitizers, without Python."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.mark.long
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_native_engine_is_clean_under_sanitizers(tmp_path: Path, project: Path, sanitizers: str) -> None:
    native = project / "native"
    sources = [*sorted((native / "src").glob("*.cpp")), native / "tests" / "engine_test.cpp"]
    program = tmp_path / "engine_test"
    flags = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-fno-omit-frame-pointer"]
    subprocess.run(
        [str(COMPILER), *flags, f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", f"-I{native / 'include'}",
         *map(str, sources), "-o", str(program)],
        check=True, timeout=300,
    )  # fmt: skip
    leave_out_fork = ["without-fork"] if sanitizers == "thread" else []
    # A forked child leaks the engine on purpose; it leaves by _exit, so the leak check sees the parent alone.
    done = subprocess.run([str(program), *leave_out_fork], capture_output=True, text=True, timeout=300, env=os.environ)
    assert (done.returncode, done.stderr) == (0, "")
