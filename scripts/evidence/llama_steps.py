"""Llama-3-8B as it was measured on an H100 within GPU memory budgets, as models for `tieroff plan --model`.

    cd scripts; tieroff plan --model llama_steps:step_64k --machine ../configs/machines/h100_80gb.toml --device-budget 8.8GiB

Weights, gradients, optimizer state and activations in bf16, AdamW in one kernel, the loss over 128,256 words in chunks whose
logits are made again in backward. A step is several rounds whose gradients add up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tieroff import DryModel

WORDS = 128_256
WIDTH, LAYERS, HEADS, SHARED_HEADS, INNER = 4096, 32, 32, 8, 14_336
_CHUNK_TOKENS = 1024
_HEAD = WIDTH // HEADS


class Layer(nn.Module):
    """Attention whose keys and values are shared by four heads each, and a gated perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.key, self.value = (nn.Linear(WIDTH, SHARED_HEADS * _HEAD, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output; x is (batch, sequence, width), angles (2, sequence, head)."""
        batch, sequence, _ = x.shape
        y = self.norm(x)
        heads = [project(y).view(batch, sequence, -1, _HEAD).transpose(1, 2) for project in (self.query, self.key, self.value)]
        query, key = (turned(part, angles) for part in heads[:2])
        y = F.scaled_dot_product_attention(query, key, heads[2], is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, sequence, WIDTH))
        y = self.inner_norm(x)
        total: torch.Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return total


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Returns x, (batch, heads, sequence, head), with its position in its angles."""
    half = x.shape[-1] // 2
    return x * angles[0] + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * angles[1]


class Llama(nn.Module):
    """Returns the loss of the next words; only so many first layers keep nothing but their input for backward."""

    def __init__(self, sequence: int, recomputed_layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("angles", torch.zeros(2, sequence, _HEAD))
        self._recomputed_layers = recomputed_layers

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the losses of all tokens, (batch, sequence) of them."""
        x = self.words(tokens)
        for number, layer in enumerate(self.layers):
            is_recomputed = number < self._recomputed_layers
            x = checkpoint(layer, x, self.angles, use_reentrant=False) if is_recomputed else layer(x, self.angles)
        hidden = self.norm(x).flatten(0, 1)
        total = torch.zeros((), device=tokens.device)
        for part, words in zip(hidden.split(_CHUNK_TOKENS), tokens.flatten().split(_CHUNK_TOKENS), strict=True):
            total = total + checkpoint(self._loss, part, words, use_reentrant=False)
        return total

    def _loss(self, hidden: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(hidden), words, reduction="sum").float()


def llama(
    sequence: int = 1024, round_tokens: int = 16 << 10, step_tokens: int = 64 << 10, recomputed_layers: int = LAYERS
) -> Callable[[], DryModel]:
    """Returns a factory of Llama-3-8B.

    Args:
        sequence: tokens of a sequence.
        round_tokens: tokens of one forward and backward.
        step_tokens: tokens of one update.
        recomputed_layers: how many layers run again in backward, counted from the first.
    """

    def factory() -> DryModel:
        model = Llama(sequence, recomputed_layers).to(torch.bfloat16)
        tokens = torch.zeros((round_tokens // sequence, sequence), dtype=torch.long)
        return DryModel(
            model,
            (tokens,),
            loss=lambda total: total,
            optimizer=lambda params: torch.optim.AdamW(params, fused=True),
            rounds=step_tokens // round_tokens,
            update_in_backward=True,
        )

    return factory


step_64k = llama()
step_64k_at_4096 = llama(sequence=4096)
step_16k = llama(step_tokens=16 << 10)
step_16k_kept = llama(step_tokens=16 << 10, recomputed_layers=0)
