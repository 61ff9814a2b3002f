"""A corpus of strangers' programs: the same numbers plain and wrapped, planned, within the budget.

By default every second one runs here and the others on the device (tests/accelerator/corpus).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.corpus import programs
from tests.corpus.run import STRANGERS, check, runs_anywhere
from tests.support.covering import every_second
from tieroff.runtime.backend.cpu import CpuBackend, settle_vector_math

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),  # torch's own, in backward
]
assert programs.__all__


ON_THE_HOST = [name for name, known in STRANGERS.items() if known.needs_host]


@pytest.mark.parametrize("name", [*ON_THE_HOST, *every_second(runs_anywhere(), 0)])
def test_program_gives_the_same(name: str, tmp_path: Path) -> None:
    settle_vector_math()
    check(name, torch.device("cpu"), CpuBackend, tmp_path)
