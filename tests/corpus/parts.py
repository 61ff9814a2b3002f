"""Small models that the programs of the corpus share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpus.run import Program


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.n1, self.n2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.o = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def attend(self, x: torch.Tensor) -> Any:
        b, t, d = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(d, -1))
        scores = (q @ k.transpose(-1, -2) / d**0.5).softmax(-1)
        return self.o((scores @ v).transpose(1, 2).reshape(b, t, d))

    def mlp(self, x: torch.Tensor) -> Any:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.attend(self.n1(x))
        return x + self.mlp(self.n2(x))


class LM(nn.Module):
    """A tiny language model."""

    def __init__(self, width: int = 32, layers: int = 3, vocabulary: int = 48, *, is_tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def trunk(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.trunk(ids))


class Mlp(nn.Module):
    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class LoRA(nn.Module):
    """A frozen layer with an adapter."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        self.is_on = True

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + self.b(self.a(x)) if self.is_on else self.base(x)


def with_adapters(model: nn.Module) -> list[LoRA]:
    """Freezes a model and puts adapters on its linear layers of blocks."""
    model.requires_grad_(False)
    made = []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name in ("qkv", "up", "down"):
                made.append(LoRA(child))
                setattr(module, name, made[-1])
    return made


def cross_entropy(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)


def update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def trained(p: Program, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 9) -> None:
    """Wraps a model and trains it on rows of 32."""
    p.wrap(model, optimizer)
    for index in range(steps):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters(), optimizer.state_dict()["state"])
