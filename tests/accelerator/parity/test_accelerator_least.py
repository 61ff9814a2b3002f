"""What a step needs at least does not grow with layers that are alike: what does is pinned by somebody.

The peak is PyTorch's own count of the device's memory, which the engine does not own.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tieroff
from tests.accelerator import target
from tests.support.parity import HOST, NVME, Tiers, config_for
from tests.support.recipes.alike import RECIPES, Recipe

STEPS = 5
FEW, MANY = 3, 8
GROWTH = 1.1


def train(recipe: Recipe, count: int, tiers: Tiers | None, folder: Path) -> tuple[list[Tensor], int]:
    """Returns the losses, and the peak of the last step above what was allocated before."""
    device = target.device()
    gc.collect()
    torch.accelerator.synchronize(device)
    base_bytes = torch.accelerator.memory_allocated(device)
    model = recipe.build(count).to(device)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    if tiers is not None:
        config = config_for(tiers, folder, policy="auto", device="min")
        tieroff.wrap(model, optimizer, config, backend=target.backend())
    losses: list[Tensor] = []
    for index in range(STEPS):
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        losses.append(recipe.step(model, optimizer, index, device))
    torch.accelerator.synchronize(device)
    peak_bytes = torch.accelerator.max_memory_allocated(device) - base_bytes
    if tiers is not None:
        stats = tieroff.engine(model).stats()
        assert (stats.phase, stats.fallbacks) == ("planned", 0)
        tieroff.unwrap(model)
    return losses, peak_bytes


@pytest.mark.parametrize("tiers", [HOST, pytest.param(NVME, marks=pytest.mark.long)], ids=lambda tiers: tiers.name)
@pytest.mark.parametrize("name", RECIPES)
def test_least_bytes_do_not_grow_with_layers(name: str, tiers: Tiers, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    peaks = []
    for count in (FEW, MANY):
        plain, _ = train(recipe, count, None, tmp_path)
        losses, peak_bytes = train(recipe, count, tiers, tmp_path)
        assert all(map(torch.equal, losses, plain))
        peaks.append(peak_bytes)
    assert peaks[1] <= GROWTH * peaks[0], f"{FEW} layers need {peaks[0]} bytes, {MANY} need {peaks[1]}"
