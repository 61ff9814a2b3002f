"""Models that are split over devices in tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tieroff.core.machine import Machine

MACHINE = Machine(
    name="test",
    device_bytes=8_000_000_000,
    host_bytes=64_000_000_000,
    d2h_bytes_per_s=8_000_000_000,
    h2d_bytes_per_s=8_000_000_000,
    fp32_flops_per_s=15e12,
    device_memory_bytes_per_s=800_000_000_000,
    peer_bytes_per_s=25_000_000_000,
)


class Block(nn.Module):
    """A layer of a GPT with the parameters of each projection apart."""

    def __init__(self, width: int, heads: int, is_fused: bool = True) -> None:
        super().__init__()
        self.is_fused = is_fused
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.value, self.out = (nn.Linear(width, width) for _ in range(3))
        # Attention does not depend on a bias of the keys: its gradient is rounding alone, which AdamW makes large.
        self.key = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(b, t, self.heads, d // self.heads).transpose(1, 2) for f in (self.query, self.key, self.value))
        if self.is_fused:
            a = F.scaled_dot_product_attention(q, k, v)
        else:  # DTensor runs no fused attention on the CPU
            a = torch.softmax(q @ k.transpose(-1, -2) * (d // self.heads) ** -0.5, -1) @ v
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        result: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class Gpt(nn.Module):
    """Layers and a head."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2, words: int = 128, is_fused: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, is_fused) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(self.norm(x))
        return y


class Mlp(nn.Module):
    """Two layers."""

    def __init__(self, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return y


def layer_of_width_1024() -> tuple[nn.Module, tuple[Any, ...]]:
    """The layer in which Megatron's split is known to be good: batch 8, 64 words."""
    return Block(1024, 16), (torch.randn(8, 64, 1024),)


def small_gpt() -> tuple[nn.Module, tuple[Any, ...]]:
    """Two layers of width 64, batch 8, 16 words."""
    return Gpt(), (torch.randn(8, 16, 64),)


def plain_gpt() -> tuple[nn.Module, tuple[Any, ...]]:
    """One layer of width 32 whose attention is made of products, batch 8, 8 words."""
    return Gpt(32, 4, 1, 64, is_fused=False), (torch.randn(8, 8, 32),)


def small_mlp() -> tuple[nn.Module, tuple[Any, ...]]:
    """Width 32, batch 16."""
    return Mlp(), (torch.randn(16, 32),)
