"""Updates in slices on an accelerator: state comes and goes row by row, with the bits of the plain run and without a race."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.accelerator import target
from tests.support.covering import in_turn
from tests.support.parity import HOST, NVME, OptimizerFactory, Tiers
from tests.support.recipes.sliced import EMBEDDING_BYTES, check, config, workload
from tieroff.core.buckets import BYTES_BELOW
from tieroff.core.tensor import Tier
from tieroff.runtime.engine import Engine

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "adamw-capturable": lambda params: torch.optim.AdamW(params, lr=1e-3, capturable=True),
}


def assert_sliced(engine: Engine) -> None:
    assert int(engine.trace.meta[BYTES_BELOW].partition("=")[2]) >= 2 * EMBEDDING_BYTES
    assert engine.stats().moved_bytes_by_class["optimizer"] >= 4 * EMBEDDING_BYTES
    assert engine.plan.budget_bytes[Tier.DEVICE] < 4 * EMBEDDING_BYTES


@pytest.mark.parametrize(("name", "tiers"), in_turn(tuple(OPTIMIZERS), (HOST, NVME)))
def test_state_comes_and_goes_in_slices(name: str, tiers: Tiers, tmp_path: Path) -> None:
    check(workload(OPTIMIZERS[name]), tiers, target.backend(), config(tiers, tmp_path), assert_sliced)
