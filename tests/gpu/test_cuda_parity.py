"""The parity tests on a real device: the same workloads, the same runner, the same demands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn, optim

from tests.support.models import CNN, GPT_WORKLOAD, LOOPS, MLP_WORKLOAD, MODELS
from tests.support.parity import HOST, MIXED, NVME, TIERS, Tiers, Workload, assert_equal, check_parity, run_plain
from tieroff.runtime.backend.cuda import CudaBackend

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation:UserWarning")]

LSTM = next(workload for workload in MODELS if workload.name == "lstm")


def clip_on_device(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Clips by a norm that is summed on the device wherever the gradients lie: sums on the host round differently."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([gradient.to("cuda") for gradient in gradients])
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.device))
    return norm


def check(workload: Workload, tiers: Tiers, folder: Path, *, policy: str = "floor", device: str = "100%") -> None:
    """Asserts parity on the device, where the plain run equals itself."""
    first, second = (run_plain(workload, torch.device("cuda"), clip=clip_on_device) for _ in range(2))
    assert_equal(first, second)
    check_parity(workload, tiers, CudaBackend, folder, policy=policy, device=device, clip=clip_on_device)


@pytest.mark.parametrize("tiers", TIERS, ids=lambda tiers: tiers.name)
@pytest.mark.parametrize("workload", MODELS, ids=lambda workload: workload.name)
def test_model_computes_the_same_on_cuda(workload: Workload, tiers: Tiers, tmp_path: Path) -> None:
    check(workload, tiers, tmp_path)


@pytest.mark.parametrize("tiers", [HOST, NVME], ids=lambda tiers: tiers.name)
@pytest.mark.parametrize("workload", LOOPS, ids=lambda workload: workload.name)
def test_loop_computes_the_same_on_cuda(workload: Workload, tiers: Tiers, tmp_path: Path) -> None:
    check(workload, tiers, tmp_path)


@pytest.mark.parametrize("tiers", [HOST, NVME], ids=lambda tiers: tiers.name)
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw_single", "adamw_fused", "adafactor"])
def test_optimizer_makes_the_same_updates_on_cuda(name: str, tiers: Tiers, tmp_path: Path) -> None:
    factories = {
        "sgd": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
        "adam": lambda params: optim.Adam(params, foreach=True, amsgrad=True),
        "adamw_single": lambda params: optim.AdamW(params, foreach=False),
        "adamw_fused": lambda params: optim.AdamW(params, fused=True),
        "adafactor": lambda params: optim.Adafactor(params),
    }
    check(replace(MLP_WORKLOAD, optimizer=factories[name]), tiers, tmp_path)


@pytest.mark.parametrize("tiers", [HOST, MIXED], ids=lambda tiers: tiers.name)
@pytest.mark.parametrize(
    ("workload", "budget"), [(GPT_WORKLOAD, "60%"), (LSTM, "60%"), (CNN, "75%")], ids=["gpt", "lstm", "cnn"]
)
def test_auto_computes_the_same_within_its_budget_on_cuda(
    workload: Workload, budget: str, tiers: Tiers, tmp_path: Path
) -> None:
    check(workload, tiers, tmp_path, policy="auto", device=budget)
