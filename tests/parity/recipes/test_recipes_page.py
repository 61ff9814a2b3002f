"""docs/recipes.md: each row's program, pasted into a file, runs, and computes the bits of the same program without tieroff.

Every program accumulates gradients, clips them, follows a schedule and leaves a checkpoint in the middle, from which
it goes on when it is started again.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.parity.recipes.page import CHECKPOINTS, PAGE, Ran, programs, run
from tests.support.covering import pairwise
from tests.support.parity import differing

NEEDS = {"row01.py": "bitsandbytes", "row02.py": "bitsandbytes", "row06.py": "bitsandbytes"}
NEEDS |= {"row08.py": "torchao", "row11.py": "torchao"}
BUDGETS = ("50%", "25%", "min")
DEFAULT_TIER = ("row03.py", "row10.py")
ROWS = sorted(set(programs()) - {"tiny.py"})

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own: names that are to go, kernels that are not there


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_row_of_the_table_has_a_program() -> None:
    numbers = re.findall(r"^\| \[(\d+)\]\(#\1\)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(numbers) == len(ROWS) > 0
    assert [f"row{int(number):02}.py" for number in numbers] == ROWS


def same(plain: Ran, wrapped: Ran) -> bool:
    return differing(plain.values, wrapped.values) == []


def skip_without_library(name: str) -> None:
    library = NEEDS.get(name)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} has no wheel for this machine")


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT_TIER else pytest.param(name, marks=pytest.mark.long) for name in ROWS]
)
def test_a_rows_program_computes_the_same_and_resumes(name: str, tmp_path: Path) -> None:
    skip_without_library(name)
    for folder in ("plain", "wrapped"):
        (tmp_path / folder).mkdir()
    plain = run(name, tmp_path / "plain", is_plain=True)
    wrapped = run(name, tmp_path / "wrapped")
    assert same(plain, wrapped)
    assert len(set(plain.values["losses"].tolist())) > 1
    assert any(key.startswith("state ") for key in plain.values)
    assert wrapped.moved
    assert wrapped.peak_bytes <= wrapped.budget_bytes < wrapped.plain_bytes
    assert same(plain, run(name, tmp_path / "wrapped", is_resumed=True))  # goes on from the checkpoint of the run before


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "budget", "checkpoints"), pairwise(("row01.py", "row08.py", "row09.py"), BUDGETS, tuple(CHECKPOINTS))
)
def test_budgets_and_checkpoints_change_no_bit(name: str, budget: str, checkpoints: str, tmp_path: Path) -> None:
    skip_without_library(name)
    for folder in ("plain", "wrapped"):
        (tmp_path / folder).mkdir()
    plain = run(name, tmp_path / "plain", is_plain=True, checkpoints=checkpoints)
    wrapped = run(name, tmp_path / "wrapped", budget=budget, checkpoints=checkpoints)
    assert same(plain, wrapped)
    assert wrapped.moved
    assert wrapped.peak_bytes <= wrapped.budget_bytes < wrapped.plain_bytes
