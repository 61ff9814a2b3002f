"""Llama-3-8B as it was measured on an H100 within GPU memory budgets, as models for `tieroff plan --model`.

    cd scripts/evidence
    tieroff plan --model llama_steps:step_64k --machine ../../configs/machines/h100_80gb.toml --device-budget 8.8GiB

Weights, gradients, optimizer state and activations in bf16, AdamW in one kernel, the loss over 128,256 words in chunks whose
logits are made again in backward. A step is several rounds whose gradients add up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tieroff import DryModel

WORDS = 128_256
_CHUNK_TOKENS = 1024
_TILE_TOKENS = 8192


@dataclass(frozen=True)
class Sizes:
    """What the models of the family differ in; each key and value is shared by `heads / shared_heads` queries."""

    width: int
    layers: int
    heads: int
    shared_heads: int
    inner: int

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.width // self.heads


SIZES_8B = Sizes(4096, 32, 32, 8, 14_336)
SIZES_405B = Sizes(16_384, 126, 128, 8, 53_248)


class Layer(nn.Module):
    """Attention whose keys and values are shared by several queries each, and a gated perceptron.

    Either keeps for backward what products and attention took in, from which norms and silu are made again, or, with
    `is_recomputed`, only the inputs of its two halves. Products whose outputs backward does not need never run again.
    """

    def __init__(self, sizes: Sizes, is_recomputed: bool) -> None:
        super().__init__()
        width, inner = sizes.width, sizes.inner
        self.norm, self.inner_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, sizes.shared_heads * sizes.head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self._head, self._is_recomputed = sizes.head, is_recomputed

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output; x is (batch, sequence, width), angles (2, sequence, head)."""
        attend = partial(checkpoint, self._attend, use_reentrant=False) if self._is_recomputed else self._attend
        x = attend(x, angles)
        weights = self.inner_norm.weight, self.gate.weight, self.up.weight, self.down.weight
        total: torch.Tensor = x + _Perceptron.apply(x, *weights, self._is_recomputed)  # type: ignore[no-untyped-call]
        return total

    def _attend(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        batch, sequence, _ = x.shape
        weights = self.norm.weight, self.query.weight, self.key.weight, self.value.weight
        parts: tuple[torch.Tensor, ...] = _NormedProducts.apply(x, *weights)  # type: ignore[no-untyped-call]
        heads = [part.view(batch, sequence, -1, self._head).transpose(1, 2) for part in parts]
        query, key = (turned(part, angles) for part in heads[:2])
        y = F.scaled_dot_product_attention(query, key, heads[2], is_causal=True, enable_gqa=True)
        total: torch.Tensor = x + self.out(y.transpose(1, 2).flatten(2))
        return total


class _NormedProducts(torch.autograd.Function):
    """The products of a normalised tensor with several matrices; keeps what came in, and normalises it again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns one product per matrix."""
        ctx.save_for_backward(x, scale, *weights)
        y = F.rms_norm(x, scale.shape, scale)
        return tuple(F.linear(y, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the gradients of x, the norm's scale and the matrices."""
        x, scale, *weights = ctx.saved_tensors
        return _back_through_norm(x, scale, weights, grads)


class _Perceptron(torch.autograd.Function):
    """down(silu(gate(y)) * up(y)) of a normalised y, tile by tile of tokens: what lies between is never there as a whole.

    Keeps what came in and, unless they are made again, gate(y) and up(y).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Returns the perceptron's output; `rest` is the norm's scale, three matrices, and whether products run again."""
        scale, gate_weight, up_weight, down_weight, is_recomputed = rest
        y, out = F.rms_norm(x, scale.shape, scale).flatten(0, -2), torch.empty_like(x)
        kept = [] if is_recomputed else [y.new_empty(len(y), len(gate_weight)) for _ in range(2)]
        for tile in _tiles(len(y)):
            gate, up = _gate_and_up(y[tile], gate_weight, up_weight, [part[tile] for part in kept])
            torch.mm(F.silu(gate).mul_(up), down_weight.T, out=out.flatten(0, -2)[tile])
            del gate, up
        ctx.save_for_backward(x, scale, gate_weight, up_weight, down_weight, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients of x, the norm's scale and the matrices."""
        x, scale, *weights = ctx.saved_tensors
        (gate_weight, up_weight, down_weight), kept = weights[:3], weights[3:]
        with torch.enable_grad():
            leaf, leaf_scale = x.detach().requires_grad_(), scale.detach().requires_grad_()
            normed = F.rms_norm(leaf, scale.shape, leaf_scale)
        y, grad, y_grad = normed.detach().flatten(0, -2), grad.flatten(0, -2), torch.empty_like(x).flatten(0, -2)
        gate_sum, up_sum, down_sum = (torch.zeros_like(weight) for weight in weights[:3])
        for tile in _tiles(len(y)):
            gate, up = [part[tile] for part in kept] or _gate_and_up(y[tile], gate_weight, up_weight, [])
            swished = F.silu(gate)
            down_sum.addmm_(grad[tile].T, swished * up)
            inner_grad = grad[tile] @ down_weight
            up_grad = swished.mul_(inner_grad)
            gate_grad = torch.ops.aten.silu_backward(inner_grad.mul_(up), gate)
            del inner_grad, gate, up
            gate_sum.addmm_(gate_grad.T, y[tile])
            up_sum.addmm_(up_grad.T, y[tile])
            torch.mm(gate_grad, gate_weight, out=y_grad[tile])
            y_grad[tile].addmm_(up_grad, up_weight)
            del swished, up_grad, gate_grad
        grads = torch.autograd.grad(normed, (leaf, leaf_scale), y_grad.view_as(x))
        return (*grads, gate_sum, up_sum, down_sum, None)


def _tiles(count: int) -> list[slice]:
    return [slice(start, start + _TILE_TOKENS) for start in range(0, count, _TILE_TOKENS)]


def _gate_and_up(
    y: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, into: list[torch.Tensor]
) -> list[torch.Tensor]:
    if not into:
        return [F.linear(y, weight) for weight in (gate_weight, up_weight)]
    for out, weight in zip(into, (gate_weight, up_weight), strict=True):
        torch.mm(y, weight.T, out=out)
    return into


def _back_through_norm(
    x: torch.Tensor, scale: torch.Tensor, weights: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Returns the gradients of x, the norm's scale and the matrices from those of the products with normalised x."""
    with torch.enable_grad():
        leaf, scale = x.detach().requires_grad_(), scale.detach().requires_grad_()
        y = F.rms_norm(leaf, scale.shape, scale)
    rows = y.detach().flatten(0, -2)
    weight_grads = [grad.flatten(0, -2).T @ rows for grad in grads]
    total = grads[0].flatten(0, -2) @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total = torch.addmm(total, grad.flatten(0, -2), weight)
    return (*torch.autograd.grad(y, (leaf, scale), total.view_as(x)), *weight_grads)


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Returns x, (batch, heads, sequence, head), with its position in its angles."""
    half = x.shape[-1] // 2
    return x * angles[0] + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * angles[1]


class Llama(nn.Module):
    """Returns the loss of the next words; only so many first layers keep nothing but their input for backward."""

    def __init__(self, sizes: Sizes, sequence: int, kept_layers: Collection[int]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes, number not in kept_layers) for number in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, WORDS, bias=False)
        self.register_buffer("angles", torch.zeros(2, sequence, sizes.head))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the losses of all tokens, (batch, sequence) of them."""
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        hidden = self.norm(x).flatten(0, 1)
        total = torch.zeros((), device=tokens.device)
        for part, words in zip(hidden.split(_CHUNK_TOKENS), tokens.flatten().split(_CHUNK_TOKENS), strict=True):
            total = total + checkpoint(self._loss, part, words, use_reentrant=False)
        return total

    def _loss(self, hidden: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(hidden), words, reduction="sum").float()


def evenly(count: int, first: int, last: int) -> frozenset[int]:
    """Returns so many layers from the first to the last, evenly spread: what they keep then queues up for the link least.

    A round begins and ends with other transfers, of gradients and of the output layer, so neither end is the best place.
    """
    return frozenset(first + (2 * i * (last - first) + count - 1) // (2 * (count - 1)) for i in range(count))


def llama(
    sequence: int = 1024,
    round_tokens: int = 32 << 10,
    step_tokens: int = 64 << 10,
    kept_layers: Collection[int] = (),
    sizes: Sizes = SIZES_8B,
) -> Callable[[], DryModel]:
    """Returns a factory of a model of the family.

    Args:
        sequence: tokens of a sequence.
        round_tokens: tokens of one forward and backward.
        step_tokens: tokens of one update.
        kept_layers: those that keep what backward needs; see `evenly`. The others run again.
        sizes: of the model.
    """

    def factory() -> DryModel:
        model = Llama(sizes, sequence, kept_layers).to(torch.bfloat16)
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


step_64k = llama(kept_layers=evenly(9, 1, 28))
step_64k_at_4096 = llama(sequence=4096, kept_layers=evenly(9, 1, 28))
step_320k = llama(step_tokens=320 << 10, kept_layers=evenly(9, 1, 28))
"""Ten rounds, about 10,000 ops: for the time that planning takes."""
step_405b = llama(sequence=4096, step_tokens=32 << 10, sizes=SIZES_405B)
