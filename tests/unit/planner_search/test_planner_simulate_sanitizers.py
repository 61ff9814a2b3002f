"""The native simulator and the native search under the compiler's sanitizers, without Python."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.mark.long
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("program", "sources"),
    [
        ("simulate_test", ("simulate/*.cpp",)),
        ("improve_test", ("search/improve*.cpp", "search/dispatch.cpp", "search/windows.cpp")),
    ],
)
def test_native_planner_is_clean_under_sanitizers(
    tmp_path: Path, project: Path, program: str, sources: tuple[str, ...]
) -> None:
    native, built = project / "native", tmp_path / program
    files = [path for pattern in sources for path in sorted((native / "src").glob(pattern))]
    flags = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fno-omit-frame-pointer"]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    files.append(native / "tests" / f"{program}.cpp")
    subprocess.run(
        [str(COMPILER), *flags, *sanitizers, f"-I{native / 'include'}", *map(str, files), "-o", str(built)],
        check=True,
        timeout=600,
    )
    done = subprocess.run([str(built)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
