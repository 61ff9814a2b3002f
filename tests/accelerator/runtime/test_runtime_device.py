"""Which device a model computes on, what memory counts as its own, and devices that cannot be served."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.accelerator import sim, target, vendor
from tieroff.core.tensor import Tier
from tieroff.errors import ConfigError, StoreError
from tieroff.runtime.backend.vendor import register_vendor

WIDTH = 64
SIM_BYTES = 8 << 30


def mlp(device: torch.device | str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).to(device)


def config(**tables: Any) -> dict[str, Any]:
    return {"budget": {"device": "100%", "host": "8MiB"}, "plan": {"policy": "floor", "min_bytes": 0}} | tables


def test_auto_is_where_the_model_is() -> None:
    for device in (torch.device("cpu"), target.device(0), target.device(1)):
        model = tieroff.wrap(mlp(device), config=config())
        assert tieroff.engine(model).device == device
        tieroff.unwrap(model)


def test_a_model_on_the_host_is_moved_to_the_device_that_is_named() -> None:
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    tieroff.wrap(model, config=config(device=f"{target.NAME}:1"))
    assert {p.device for p in model.parameters()} == {target.device(1)}
    tieroff.unwrap(model)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("wanted", "told"), [("sim:7", "sim:0 to sim:1"), ("cuda", "torch sees sim"), ("gpu", "no device of PyTorch")]
)
def test_a_device_that_is_not_there_is_an_error(wanted: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        tieroff.wrap(mlp(), config=config(device=wanted))


def test_a_model_on_a_device_is_not_served_by_the_host() -> None:
    """Reading its memory there would end the process."""
    model = mlp(target.device())
    with pytest.raises(ConfigError, match="on sim:0"):
        tieroff.wrap(model, config=config(device="cpu"))
    model(torch.ones(1, WIDTH, device=target.device())).sum().backward()


def test_a_model_on_two_devices_is_an_error() -> None:
    model = nn.Sequential(mlp(target.device(0)), mlp(target.device(1)))
    with pytest.raises(ConfigError, match="sim:0, sim:1"):
        tieroff.wrap(model, config=config())


def test_memory_that_others_hold_is_not_planned_with() -> None:
    gc.collect()  # what earlier tests let go
    torch.accelerator.empty_cache()
    sim.set_device_bytes(256 << 20)  # the links are measured too, with 32 MiB
    try:
        others = torch.empty(200 << 20, dtype=torch.uint8, device=target.device())
        model = mlp(target.device())
        optimizer = torch.optim.AdamW(model.parameters())
        tieroff.wrap(model, optimizer, {"budget": {"host": "8MiB"}, "plan": {"min_bytes": 0}})
        for _ in range(3):
            model(torch.ones(4, WIDTH, device=target.device())).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert tieroff.engine(model).plan.budget_bytes[Tier.DEVICE] <= (256 << 20) - others.numel()
        tieroff.unwrap(model)
    finally:
        sim.set_device_bytes(SIM_BYTES)


def test_host_memory_is_no_tier_of_an_integrated_device(tmp_path: Path) -> None:
    register_vendor(sim.NAME, vendor.SimulatedVendor(is_one_memory=True))
    try:
        with pytest.raises(ConfigError, match="memory is the host's"):
            tieroff.wrap(mlp(target.device()), config=config())
        tables = {"budget": {"device": "100%", "nvme": "8MiB"}, "nvme": {"dirs": [str(tmp_path)]}}
        model = tieroff.wrap(mlp(target.device()), config=tables)
        assert list(tieroff.engine(model).stores) == [Tier.NVME]
        tieroff.unwrap(model)
    finally:
        vendor.install()


def test_a_refused_registration_is_told_and_leaves_no_error_behind() -> None:
    sim.set_pin_limit(1 << 20)
    model = mlp(target.device())
    with pytest.raises(StoreError, match="expected to pin"):
        tieroff.wrap(model, config=config(plan={"min_bytes": 0}))
    assert float(model(torch.ones(1, WIDTH, device=target.device())).sum().item()) != 0  # the next kernel raises nothing


@pytest.mark.parametrize("host_bytes", [256 << 10, 8 << 20])
def test_what_is_pinned_for_copies_to_a_drive_is_part_of_the_host_budget(host_bytes: int, tmp_path: Path) -> None:
    gc.collect()
    before = sim.counters()["pinned_bytes"]
    model = mlp(target.device())
    optimizer = torch.optim.AdamW(model.parameters())
    tables: dict[str, Any] = {
        "budget": {"device": "100%", "host": host_bytes},
        "nvme": {"dirs": [str(tmp_path)], "staging": "1MiB"},
    }
    tieroff.wrap(model, optimizer, config=config(**tables))
    planned = tieroff.engine(model)
    for _ in range(4):
        model(torch.ones(4, WIDTH, device=target.device())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert sim.counters()["pinned_bytes"] - before <= host_bytes
    assert planned.plan.budget_bytes[Tier.HOST] + min(1 << 20, host_bytes // 2) <= host_bytes
    assert planned.stats().phase == "planned"
    tieroff.unwrap(model)
