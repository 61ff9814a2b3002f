"""Twenty kinds of models of `transformers`, random and small, on the device with everything moved: equal bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: nothing is downloaded

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForMaskedLM

import tieroff
from tests.accelerator import target
from tests.support.parity import HOST, config_for, differing, state_of

STEPS, BATCH, LENGTH, WORDS, SIZE = 4, 2, 12, 64, 32
USUAL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = USUAL | {"vocab_size": WORDS, "max_position_embeddings": 2 * LENGTH}
# A special token beyond the vocabulary is an index out of range.
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = TEXT | {"num_key_value_heads": 2}

CAUSAL: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": WORDS, "n_positions": 2 * LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": TEXT,
    "gptj": {"vocab_size": WORDS, "n_positions": 2 * LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "opt": TEXT | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "llama": GROUPED,
    "mistral": GROUPED,
    "qwen2": GROUPED,
    "gemma": GROUPED | {"head_dim": 8},
    "phi": TEXT,
    "falcon": TEXT,
    "olmo2": GROUPED,
}
MASKED: dict[str, dict[str, Any]] = {
    "bert": TEXT,
    "roberta": TEXT,
    "distilbert": {
        "vocab_size": WORDS,
        "max_position_embeddings": 2 * LENGTH,
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 64,
    },
    "electra": TEXT | {"embedding_size": 32},
    "albert": TEXT | {"embedding_size": 32},
}
PICTURES: dict[str, dict[str, Any]] = {
    "vit": USUAL | {"image_size": SIZE, "patch_size": 8},
    "convnext": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
    "swin": {"image_size": SIZE, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
}
BY_DEFAULT = ("llama", "swin")


def subjects() -> list[Any]:
    """Returns (class that builds it, kind of model, its sizes), all but two marked as long."""
    return [
        pytest.param(maker, kind, sizes, id=kind, marks=[] if kind in BY_DEFAULT else [pytest.mark.long])
        for maker, kinds in (
            (AutoModelForCausalLM, CAUSAL),
            (AutoModelForMaskedLM, MASKED),
            (AutoModelForImageClassification, PICTURES),
        )
        for kind, sizes in kinds.items()
    ]


def batch(maker: Any) -> dict[str, Tensor]:
    device = target.device()
    if maker is AutoModelForImageClassification:
        return {"pixel_values": torch.randn(BATCH, 3, SIZE, SIZE).to(device), "labels": torch.tensor([0, 1]).to(device)}
    ids = torch.randint(3, WORDS, (BATCH, LENGTH)).to(device)
    return {"input_ids": ids, "labels": ids.clone()}


def train(maker: Any, kind: str, sizes: dict[str, Any], config: dict[str, Any] | None) -> tuple[list[float], Any, Any]:
    """Returns the losses, the parameters and the optimizer's state after some steps; moved by `config`."""
    torch.manual_seed(0)
    model: nn.Module = maker.from_config(AutoConfig.for_model(kind, **sizes | TOKENS)).train().to(target.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if config is not None:
        tieroff.wrap(model, optimizer, config)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(1 + step)
        loss = model(**batch(maker)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if config is not None:
        stats = tieroff.engine(model).stats()
        assert (stats.phase, stats.fallbacks) == ("planned", 0)
        assert stats.moved_bytes["d2h"] > 0
        tieroff.unwrap(model)
    return losses, model.state_dict(), state_of(optimizer)


@pytest.mark.parametrize(("maker", "kind", "sizes"), subjects())
def test_model_computes_the_same(maker: Any, kind: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    plain_losses, plain_values, plain_state = train(maker, kind, sizes, None)
    losses, values, state = train(maker, kind, sizes, config_for(HOST, tmp_path, policy="floor", device="100%"))
    assert losses == plain_losses
    assert len(set(losses)) == STEPS
    assert differing(plain_values, values) == []
    assert differing(plain_state, state) == []
