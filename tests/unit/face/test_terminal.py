"""What a person sees on a terminal without asking for anything."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from dataclasses import dataclass
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


# Imports once (torch.optim takes torch._dynamo), and forks for each program, whose standard error is the descriptor before it.
EACH_APART = """
import os, sys
import torch, torch._dynamo, tieroff.api, tieroff.runtime.engine, tieroff.session.workshop
for side, program in zip(sys.argv[1::2], sys.argv[2::2]):
    if os.fork() == 0:
        os.dup2(int(side), 2)
        exec(program, {"__name__": "__main__"})
        break
    assert os.wait()[1] == 0, f"failed: {program}"
"""


@dataclass(frozen=True)
class Case:
    """A budget, what the program does before it wraps, and where its standard error goes."""

    budget: str
    before: str = ""
    is_terminal: bool = True


PLAIN = Case("80%")
ROOMY, LEAST = Case("1GiB"), Case("min")
PIPED = Case("80%", is_terminal=False)
WARNS = Case("80%", "logging.basicConfig(level=logging.WARNING)")
INFORMS = Case("80%", "logging.basicConfig(level=logging.INFO)")


def taken(side: int) -> str:
    """Returns what was written to the other side, which nobody has any more."""
    try:
        text = os.read(side, 1 << 16).decode()
    except OSError:  # nothing was written
        text = ""
    os.close(side)
    return text


@pytest.fixture(scope="module")
def seen(project: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, str]:
    """What each program writes on standard error."""
    folder = tmp_path_factory.mktemp("terminal")
    (folder / "machine.toml").write_text(MACHINE)
    sides = {case: pty.openpty() if case.is_terminal else os.pipe() for case in (PLAIN, ROOMY, LEAST, PIPED, WARNS, INFORMS)}
    own, own_side = pty.openpty()
    programs = [[str(side), PROGRAM.format(budget=case.budget, before=case.before)] for case, (_, side) in sides.items()]
    done = subprocess.run(
        [sys.executable, "-c", EACH_APART, *(part for program in programs for part in program)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"},
        stderr=own_side,
        stdin=subprocess.DEVNULL,
        pass_fds=[side for _, side in sides.values()],
        timeout=240,
    )
    for side in (own_side, *(side for _, side in sides.values())):
        os.close(side)
    said, of_all = {case: taken(main) for case, (main, _) in sides.items()}, taken(own)
    assert (done.returncode, of_all) == (0, ""), said
    return said


def test_one_line_says_that_the_plan_is_ready(seen: dict[Case, str]) -> None:
    lines = seen[PLAIN].splitlines()
    assert len(lines) == 1
    size = r"[\d.]+ [KM]iB"
    pattern = rf"tieroff: plan ready after step 2: {size} to host memory, step .* predicted, fits 80% \({size}\)"
    assert re.fullmatch(pattern, lines[0].strip()), lines


@pytest.mark.parametrize(("case", "told"), [(ROOMY, r"nothing has to move, fits [\d.]+ [MG]iB"), (LEAST, r"fits min \(")])
def test_the_line_says_what_has_to_move_and_what_it_fits(seen: dict[Case, str], case: Case, told: str) -> None:
    assert re.search(told, seen[case])


def test_nothing_is_written_where_standard_error_is_no_terminal(seen: dict[Case, str]) -> None:
    assert seen[PIPED] == ""


def test_a_program_with_logging_of_its_own_decides_what_is_shown(seen: dict[Case, str]) -> None:
    assert "plan ready" not in seen[WARNS]
    assert seen[INFORMS].count("plan ready") == 1


def test_a_program_that_was_started_without_standard_error_is_wrapped() -> None:
    program = (
        "import torch, tieroff\n"
        "model = torch.nn.Linear(4, 4)\n"
        "tieroff.wrap(model, torch.optim.SGD(model.parameters()), {'device': 'cpu'})\n"
        "print('wrapped')\n"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, program]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60).stdout == "wrapped\n"
