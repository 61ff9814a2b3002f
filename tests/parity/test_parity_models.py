"""Wrapped models compute what plain ones do, bit for bit, with everything moved to every set of tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.covering import pairwise
from tests.support.models import LOOPS, MODELS
from tests.support.parity import BACKENDS, HOST, MIXED, NVME, TIERS, Tiers, Workload, check_parity


def name_of(value: Any) -> str:
    """Returns a parameter's name in the name of its test."""
    return str(getattr(value, "name", value))


@pytest.mark.parametrize(("workload", "tiers", "backend"), pairwise(MODELS, TIERS, list(BACKENDS)), ids=name_of)
def test_model_computes_the_same_wrapped(workload: Workload, tiers: Tiers, backend: str, tmp_path: Path) -> None:
    check_parity(workload, tiers, BACKENDS[backend], tmp_path)


@pytest.mark.parametrize(("backend", "tiers"), [("cpu", NVME), ("delayed", HOST), ("delayed", MIXED)])
@pytest.mark.parametrize("workload", LOOPS, ids=lambda workload: workload.name)
def test_loop_computes_the_same_wrapped(workload: Workload, tiers: Tiers, backend: str, tmp_path: Path) -> None:
    if workload.name == "clear_between" and tiers is MIXED:
        # Room of gradients that were cleared is free when their late copies are over. Of sixteen pages of host memory there are
        # then too few for what the plan puts there: the NVMe takes over, and it is said.
        tiers = NVME
    check_parity(workload, tiers, BACKENDS[backend], tmp_path)
