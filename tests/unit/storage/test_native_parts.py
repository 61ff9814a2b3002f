"""The planner's part of the native module builds and loads without the part that calls the Linux kernel."""

from __future__ import annotations

import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pybind11
import pytest
import setuptools

_ROOT = Path(__file__).parents[3]


def _extension_elsewhere(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the extension that setup.py describes on another system."""
    described: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: described.update(arguments))
    monkeypatch.setattr(sys, "platform", "darwin")
    runpy.run_path(str(_ROOT / "setup.py"))
    monkeypatch.undo()
    return described["ext_modules"][0]


def test_elsewhere_only_the_planner_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    extension = _extension_elsewhere(monkeypatch)
    stems = {Path(name).stem for name in extension.sources}
    assert {"module", "search", "dispatch", "windows"} <= stems
    assert not stems & {"storage", "ring_lane", "engine", "page_returner"}
    assert extension.define_macros == []


@pytest.mark.long
def test_the_planner_alone_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    extension = _extension_elsewhere(monkeypatch)
    target = tmp_path / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [str(_ROOT / "native/include"), pybind11.get_include(), sysconfig.get_paths()["include"]]
    command = ["c++", "-std=c++20", "-O0", "-shared", "-fPIC", *(f"-I{path}" for path in includes)]
    subprocess.run([*command, *extension.sources, "-o", str(target)], check=True, cwd=_ROOT)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import _native; print(*sorted(vars(_native)))"
    names = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert {"dispatch", "fit_windows", "pack", "simulate"} <= set(names)
    assert "ThreadEngine" not in names
