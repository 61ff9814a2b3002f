"""Quantized weights on a device that is not the host: equal, without a race, and in the device's own memory as planned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tieroff
from tests.accelerator import target
from tests.support.parity import HOST, MIXED, NVME, Tiers, Trainer, Workload, assert_equal, config_for, run_plain
from tests.support.recipes.quantized import KINDS, Block, Momentum, Scaled

WIDTH, LAYERS = 128, 4


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x.requires_grad_(True))
        return out


KINDS_AND_TIERS = [("four bits", HOST), ("eight bits", MIXED), ("parts", NVME), ("foreign", HOST), ("with input", MIXED)]


@pytest.mark.parametrize(("kind", "tiers"), KINDS_AND_TIERS)
def test_quantized_weights_compute_the_same(kind: str, tiers: Tiers, tmp_path: Path) -> None:
    work = Workload(
        kind,
        lambda: Net(*(Block(KINDS[kind], WIDTH) for _ in range(LAYERS))),
        lambda: (torch.randn(8, WIDTH),),
        optimizer=Momentum,
    )
    plain = run_plain(work, target.device())
    trainer = Trainer(work, target.device())
    tieroff.wrap(trainer.model, trainer.optimizer, config_for(tiers, tmp_path), backend=target.backend())
    for index in range(work.steps):
        trainer.run(index)
    engine = tieroff.engine(trainer.model)
    stats = engine.stats()
    assert (stats.phase, stats.fallbacks) == ("planned", 0)
    frozen = [item for item in engine.executor.homes.parameters.values() if item.others]
    assert len(frozen) == LAYERS
    assert all(item.device is None for item in frozen)
    states = [item for item in engine.executor.homes.states.values() if item.others]
    assert states and all(item.device is None for item in states)
    outcome = trainer.finish()
    tieroff.unwrap(trainer.model)
    for found in (plain, outcome):  # state in objects is compared by the update's results
        found.optimizer = {key: value for key, value in found.optimizer.items() if isinstance(value, Tensor)}
        for key, value in list(found.optimizer.items()):
            if isinstance(value, Scaled):
                found.optimizer[key] = value.dequantized()
        found.values = [
            {k: v.dequantized() if isinstance(v, Scaled) else v for k, v in values.items()} for values in found.values
        ]
    assert_equal(plain, outcome)
