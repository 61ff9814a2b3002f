"""Programs in the shape of public training scripts: with one line more they leave what they leave without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.compare import PAGE, PROGRAMS, budgets_of, run
from tests.support.parity import machine_file

# The others are marked long: each takes two processes, whose imports are most of the time.
ALWAYS = ("adversaries", "leaves_early", "manual_sgd", "sizes")


@pytest.mark.parametrize("program", [p if p in ALWAYS else pytest.param(p, marks=pytest.mark.long) for p in PROGRAMS])
def test_program_leaves_what_the_plain_one_leaves(program: str, tmp_path: Path) -> None:
    plain = run(program, "")
    assert len(plain["left"]["losses"]) >= 9 and plain["left"]["digests"]
    for budget in budgets_of(program):
        wrapped = run(program, budget, machine_file(tmp_path))
        assert wrapped["left"] == plain["left"], budget
        assert set(wrapped["figures"]["phases"]) <= {"planned", "on demand"}


def test_page_names_every_program() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [program for program in PROGRAMS if f"| `{program}` |" not in page] == []
    assert "differs" not in page
