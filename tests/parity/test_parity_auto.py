"""Plans that move only what they must compute the same numbers too, within a budget below the plain step's need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import CNN, GPT_WORKLOAD, MODELS
from tests.support.parity import BACKENDS, HOST, MIXED, NVME, Tiers, Workload, check_parity

LSTM = next(workload for workload in MODELS if workload.name == "lstm")


@pytest.mark.parametrize(
    ("backend", "tiers"), [("cpu", NVME), ("delayed", HOST), ("delayed", MIXED)], ids=["nvme", "host", "mixed"]
)
@pytest.mark.parametrize(
    ("workload", "budget"),
    [(GPT_WORKLOAD, "60%"), (LSTM, "60%"), (CNN, "75%")],  # one convolution's work space is 43 % of this small one
    ids=["gpt", "lstm", "cnn"],
)
def test_auto_computes_the_same_within_its_budget(
    workload: Workload, budget: str, tiers: Tiers, backend: str, tmp_path: Path
) -> None:
    check_parity(workload, tiers, BACKENDS[backend], tmp_path, policy="auto", device=budget)
