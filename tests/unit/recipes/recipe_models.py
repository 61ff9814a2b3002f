"""Small configurations of models that transformers carries, and the real step of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

import tieroff
from tieroff.core.machine import Machine
from tieroff.core.trace import Trace
from tieroff.tracing.recipes.recipe import Settings, example_inputs, trained_by_adamw

MIN_BYTES = 1024
MACHINE = Machine(
    "paper",
    fp32_flops_per_s=1e12,
    bf16_flops_per_s=8e12,
    device_memory_bytes_per_s=10**11,
    d2h_bytes_per_s=10**9,
    h2d_bytes_per_s=10**9,
    host_bytes=10**12,
)
_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_EXPERTS = {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_GPT2: dict[str, Any] = {"vocab_size": 512, "n_embd": 128, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_SIZES),
    "gpt2": lambda: transformers.GPT2Config(n_positions=512, **_GPT2),
    "mixtral": lambda: transformers.MixtralConfig(num_local_experts=4, **_SIZES),
    "mistral": lambda: transformers.MistralConfig(sliding_window=32, **_SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**_SIZES),
    "qwen3": lambda: transformers.Qwen3Config(head_dim=32, **_SIZES),
    "gemma2": lambda: transformers.Gemma2Config(head_dim=32, **_SIZES),
    "phi": lambda: transformers.PhiConfig(**_SIZES),
    "olmo2": lambda: transformers.Olmo2Config(**_SIZES),
    "bert": lambda: transformers.BertConfig(architectures=["BertForMaskedLM"], **_SIZES),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_EXPERTS, **_SIZES),
}


def wide() -> Any:
    """Returns a configuration whose weights are large enough to move under the command's settings."""
    return transformers.LlamaConfig(**{**_SIZES, "hidden_size": 512, "intermediate_size": 1024})


def real_trace(model: nn.Module, settings: Settings) -> Trace:
    """Returns the trace of a wrapped model's first step, as a loop of a user gives it."""
    optimizer = trained_by_adamw(model.parameters())
    config = {"device": "cpu", "budget": {"device": "90%", "host": "64MiB"}, "plan": {"min_bytes": MIN_BYTES}}
    tieroff.wrap(model, optimizer, config)
    inputs = example_inputs(settings)
    try:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=settings.autocast is not None):
                loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return tieroff.engine(model).trace
    finally:
        tieroff.unwrap(model)


def cleared(model: nn.Module) -> nn.Module:
    """Returns the model with zeros in what was only allocated: packed weights and what describes them."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_floating_point():
                tensor.zero_()
    return model
