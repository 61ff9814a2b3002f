"""Planned steps on the device do the same in every step and every run, tick by tick; see support/oracles/event_logs.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accelerator import target
from tests.support.oracles.event_logs import BUDGETS, CASES, difference, logs_of
from tests.support.parity import Workload

pytestmark = pytest.mark.filterwarnings("ignore:.*was raised:tieroff.errors.BudgetWarning")


@pytest.mark.parametrize(("workload", "budget"), CASES)
def test_every_step_and_every_run_does_the_same(workload: Workload, budget: str, tmp_path: Path) -> None:
    first, again = (logs_of(workload, BUDGETS[budget], target.backend, tmp_path) for _ in range(2))
    assert difference(first.before, first.last) == ""
    assert difference(first.last, again.last) == ""
