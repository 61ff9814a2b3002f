"""Programs in the shape of public training scripts: with one line more they leave what they leave without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.compare import PAGE, PROGRAMS, budgets_of, runs
from tests.support.parity import machine_file

# The others are marked long: each takes three processes.
ALWAYS = ("adversaries", "leaves_early", "manual_sgd", "sizes")


@pytest.mark.parametrize("program", [p if p in ALWAYS else pytest.param(p, marks=pytest.mark.long) for p in PROGRAMS])
def test_program_leaves_what_the_plain_one_leaves(program: str, tmp_path: Path) -> None:
    budgets = budgets_of(program)
    plain, *others = runs(program, ("", *budgets), machine_file(tmp_path))
    assert len(plain["left"]["losses"]) >= 9 and plain["left"]["digests"]
    for budget, wrapped in zip(budgets, others, strict=True):
        assert wrapped["left"] == plain["left"], budget
        assert set(wrapped["figures"]["phases"]) <= {"planned", "on demand"}


def test_page_names_every_program() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [program for program in PROGRAMS if f"| `{program}` |" not in page] == []
    assert "differs" not in page
