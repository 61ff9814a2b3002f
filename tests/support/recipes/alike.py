"""Programs whose layers are all alike, in any number: what they need at once does not depend on how many there are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS = 64, 96  # activations as large as the weights: no bucket of the optimizer needs most

Pass = Callable[[nn.Module, Tensor], Tensor]


class Layer(nn.Module):
    """Two projections, to the first of which an adapter of low rank adds."""

    def __init__(self, *, is_frozen: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, 2 * WIDTH, bias=False)
        self.up.requires_grad_(not is_frozen)
        self.down.requires_grad_(not is_frozen)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.down(F.silu(self.up(x) + self.b(self.a(x)))))


def plainly(layer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = layer(x)
    return out


def not_reentrant(layer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(layer, x, use_reentrant=False)
    return out


def reentrant(layer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(layer, x, use_reentrant=True)
    return out


class Stack(nn.Module):
    """Layers one after the other, each run in the same way."""

    def __init__(self, count: int, run: Pass, *, is_frozen: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(is_frozen=is_frozen) for _ in range(count))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.run(layer, x)
        return x


@dataclass(frozen=True)
class Recipe:
    """One way to train such layers.

    Attributes:
        run: runs a layer.
        is_frozen: only the adapters are trained.
        passes: when a pass without gradients runs in each step.
        without: gives its context.
    """

    run: Pass = plainly
    is_frozen: bool = False
    passes: frozenset[str] = frozenset()
    without: Callable[[], AbstractContextManager[object]] = torch.no_grad

    def build(self, count: int) -> nn.Module:
        """Returns a model of so many layers."""
        torch.manual_seed(3)
        return Stack(count, self.run, is_frozen=self.is_frozen)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, index: int, device: torch.device) -> Tensor:
        """Runs step number `index`; returns its loss, and what passes without gradients computed."""
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index)).to(device)
        seen = torch.zeros((), device=device)

        def run_pass(when: str) -> None:
            if when in self.passes:
                with self.without():
                    seen.add_(model(x).square().mean())

        run_pass("before")
        y = model(x.clone().requires_grad_())
        run_pass("between")
        loss = (y - 1).square().mean() + 0.1 * seen.clone()
        loss.backward()
        run_pass("after")
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack([loss.detach(), seen]).cpu()


RECIPES = {
    "plain": Recipe(),
    "not reentrant": Recipe(not_reentrant),
    "reentrant": Recipe(reentrant),
    "adapters": Recipe(is_frozen=True),
    "adapters, not reentrant": Recipe(not_reentrant, is_frozen=True),
    "adapters, reentrant": Recipe(reentrant, is_frozen=True),
    "pass before": Recipe(passes=frozenset({"before"})),
    "pass between": Recipe(passes=frozenset({"between"})),
    "pass between, inference": Recipe(passes=frozenset({"between"}), without=torch.inference_mode),
    "pass after": Recipe(passes=frozenset({"after"})),
    "pass after, inference": Recipe(passes=frozenset({"after"}), without=torch.inference_mode),
    "adapters, passes, not reentrant": Recipe(not_reentrant, is_frozen=True, passes=frozenset({"before", "between"})),
}
