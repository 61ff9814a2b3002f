"""Modules that run in backward, by torch's checkpoints and by people's own Functions, with ops that save a parameter itself."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tieroff
from tests.accelerator import target
from tests.support.covering import pairwise
from tests.support.parity import HOST, Outcome, Trainer, Workload, assert_equal, config_for, run_plain
from tieroff.core.tensor import Tier

LAYERS, ROWS, WIDTH, NARROW, STEPS = 4, 4, 17_000, 8, 6
SIDE, CHANNELS, WORDS = 6, 48, 400
# The allocator rounds each tensor up to 512 bytes, of which there are some eighty small ones.
ROUNDING_BYTES = 40 << 10

Layer = Callable[[], nn.Module]
Rerun = Callable[[nn.Module, Tensor], Tensor]


# -- ops that save a parameter ----------------------------------------------------------------------------------------


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Addmm(nn.Module):
    """A layer whose weight is not transposed, as GPT-2 of transformers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(160, 160) * 0.05), nn.Parameter(torch.zeros(160))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.view(-1, CHANNELS, SIDE, SIDE))
        return out.flatten(1)


class Tied(nn.Module):
    """An embedding whose weight is multiplied with, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 64)

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.arange(len(x), device=x.device)
        scores = F.linear(x, self.words.weight).softmax(-1)
        looked_up: Tensor = self.words(chosen)
        return looked_up + scores @ self.words.weight


OPS: dict[str, tuple[Layer, int]] = {
    "norm": (lambda: nn.LayerNorm(WIDTH), WIDTH),
    "rms": (lambda: nn.RMSNorm(WIDTH), WIDTH),
    "scale": (Scale, WIDTH),
    "conv": (Conv, CHANNELS * SIDE * SIDE),
    "addmm": (Addmm, 160),
    "embedding": (Tied, 64),
}


# -- who runs modules in backward -------------------------------------------------------------------------------------


class Again(torch.autograd.Function):
    """Keeps a module's input and runs it again in backward, as Unsloth's Function does."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            out: Tensor = module(x)
        ctx.save_for_backward(x)
        ctx.module = module
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.module(x)
        torch.autograd.backward(out, gradient)
        return None, x.grad


class AgainByHand(Again):
    """The same, with the input on the context, where autograd does not see it, as DeepSpeed's Function has it."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor) -> Tensor:
        ctx.module, ctx.x = module, x.detach()
        with torch.no_grad():
            out: Tensor = module(x)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            out = ctx.module(x)
        torch.autograd.backward(out, gradient)
        return None, x.grad


def selectively(module: nn.Module, x: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default])
    out: Tensor = checkpoint(module, x, use_reentrant=False, context_fn=contexts)
    return out


RERUNS: dict[str, Rerun] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "selective": selectively,
    "function": Again.apply,
    "function by hand": AgainByHand.apply,
}


# -- the model ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """An op that saves its parameter, with a trained adapter beside it."""

    def __init__(self, op: str, *, is_trained: bool) -> None:
        super().__init__()
        make, width = OPS[op]
        self.op = make().requires_grad_(is_trained)
        self.down, self.up = nn.Linear(width, NARROW), nn.Linear(NARROW, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * torch.sin(x)  # autograd saves before the first parameter is read
        out: Tensor = self.op(x) + self.up(torch.tanh(self.down(x)))
        return x + torch.tanh(out)


class Net(nn.Module):
    def __init__(self, op: str, rerun: str, *, is_trained: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(op, is_trained=is_trained) for _ in range(LAYERS))
        self.rerun = RERUNS[rerun]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.rerun(block, x)
        return x


def cases() -> list[Any]:
    """Returns every pair of factors; what brings no new op, and no new way to run it, is long."""
    seen: set[Any] = set()
    chosen = []
    budgets = [(0, "50%"), (0, "min"), (64 << 10, "min")]
    for op, rerun, is_trained, (min_bytes, share) in pairwise(list(OPS), list(RERUNS), [True, False], budgets):
        is_new = op not in seen or rerun not in seen
        seen.update((op, rerun))
        name = f"{op}-{rerun}-{'trained' if is_trained else 'frozen'}-{min_bytes}-{share}"
        marks = [] if is_new else [pytest.mark.long]
        chosen.append(pytest.param(op, rerun, is_trained, min_bytes, share, id=name, marks=marks))
    return chosen


@pytest.mark.parametrize(("op", "rerun", "is_trained", "min_bytes", "share"), cases())
def test_what_runs_in_backward_is_packed_as_in_forward(
    op: str, rerun: str, is_trained: bool, min_bytes: int, share: str, tmp_path: Path
) -> None:
    width = OPS[op][1]
    build = partial(Net, op, rerun, is_trained=is_trained)
    peaks: list[int] = []

    def step(trainer: Trainer) -> None:
        torch.accelerator.synchronize(trainer.device)
        torch.accelerator.reset_peak_memory_stats(trainer.device)
        trainer.loss().backward()
        trainer.optimizer.step()
        torch.accelerator.synchronize(trainer.device)
        peaks.append(torch.accelerator.max_memory_allocated(trainer.device))  # before anybody looks at values
        trainer.optimizer.zero_grad()

    workload = Workload(op, build, lambda: (torch.randn(ROWS, width).requires_grad_(),), step=step, steps=STEPS)
    plain = run_plain(workload, target.device())
    config = config_for(HOST, tmp_path, policy="auto", device=share)
    config["plan"] |= {"min_bytes": min_bytes, "background": False}
    wrapped, allowed_bytes = run_wrapped(workload, config)
    assert_equal(plain, wrapped)
    small = (p.numel() * p.element_size() for p in build().parameters() if p.requires_grad)
    unmanaged_bytes = 2 * sum(size_bytes for size_bytes in small if size_bytes < min_bytes)  # AdamW's state of these
    assert max(peaks[-2:]) <= allowed_bytes + ROUNDING_BYTES + unmanaged_bytes


def run_wrapped(workload: Workload, config: dict[str, Any]) -> tuple[Outcome, int]:
    """Returns what the workload computed, and its budget in planned steps above what was on the device before."""
    backend = target.backend()
    gc.collect()
    base_bytes = torch.accelerator.memory_allocated(backend.device)
    trainer = Trainer(workload, backend.device)
    tieroff.wrap(trainer.model, trainer.optimizer, config, backend=backend)
    engine = tieroff.engine(trainer.model)
    for index in range(STEPS):
        trainer.run(index)
        stats = engine.stats()
        if index >= STEPS - 2:
            assert (stats.phase, stats.fallbacks) == ("planned", 0)
            assert stats.peak_device_bytes <= engine.plan.budget_bytes[Tier.DEVICE]
    budget_bytes = engine.plan.budget_bytes[Tier.DEVICE]
    tieroff.unwrap(trainer.model)
    return trainer.finish(), base_bytes + budget_bytes
