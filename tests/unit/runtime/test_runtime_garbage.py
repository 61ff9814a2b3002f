"""Steps that move tensors leave no cycles: memory goes back when its last user is done, not when the collector comes by."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff


@pytest.mark.parametrize("foreach", [False, True])
def test_planned_steps_make_no_cycles(foreach: bool, tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    config: dict[str, Any] = {
        "device": "cpu",
        "budget": {"device": "50%", "host": "64MiB", "nvme": "64MiB"},
        "nvme": {"dirs": [str(tmp_path)]},
        "plan": {"min_bytes": 0},
    }
    tieroff.wrap(model, optimizer, config)

    def step() -> None:
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(12):  # beyond the plans that are made again while the first ones settle
        step()
    gc.disable()
    try:
        gc.collect()
        step()  # what an earlier test left until now is gone with it
        gc.collect()
        for _ in range(8):
            step()
        stats = tieroff.engine(model).stats()
        assert gc.collect() == 0
    finally:
        gc.enable()
    assert stats.phase == "planned"
    assert sum(stats.moved_bytes.values()) > 0
    tieroff.unwrap(model)
