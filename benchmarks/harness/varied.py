"""Models whose steps never repeat, and how they are trained."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tieroff


class Experts(nn.Module):
    """Layers that each send the batch to one of their experts, drawn again in every step."""

    def __init__(self, width: int, layers: int, experts: int = 4) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.experts = nn.ModuleList(nn.ModuleList(_mlp(width) for _ in range(experts)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for mixer, experts in zip(self.mixers, self.experts, strict=True):
            assert isinstance(experts, nn.ModuleList)
            x = x + torch.tanh(mixer(x))
            x = x + experts[int(torch.randint(len(experts), ()))](x)
        return x


class Plain(nn.Module):
    """Layers in a row, each left out of a step with a probability of `skips`."""

    def __init__(self, width: int, layers: int, skips: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_mlp(width) for _ in range(2 * layers))
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.skips or torch.rand(()) > self.skips:
                x = x + layer(x)
        return x


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


MODELS: dict[str, tuple[Callable[[int, int], nn.Module], bool]] = {  # and whether lengths vary
    "experts": (Experts, False),
    "random depth": (functools.partial(Plain, skips=1 / 3), False),
    "random lengths": (Plain, True),
}


def train(
    name: str, policy: str | None, folder: Path, *, steps: int, width: int, layers: int, rows: int, budget: str, backend: Any
) -> tuple[list[float], list[tieroff.Stats]]:
    """Trains one of `MODELS`; returns its losses and, of a wrapped one, the figures of every step.

    Args:
        policy: None trains plain.
        rows: of the largest batch; where lengths vary, a step has between half and all of them.
    """
    make, varies = MODELS[name]
    torch.manual_seed(0)
    model = make(width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if policy is not None:
        config = {
            "device": "cpu",
            "budget": {"device": budget, "nvme": "1GiB"},
            "nvme": {"dirs": [str(folder)]},
            "plan": {"policy": policy, "min_bytes": "1KiB"},
        }
        tieroff.wrap(model, optimizer, config=config, backend=backend)
    losses, figures = [], []
    for step in range(steps):
        torch.manual_seed(step)
        count = rows - int(torch.randint(rows // 2, ())) if varies and step else rows
        loss = model(torch.randn(count, width)).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if policy is not None:
            figures.append(tieroff.engine(model).stats())
    if policy is not None:
        tieroff.unwrap(model)
    return losses, figures
