"""Every policy trains on the engine: the same numbers as without it, at the smallest share that its rule meets."""

from __future__ import annotations

import pytest
import torch

import tieroff
from tieroff.core.tensor import Tier
from tieroff.errors import InfeasiblePlanError
from tieroff.planner.policies import POLICIES

_SHARES = ("50%", "75%", "90%")
_MOVE_TOO_LITTLE = {"autoswap", "autoswap-aoa", "autoswap-doa", "autoswap-swdoa", "autoswap-wdoa", "flashneuron", "vdnn-conv"}
"""Policies whose rule meets none of the shares here: no tensor of a megabyte, no NVMe, no convolution."""


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(8)))


def _losses(policy: str | None, share: str = "") -> list[float]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    if policy is not None:
        budget = {"device": share, "host": "64MiB", "nvme": 0}
        model = tieroff.wrap(model, optimizer, config={"budget": budget, "plan": {"min_bytes": 0, "policy": policy}})
    generator = torch.Generator().manual_seed(1)
    losses: list[float] = []
    try:
        for _ in range(5):
            loss = model(torch.randn(512, 256, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if policy is not None:
            engine = tieroff.engine(model)
            stats = engine.stats()
            assert (stats.phase, engine.plan.policy) == ("planned", policy)
            assert sum(stats.moved_bytes.values()) > 0
            assert engine.plan.peak_bytes[Tier.DEVICE] <= engine.plan.budget_bytes[Tier.DEVICE]
            assert stats.peak_device_bytes <= engine.plan.budget_bytes[Tier.DEVICE]
    finally:
        if policy is not None:
            tieroff.unwrap(model)
    return losses


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_losses_are_equal_under_every_policy(policy: str) -> None:
    plain = _losses(None)
    for share in _SHARES:
        try:
            losses = _losses(policy, share)
        except InfeasiblePlanError:
            continue
        assert losses == plain
        assert policy not in _MOVE_TOO_LITTLE
        return
    assert policy in _MOVE_TOO_LITTLE
