"""Planned steps do the same on every backend and in every step, tick by tick, and it is what their plan says.

With these logs a change of the runtime shows that it changed nothing: see tests/support/oracles/event_logs.py.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.oracles.event_logs import BUDGETS, CASES, WORKLOADS, difference, logs_of
from tests.support.parity import BACKENDS, Workload
from tieroff.core.tensor import Tier

pytestmark = pytest.mark.filterwarnings("ignore:.*was raised:tieroff.errors.BudgetWarning")
BY_NAME = {workload.name: workload for workload in WORKLOADS}


@pytest.mark.parametrize(("workload", "budget"), CASES)
def test_every_backend_and_every_step_does_the_same(workload: Workload, budget: str, tmp_path: Path) -> None:
    found = {name: logs_of(workload, BUDGETS[budget], make, tmp_path) for name, make in BACKENDS.items()}
    assert difference(found["cpu"].before, found["cpu"].last) == ""
    assert difference(found["cpu"].last, found["delayed"].last) == ""


@pytest.mark.parametrize("budget", BUDGETS)
def test_what_moves_is_what_the_plan_says(budget: str, tmp_path: Path) -> None:
    logs = logs_of(BY_NAME["gpt"], BUDGETS[budget], BACKENDS["delayed"], tmp_path)
    planned = [(t.tensor, "in" if t.target is Tier.DEVICE else "out") for t in logs.plan.transfers]
    assert Counter(logs.last.issued) == Counter(planned)


@pytest.mark.parametrize(("name", "budget"), [("gpt", "some"), ("lstm", "more"), ("checkpoint_nonreentrant", "some")])
def test_a_step_without_quiet_events_moves_the_same_in_the_same_order(name: str, budget: str, tmp_path: Path) -> None:
    whole, quiet = (
        logs_of(BY_NAME[name], BUDGETS[budget], BACKENDS["delayed"], tmp_path, is_quiet=is_quiet) for is_quiet in (False, True)
    )
    assert quiet.last.moves == whole.last.moves
