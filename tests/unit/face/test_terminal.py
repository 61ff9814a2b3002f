"""What a person sees on a terminal without asking for anything."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.twins import MACHINE

PROGRAM = """
import logging, sys, torch, tieroff
from torch import nn
{before}
torch.manual_seed(0)
model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(48, 48), nn.GELU())])
optimizer = torch.optim.Adam(model.parameters())
plan = {{"min_bytes": 0, "machine": "machine.toml", "background": False}}
config = {{"device": "cpu", "budget": {{"host": "8MiB"}}, "plan": plan}}
tieroff.wrap(model, optimizer, config, budget="{budget}")
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(64, 48)).square().mean().backward()
    optimizer.step()
"""


def seen(folder: Path, project: Path, budget: str, before: str = "", *, is_terminal: bool = True) -> str:
    """Returns what a program writes on standard error."""
    (folder / "machine.toml").write_text(MACHINE)
    main, side = pty.openpty() if is_terminal else os.pipe()
    environment = {**os.environ, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", PROGRAM.format(budget=budget, before=before)]
    done = subprocess.run(program, cwd=folder, env=environment, stderr=side, stdin=subprocess.DEVNULL, timeout=120)
    os.close(side)
    try:
        text = os.read(main, 1 << 16).decode()
    except OSError:  # nothing was written, and nobody can any more
        text = ""
    os.close(main)
    assert done.returncode == 0, text
    return text


def test_one_line_says_that_the_plan_is_ready(tmp_path: Path, project: Path) -> None:
    lines = seen(tmp_path, project, "80%").splitlines()
    assert len(lines) == 1
    size = r"[\d.]+ [KM]iB"
    pattern = rf"tieroff: plan ready after step 2: {size} to host memory, step .* predicted, fits 80% \({size}\)"
    assert re.fullmatch(pattern, lines[0].strip()), lines


@pytest.mark.parametrize(("budget", "told"), [("1GiB", "nothing has to move, fits 1"), ("min", r"fits min \(")])
def test_the_line_says_what_has_to_move_and_what_it_fits(tmp_path: Path, project: Path, budget: str, told: str) -> None:
    assert re.search(told, seen(tmp_path, project, budget))


def test_nothing_is_written_where_standard_error_is_no_terminal(tmp_path: Path, project: Path) -> None:
    assert seen(tmp_path, project, "80%", is_terminal=False) == ""


def test_a_program_with_logging_of_its_own_decides_what_is_shown(tmp_path: Path, project: Path) -> None:
    assert "plan ready" not in seen(tmp_path, project, "80%", "logging.basicConfig(level=logging.WARNING)")
    assert seen(tmp_path, project, "80%", "logging.basicConfig(level=logging.INFO)").count("plan ready") == 1
