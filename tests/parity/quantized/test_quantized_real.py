"""bitsandbytes' CPU kernels and torchao, as people use them: adapters on quantized weights, and quantized optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tieroff
from tests.support.parity import HOST, Outcome, Trainer, Workload, assert_equal, config_for
from tieroff.core.tensor import Tier
from tieroff.runtime.backend.cpu import CpuBackend
from tieroff.runtime.movable import plain_parts

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("default"),  # both libraries warn of kernels that this machine has not
    pytest.mark.filterwarnings("ignore::tieroff.errors.BudgetWarning"),
]
WIDTH = 256


def four_bits() -> nn.Module:
    import bitsandbytes

    made: Any = bitsandbytes.nn
    return quantized(made.Linear4bit(WIDTH, WIDTH, bias=False, compute_dtype=torch.float32, quant_type="nf4"))


def eight_bits() -> nn.Module:
    import bitsandbytes

    made: Any = bitsandbytes.nn
    return quantized(made.Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False))


def quantized(base: Any) -> nn.Module:
    """Quantizes where it lies: `to` of a device that it is on already does not."""
    base.weight = base.weight.to("cpu")
    module: nn.Module = base
    return module


def of_torchao() -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
    quantize_(base, Int8WeightOnlyConfig())
    return base


def plain() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=False)


class Net(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module], checkpoints: str, layers: int) -> None:
        super().__init__()
        self.base = nn.ModuleList(kind() for _ in range(layers))
        self.a = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in range(layers))
        self.b = nn.ModuleList(nn.Linear(4, WIDTH, bias=False) for _ in range(layers))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(True)
        for base, a, b in zip(self.base, self.a, self.b, strict=True):

            def block(x: Tensor, base: Any = base, a: Any = a, b: Any = b) -> Tensor:
                return x + torch.tanh(base(x) + b(a(x)))

            x = block(x) if self.checkpoints == "none" else checkpoint(block, x, use_reentrant=self.checkpoints == "reentrant")
        return x


def accumulating(trainer: Trainer) -> None:
    for _ in range(2):
        (trainer.loss() / 2).backward()
    trainer.update()


def train(work: Workload, folder: Path | None, device: str = "min") -> tuple[Outcome, Any]:
    """Trains plain, or wrapped where there is a folder; returns what it computed, and the plan."""
    trainer, plan = Trainer(work, torch.device("cpu")), None
    if folder is not None:
        config = config_for(HOST, folder, policy="auto", device=device)
        tieroff.wrap(trainer.model, trainer.optimizer, config, backend=CpuBackend())
    for index in range(work.steps):
        trainer.run(index)
    outcome = trainer.finish()
    if folder is not None:
        engine = tieroff.engine(trainer.model)
        assert (engine.stats().phase, engine.stats().fallbacks) == ("planned", 0)
        assert "stepped whole" not in engine.explain(detail=True)
        plan = engine.plan
        tieroff.unwrap(trainer.model)
    flat: dict[str, Any] = {}
    nested = ((f"{key} {inner}", one) for key, value in outcome.optimizer.items() for inner, one in _entries(value))
    for key, value in nested:
        parts = plain_parts(value) if isinstance(value, Tensor) else [value]
        flat |= {f"{key} {number}": part for number, part in enumerate(parts)}
    values = [
        {
            f"{key} {number}": part.detach().as_subclass(Tensor)
            for key, value in step.items()
            for number, part in enumerate(plain_parts(value))
        }
        for step in outcome.values
    ]
    return Outcome(outcome.losses, outcome.gradients, values, flat), plan


def _entries(value: Any) -> Iterable[tuple[str, Any]]:
    return value.items() if isinstance(value, dict) else [("", value)]  # bitsandbytes hands 8-bit state out in a dict


@pytest.mark.parametrize("checkpoints", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("kind", [four_bits, eight_bits, of_torchao])
def test_real_quantized_weights(kind: Callable[[], nn.Module], checkpoints: str, tmp_path: Path) -> None:
    def workload(layers: int) -> Workload:
        return Workload("real", lambda: Net(kind, checkpoints, layers), lambda: (torch.randn(16, WIDTH),), step=accumulating)

    expected, _ = train(workload(3), None)
    for device in ("50%", "25%", "min"):
        got, plan = train(workload(3), tmp_path, device)
        assert_equal(expected, got)
    least = plan.peak_bytes[Tier.DEVICE]
    _, plan = train(workload(8), tmp_path)
    assert plan.peak_bytes[Tier.DEVICE] <= 1.1 * least


def _of_bitsandbytes(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    def make(params: Any) -> torch.optim.Optimizer:
        import bitsandbytes

        made: torch.optim.Optimizer = getattr(bitsandbytes.optim, name)(params, lr=1e-3)
        return made

    return make


def _of_torchao(name: str, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    def make(params: Any) -> torch.optim.Optimizer:
        import torchao.optim

        made: torch.optim.Optimizer = getattr(torchao.optim, name)(params, lr=1e-3, **options)
        for group in made.param_groups:
            group["lr"] = torch.as_tensor(group["lr"])
        return made

    return make


OPTIMIZERS = {
    "AdamW8bit": _of_bitsandbytes("AdamW8bit"),
    "PagedAdamW8bit": _of_bitsandbytes("PagedAdamW8bit"),
    "PagedAdamW": _of_bitsandbytes("PagedAdamW"),
    "torchao AdamW8bit": _of_torchao("AdamW8bit"),
    "torchao _AdamW": _of_torchao("_AdamW", bf16_stochastic_round=True),
    "Muon": lambda params: torch.optim.Muon(params, lr=1e-3),
}


def own_step(trainer: Trainer) -> None:
    """Without the scheduler, which torchao's take by the value in their tensor alone."""
    trainer.loss().backward()
    trainer.outcome.gradients.append({})
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_real_optimizers_update_in_buckets(name: str, tmp_path: Path) -> None:
    work = Workload(
        name,
        lambda: Net(plain, "none", 3).bfloat16(),
        lambda: (torch.randn(16, WIDTH).bfloat16(),),
        step=own_step,
        optimizer=OPTIMIZERS[name],
    )
    expected, _ = train(work, None)
    got, _ = train(work, tmp_path)
    assert_equal(expected, got)
