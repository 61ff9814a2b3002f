"""Llama-3-8B as it was measured on an H100 within GPU memory budgets, as models for `tieroff plan --model`.

    tieroff plan --model llama_steps:step_64k --machine configs/machines/h100_80gb.toml --device-budget 8.8GiB

Weights, gradients, optimizer state and activations in bf16, AdamW in one kernel, layers recomputed in backward, the loss over
128,256 words in chunks whose logits are recomputed too. A step is several rounds whose gradients add up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from tieroff import DryModel

WORDS = 128_256
_CHUNK_TOKENS = 1024


class LossInChunks(torch.nn.Module):
    """A language model whose forward returns its loss; logits of a chunk of tokens are there at a time."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.body, self.head = model.model, model.lm_head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the losses of all tokens, (batch, sequence) of them."""
        hidden = self.body(tokens).last_hidden_state.flatten(0, 1)
        total = torch.zeros((), dtype=torch.float32, device=tokens.device)
        for part, words in zip(hidden.split(_CHUNK_TOKENS), tokens.flatten().split(_CHUNK_TOKENS), strict=True):
            total = total + checkpoint(self._loss, part, words, use_reentrant=False)
        return total

    def _loss(self, hidden: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(hidden).float(), words, reduction="sum")


def llama(
    sequence: int = 1024, round_tokens: int = 16 << 10, step_tokens: int = 64 << 10, *, is_recomputed: bool = True
) -> Callable[[], DryModel]:
    """Returns a factory of Llama-3-8B.

    Args:
        sequence: tokens of a sequence.
        round_tokens: tokens of one forward and backward.
        step_tokens: tokens of one update.
        is_recomputed: layers keep their inputs alone, and run again in backward.
    """

    def factory() -> DryModel:
        config = LlamaConfig(
            vocab_size=WORDS, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, max_position_embeddings=8192, use_cache=False, attn_implementation="sdpa",
        )  # fmt: skip
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
        if is_recomputed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        tokens = torch.zeros((round_tokens // sequence, sequence), dtype=torch.long)
        return DryModel(
            LossInChunks(model),
            (tokens,),
            loss=lambda total: total,
            optimizer=lambda params: torch.optim.AdamW(params, fused=True),
            rounds=step_tokens // round_tokens,
        )

    return factory


step_64k = llama()
step_64k_at_4096 = llama(sequence=4096)
step_16k = llama(step_tokens=16 << 10)
