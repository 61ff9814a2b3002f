"""Plans that move only what they must compute the same numbers too, within a budget below the plain step's need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.models import CNN, GPT_WORKLOAD, MODELS
from tests.parity.support import BACKENDS, HOST, MIXED, NVME, Tiers, Workload, check_parity

LSTM = next(workload for workload in MODELS if workload.name == "lstm")


@pytest.mark.parametrize(
    ("backend", "tiers"), [("cpu", NVME), ("delayed", HOST), ("delayed", MIXED)], ids=["nvme", "host", "mixed"]
)
@pytest.mark.parametrize("workload", [GPT_WORKLOAD, CNN, LSTM], ids=lambda workload: workload.name)
def test_auto_computes_the_same_within_its_budget(
    workload: Workload, tiers: Tiers, backend: str, tmp_path: Path
) -> None:
    check_parity(workload, tiers, BACKENDS[backend], tmp_path, policy="auto", device="60%")
