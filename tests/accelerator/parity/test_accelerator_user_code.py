"""What user code makes in the midst of a step, and between two, fits the budget, by the device's own count."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accelerator import target
from tests.corpus import programs
from tests.corpus.run import ROUNDING_BYTES, excess_bytes
from tests.parity.memory.test_user_code import PROGRAMS

pytestmark = pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning")
assert programs.__all__


@pytest.mark.parametrize("budget", ["90%", "50%", "min"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_stays_in_its_budget(name: str, budget: str, tmp_path: Path) -> None:
    assert excess_bytes(name, target.device(), target.backend, tmp_path, budget) <= ROUNDING_BYTES
