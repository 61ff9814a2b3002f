"""The least budget of a checkpointed model is that of the model without, and smaller steps follow the plan of larger ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tieroff
from tests.support.parity import BACKENDS, HOST, NVME, Trainer, Workload, check_parity, config_for, plain_step
from tieroff.core.tensor import Tier

WIDTH, WIDE, LAYERS, ROWS = 64, 256, 5, 16


class Block(nn.Module):
    """Frozen weights with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.up.requires_grad_(False)
        self.down.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, 2 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.down(F.silu(self.up(x) + self.b(self.a(x)))))


class Net(nn.Module):
    def __init__(self, use_reentrant: bool | None, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class Merged(nn.Module):
    """A frozen weight, of which backward needs the sum with its adapters' product alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(WIDE, 2) / WIDE), nn.Parameter(torch.randn(2, WIDE) / WIDE)
        self.weight = nn.Parameter(torch.randn(WIDE, WIDE) / WIDE, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a, self.b
        return x + F.linear(x, torch.addmm(self.weight, a, b))


def least_bytes(use_reentrant: bool | None, folder: Path, block: Callable[[], nn.Module] = Block, width: int = WIDTH) -> int:
    def batch() -> tuple[Tensor, ...]:
        return (torch.randn(ROWS, width).requires_grad_(),)

    # Each checkpoint keeps the state of the CPU's generator, and one that computes again the present one: no operator makes it.
    kept_bytes = 0 if use_reentrant is None else (LAYERS + 1) * torch.get_rng_state().nbytes
    workload = Workload("adapters", partial(Net, use_reentrant, block), batch, unseen_bytes=kept_bytes)
    engine = check_parity(workload, HOST, BACKENDS["cpu"], folder, policy="auto", device="min")
    return engine.plan.peak_bytes[Tier.DEVICE]


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_a_checkpoint_needs_no_more_than_its_block_does(use_reentrant: bool, tmp_path: Path) -> None:
    assert least_bytes(use_reentrant, tmp_path) <= 1.1 * least_bytes(None, tmp_path)


@pytest.mark.parametrize("use_reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
def test_what_a_layer_read_last_is_away_in_its_backward(use_reentrant: bool | None, tmp_path: Path) -> None:
    # In forward a weight and the sum, in backward that and its gradient.
    assert least_bytes(use_reentrant, tmp_path, Merged, WIDE) < 2.6 * 4 * WIDE * WIDE


class Turned(nn.Module):
    """Layers that all save one tensor, as those of language models save their angles."""

    def __init__(self, count: int, use_reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.linspace(0, 3, ROWS * WIDTH).reshape(ROWS, WIDTH).cos()

        def turned(block: nn.Module, x: Tensor) -> Tensor:
            return x + torch.tanh(block(x * angles))

        for block in self.blocks:
            called = partial(turned, block)
            x = called(x) if self.use_reentrant is None else checkpoint(called, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
def test_a_tensor_that_each_layer_saves_counts_once(use_reentrant: bool | None, tmp_path: Path) -> None:
    def least_of(count: int) -> int:
        workload = Workload(
            "turned",
            partial(Turned, count, use_reentrant),
            lambda: (torch.randn(ROWS, WIDTH).requires_grad_(),),
            unseen_bytes=0 if use_reentrant is None else (count + 1) * torch.get_rng_state().nbytes,
        )
        folder = tmp_path / str(count)
        folder.mkdir()
        return check_parity(workload, HOST, BACKENDS["cpu"], folder, policy="auto", device="min").plan.peak_bytes[Tier.DEVICE]

    assert least_of(8) <= 1.05 * least_of(3)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


class Pyramid(nn.Module):
    """Its later activations are smaller: of smaller pictures they are below `min_bytes`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, 1, 1), nn.Hardswish(), nn.Conv2d(16, 16, 3, 2, 1), nn.Hardswish(), nn.Conv2d(16, 32, 3, 2, 1)
        )
        self.head = nn.Sequential(nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x))
        return out


@pytest.mark.parametrize("share", ["min"])
def test_a_smaller_step_follows_its_plan_though_some_of_it_is_too_small_to_move(share: str, tmp_path: Path) -> None:
    sides = [32] * 5 + [24, 32, 20, 32, 24]
    seen = iter(sides)
    workload = Workload("pyramid", Pyramid, lambda: (torch.randn(8, 3, next(seen), 32),), step=plain_step, optimizer=sgd)
    config = config_for(NVME, tmp_path, policy="auto", device=share)
    config["plan"] |= {"min_bytes": 60 << 10, "background": False}
    trainer = Trainer(workload, torch.device("cpu"))
    tieroff.wrap(trainer.model, trainer.optimizer, config)
    engine, phases = tieroff.engine(trainer.model), []
    for index in range(len(sides)):
        trainer.run(index)
        phases.append((engine.stats().phase, engine.stats().fallbacks))
    tieroff.unwrap(trainer.model)
    assert phases[5:] == [("planned", 0)] * 5
