"""The corpus of strangers' programs on the device, whose allocator counts what they take."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accelerator import target
from tests.corpus import programs
from tests.corpus.run import STRANGERS, check

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning")]
assert programs.__all__


@pytest.mark.parametrize("name", [name for name, known in STRANGERS.items() if not known.needs_host])
def test_program_gives_the_same(name: str, tmp_path: Path) -> None:
    check(name, target.device(), target.backend, tmp_path)
