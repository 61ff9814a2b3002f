"""What user code makes in the midst of a step, and between two, fits the budget, by the allocator's own count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.corpus import programs
from tests.corpus.run import excess_bytes
from tieroff.runtime.backend.cpu import CpuBackend, settle_vector_math

pytestmark = pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning")
assert programs.__all__
LOSS_BYTES = 64

PROGRAMS = (
    "weights_decayed_before_the_update",
    "weights_decayed_by_hand",
    "weights_that_hooks_keep_until_the_update",
    "chunked_head",
)


@pytest.mark.parametrize("budget", ["90%", "50%", "min"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_stays_in_its_budget(name: str, budget: str, tmp_path: Path) -> None:
    settle_vector_math()
    assert excess_bytes(name, torch.device("cpu"), CpuBackend, tmp_path, budget) <= LOSS_BYTES
