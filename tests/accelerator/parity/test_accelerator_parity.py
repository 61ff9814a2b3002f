"""The parity tests on a device that is not the host: the same workloads, the same runner, the same demands.

By default each model, loop and optimizer runs over one set of tiers, and each set of tiers in its share; the other pairs
are marked `long`. That every model computes the same over every set of tiers is shown by default on the CPU, by tests/parity.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import optim

import tieroff
from tests.accelerator import target
from tests.support.covering import in_turn
from tests.support.models import CNN, GPT_WORKLOAD, LOOPS, MLP_WORKLOAD, MODELS
from tests.support.parity import HOST, MIXED, NVME, TIERS, Tiers, Workload, assert_equal, check_parity, run_plain

OPTIMIZERS = {
    "sgd": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: optim.Adam(params, foreach=True, amsgrad=True),
    "adamw_single": lambda params: optim.AdamW(params, foreach=False),
    "adamw_fused": lambda params: optim.AdamW(params, fused=True),
    "adafactor": lambda params: optim.Adafactor(params),
}


def check(workload: Workload, tiers: Tiers, folder: Path, *, policy: str = "floor", device: str = "100%") -> None:
    if target.IS_SIMULATED:
        check_parity(workload, tiers, target.backend, folder, policy=policy, device=device)
        return
    # Elsewhere a plain run is not always the same twice, and a norm over a list of gradients sums in an order of its own.
    clip = tieroff.clip_grad_norm_
    assert_equal(*(run_plain(workload, target.device(), clip=clip) for _ in range(2)))
    check_parity(workload, tiers, target.backend, folder, policy=policy, device=device, clip=clip)


@pytest.mark.parametrize(("workload", "tiers"), in_turn(MODELS, TIERS))
def test_model_computes_the_same(workload: Workload, tiers: Tiers, tmp_path: Path) -> None:
    check(workload, tiers, tmp_path)


@pytest.mark.parametrize(("workload", "tiers"), in_turn(LOOPS, [HOST, NVME]))
def test_loop_computes_the_same(workload: Workload, tiers: Tiers, tmp_path: Path) -> None:
    check(workload, tiers, tmp_path)


@pytest.mark.parametrize(("name", "tiers"), in_turn(list(OPTIMIZERS), [HOST, NVME]))
def test_optimizer_makes_the_same_updates(name: str, tiers: Tiers, tmp_path: Path) -> None:
    check(replace(MLP_WORKLOAD, optimizer=OPTIMIZERS[name]), tiers, tmp_path)


@pytest.mark.parametrize("tiers", [HOST, MIXED], ids=lambda tiers: tiers.name)
@pytest.mark.parametrize(("workload", "budget"), [(GPT_WORKLOAD, "60%"), (CNN, "75%")], ids=["gpt", "cnn"])
def test_auto_computes_the_same_within_its_budget(workload: Workload, budget: str, tiers: Tiers, tmp_path: Path) -> None:
    check(replace(workload, steps=workload.steps + 3), tiers, tmp_path, policy="auto", device=budget)


@pytest.mark.parametrize("workload", [MLP_WORKLOAD, GPT_WORKLOAD], ids=lambda workload: workload.name)
def test_model_on_another_device_than_the_current_one(workload: Workload, tmp_path: Path) -> None:
    """Streams, events and memory are those of the model's device, whichever is current."""
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    torch.accelerator.set_device_index(0)
    check_parity(workload, HOST, lambda: target.backend(1), tmp_path)
    assert torch.accelerator.current_device_index() == 0
