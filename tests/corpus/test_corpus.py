"""A corpus of strangers' programs: the same numbers plain and wrapped, planned, within the budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.corpus import programs
from tests.corpus.run import STRANGERS, check
from tieroff.runtime.backend.cpu import CpuBackend, settle_vector_math

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
]
assert programs.__all__


@pytest.mark.parametrize("name", STRANGERS)
def test_program_gives_the_same(name: str, tmp_path: Path) -> None:
    settle_vector_math()
    check(name, torch.device("cpu"), CpuBackend, tmp_path)
