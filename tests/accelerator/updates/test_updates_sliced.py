"""Updates in slices on an accelerator: state comes and goes row by row, with the bits of the plain run and without a race."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.accelerator import target
from tests.support.covering import in_turn
from tests.support.parity import HOST, NVME, OptimizerFactory, Tiers
from tests.support.recipes.sliced import EMBEDDING_BYTES, ROWS, WIDTH, check, config, workload
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


class OnlyEmbedded(nn.Module):
    """An embedding, and next to nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(self.embedding(tokens)))


def assert_nothing_else_moves(engine: Engine) -> None:
    assert int(engine.trace.meta[BYTES_BELOW].partition("=")[2]) >= 2 * EMBEDDING_BYTES
    assert engine.plan.moves_nothing
    assert "is there and unused" not in engine.explain()


@pytest.mark.parametrize("tiers", [HOST, NVME], ids=lambda tiers: tiers.name)
def test_it_is_updated_in_slices_where_nothing_else_has_to_move(tiers: Tiers, tmp_path: Path) -> None:
    trained = replace(workload(OPTIMIZERS["adamw"]), build=OnlyEmbedded)
    check(trained, tiers, target.backend(), config(tiers, tmp_path), assert_nothing_else_moves, "nothing moved")
