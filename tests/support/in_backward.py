"""A model and a loop whose optimizer is stepped in backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

Use = Callable[[nn.Module], object]  # what a loop does between backward and update
WIDTH = 160
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
}


class Tied(nn.Module):
    """An embedding that is the head too, and layers with and without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH, bias=False))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x)
        for block in self.blocks:
            h = h + block(h)
        logits: torch.Tensor = self.head(h)
        return logits


def config(folder: Path, budget: str = "50%") -> dict[str, Any]:
    return {
        "device": "cpu",
        "budget": {"device": budget, "host": "256KiB", "nvme": "64MiB"},
        "nvme": {"dirs": [str(folder)], "staging": "64KiB"},
        "plan": {"min_bytes": "4KiB", "update_in_backward": True},
    }


def make(optimizer: str = "AdamW") -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tied()
    return model, OPTIMIZERS[optimizer](model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, use: Use | None = None) -> list[str]:
    losses = []
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(steps):
        x = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten())
        loss.backward()
        if use is not None:
            use(model)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()).hex())
    return losses


def clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def read(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.norm().item()


def backward_again(model: nn.Module) -> None:
    model(torch.zeros(2, 32, dtype=torch.long)).sum().backward()
