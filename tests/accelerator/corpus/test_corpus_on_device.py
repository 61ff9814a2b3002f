"""The corpus of strangers' programs on the device, whose allocator counts what they take."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accelerator import target
from tests.corpus import programs
from tests.corpus.run import check, runs_anywhere
from tests.support.covering import every_second

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),  # torch's own, in backward
]
assert programs.__all__


@pytest.mark.parametrize("name", every_second(runs_anywhere(), 1))
def test_program_gives_the_same(name: str, tmp_path: Path) -> None:
    check(name, target.device(), target.backend, tmp_path)
