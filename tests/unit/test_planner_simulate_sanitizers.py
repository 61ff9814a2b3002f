"""The native simulator under the compiler's sanitizers, without Python."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.mark.long
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_native_simulator_is_clean_under_sanitizers(tmp_path: Path, project: Path) -> None:
    native, program = project / "native", tmp_path / "simulate_test"
    sources = [*sorted((native / "src").glob("simulate*.cpp")), native / "tests" / "simulate_test.cpp"]
    flags = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fno-omit-frame-pointer"]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run(
        [str(COMPILER), *flags, *sanitizers, f"-I{native / 'include'}", *map(str, sources), "-o", str(program)],
        check=True,
        timeout=300,
    )
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
