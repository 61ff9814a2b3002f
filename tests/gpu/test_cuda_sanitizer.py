"""PyTorch's sanitizer of CUDA, which orders kernels by events as the race detector of the simulated device does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).resolve().parent / "sanitized.py"


def run_sanitized(what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, PROGRAM, what], capture_output=True, text=True, check=False)


def test_the_sanitizer_finds_a_race_that_is_planted() -> None:
    assert "CUDASanitizerErrors" in run_sanitized("planted").stderr


def test_a_training_that_moves_everything_has_no_race() -> None:
    done = run_sanitized("wrapped")
    assert done.returncode == 0, done.stdout + done.stderr
