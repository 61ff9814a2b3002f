"""Updates and their threads under the compiler's sanitizers, without Python."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER = shutil.which("g++") or shutil.which("clang++")
# A product and a sum are rounded as the source says, as in the module's own build.
FLAGS = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-fno-omit-frame-pointer", "-ffp-contract=off"]


@pytest.mark.long
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_updates_are_clean_under_sanitizers(tmp_path: Path, project: Path, sanitizers: str) -> None:
    native, program = project / "native", tmp_path / "update_test"
    sources = [*sorted((native / "src/update").glob("*.cpp")), native / "src/io/service_thread.cpp"]
    sources.append(native / "tests/update_test.cpp")
    command = [str(COMPILER), *FLAGS, f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", f"-I{native / 'include'}"]
    subprocess.run([*command, *map(str, sources), "-o", str(program)], check=True, timeout=500)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
