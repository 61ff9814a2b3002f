"""Every policy trains on the engine: the same numbers as without it, at the smallest share that its rule meets."""

from __future__ import annotations

import functools

import pytest
import torch

import tieroff
from tieroff.core.tensor import Tier
from tieroff.errors import InfeasiblePlanError
from tieroff.planner.policies import all_policies

_SHARES = ("25%", "50%", "75%", "90%")
_MOVE_LARGE_ACTIVATIONS = {
    "autoswap",
    "autoswap-aoa",
    "autoswap-doa",
    "autoswap-swdoa",
    "autoswap-wdoa",
    "flashneuron",
    "vdnn-conv",
}
"""Policies whose rule meets none of the shares with a small batch: nothing below a megabyte moves, or too few activations."""


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(8)))


@functools.cache
def _plain_losses(is_large: bool) -> list[float]:
    return _losses(None, is_large=is_large)


def _losses(policy: str | None, share: str = "", *, is_large: bool) -> list[float]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    if policy is not None:
        budget = {"device": share, "host": "64MiB", "nvme": 0, "strict": True}
        model = tieroff.wrap(model, optimizer, config={"budget": budget, "plan": {"min_bytes": 0, "policy": policy}})
    generator = torch.Generator().manual_seed(1)
    batch = 2048 if is_large else 512
    losses: list[float] = []
    try:
        for _ in range(5):
            loss = model(torch.randn(batch, 256, generator=generator)).square().mean()
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


@pytest.mark.parametrize("policy", all_policies())
def test_losses_are_equal_under_every_policy(policy: str) -> None:
    is_large = policy in _MOVE_LARGE_ACTIVATIONS
    plain = _plain_losses(is_large)
    for share in _SHARES:
        try:
            losses = _losses(policy, share, is_large=is_large)
        except InfeasiblePlanError:
            continue
        assert losses == plain
        return
    pytest.fail(f"{policy} meets none of {_SHARES}")
