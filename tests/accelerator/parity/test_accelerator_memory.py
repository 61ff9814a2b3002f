"""The device's budget holds by PyTorch's own count of its memory, which the engine does not own."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tieroff
from tests.accelerator import target
from tests.support.parity import HOST, NVME, Tiers, Trainer, Workload, config_for
from tieroff.core.tensor import Tier

WIDTH, ROWS, LAYERS = 256, 512, 8
WARM_STEPS, STEPS = 3, 6
TOLERANCE = 1.05  # the allocator's rounding, and work space of kernels that no trace sees


def build() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*layers)


def rows() -> tuple[Tensor, ...]:
    return (torch.randn(ROWS, WIDTH),)


WORKLOAD = Workload("mlp", build, rows)


def warm_libraries() -> None:
    """Has the libraries take their work space before anything is measured."""
    layer = nn.Linear(WIDTH, WIDTH, device=target.device())
    layer(torch.randn(ROWS, WIDTH, device=target.device())).sum().backward()
    torch.accelerator.synchronize(target.device())


def allocated_bytes() -> int:
    """Returns what is allocated now; optimizers and their schedulers refer to each other, so garbage goes first."""
    gc.collect()
    return torch.accelerator.memory_allocated(target.device())


def allocated_peak(trainer: Trainer, base_bytes: int) -> int:
    """Runs the workload; returns the peak of the later steps above `base_bytes`."""
    for index in range(STEPS):
        if index == WARM_STEPS:
            torch.accelerator.synchronize(target.device())
            torch.accelerator.reset_peak_memory_stats(target.device())
        trainer.run(index)
    torch.accelerator.synchronize(target.device())
    return torch.accelerator.max_memory_allocated(target.device()) - base_bytes


def plain_peak() -> int:
    base_bytes = allocated_bytes()
    return allocated_peak(Trainer(WORKLOAD, target.device()), base_bytes)


@pytest.mark.parametrize("tiers", [HOST, NVME], ids=lambda tiers: tiers.name)
@pytest.mark.parametrize("share", ["75%", "50%"])
def test_peak_stays_within_the_budget_by_pytorchs_count(share: str, tiers: Tiers, tmp_path: Path) -> None:
    warm_libraries()
    plain_bytes = plain_peak()
    backend = target.backend()
    base_bytes = allocated_bytes()
    trainer = Trainer(WORKLOAD, backend.device)
    config = config_for(tiers, tmp_path, policy="auto", device=share)
    size_bytes = 4 * plain_bytes
    config["budget"] |= {"host": size_bytes} if tiers is HOST else {"nvme": size_bytes}
    config["nvme"]["staging"] = "32MiB"
    tieroff.wrap(trainer.model, trainer.optimizer, config, backend=backend)
    engine = tieroff.engine(trainer.model)
    try:
        peak_bytes = allocated_peak(trainer, base_bytes)
        stats, plan = engine.stats(), engine.plan
    finally:
        tieroff.unwrap(trainer.model)
    assert (stats.phase, stats.fallbacks) == ("planned", 0)
    assert stats.peak_device_bytes <= plan.budget_bytes[Tier.DEVICE]
    assert abs(stats.peak_device_bytes - plan.peak_bytes[Tier.DEVICE]) <= 0.02 * plan.peak_bytes[Tier.DEVICE]
    assert peak_bytes <= TOLERANCE * plan.budget_bytes[Tier.DEVICE]
    assert peak_bytes < plain_bytes


def test_device_memory_is_all_given_back(tmp_path: Path) -> None:
    warm_libraries()
    base_bytes = allocated_bytes()
    trainer = Trainer(WORKLOAD, target.device())
    config = config_for(HOST, tmp_path)
    config["budget"]["host"] = "1GiB"
    tieroff.wrap(trainer.model, trainer.optimizer, config, backend=target.backend())
    for index in range(STEPS):
        trainer.run(index)
    tieroff.unwrap(trainer.model)
    del trainer
    torch.accelerator.synchronize(target.device())
    assert allocated_bytes() <= base_bytes
