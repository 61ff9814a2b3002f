"""The budget, checked by a measure that the engine does not own: the process's peak resident set."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.parity import machine_file

SCRIPT = Path(__file__).with_name("memory_run.py")
SMALL_TENSORS = Path(__file__).with_name("small_tensors_run.py")
MARGIN = 1.15  # planner, staging and libraries' work space included
MIB = 1 << 20


def run(folder: Path, budget: int | str, script: Path = SCRIPT) -> dict[str, Any]:
    drive = folder / "drive"
    drive.mkdir(exist_ok=True)
    command = [sys.executable, str(script), str(drive), str(budget), str(machine_file(folder))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.long
@pytest.mark.timeout(600)
def test_resident_memory_stays_within_the_budget_when_it_is_a_quarter_of_the_plain_run(tmp_path: Path) -> None:
    plain = run(tmp_path, 0)
    assert plain["peak_bytes"] >= 1.5e9, "the model is too small to show anything"
    budget_bytes = plain["peak_bytes"] // 4

    wrapped = run(tmp_path, budget_bytes)

    assert wrapped["losses"] == plain["losses"]
    assert wrapped["phase"] == "planned"
    assert wrapped["fallbacks"] == 0
    assert wrapped["moved"]["nvme_write"] > 0
    assert wrapped["peak_bytes"] <= MARGIN * budget_bytes
    assert wrapped["counted_bytes"] <= wrapped["planned_bytes"] <= budget_bytes
    assert wrapped["counted_bytes"] >= 0.98 * wrapped["planned_bytes"]
    assert not list((tmp_path / "drive").iterdir())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("budget", ["25%", pytest.param("50%", marks=pytest.mark.long)])
def test_resident_memory_of_a_model_of_small_tensors_grows_by_its_budget(tmp_path: Path, budget: str) -> None:
    plain = run(tmp_path, "", SMALL_TENSORS)
    wrapped = run(tmp_path, budget, SMALL_TENSORS)
    assert wrapped["losses"] == plain["losses"]
    assert wrapped["phase"] == "planned"
    assert wrapped["growth_bytes"] <= MARGIN * wrapped["planned_bytes"] + 64 * MIB
    assert wrapped["growth_bytes"] < plain["growth_bytes"]
