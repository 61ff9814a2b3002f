"""Unmodified models of `transformers`, random and small, at a quarter and half of what their step needs: equal bits."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: nothing is downloaded

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import tieroff
from tests.support.parity import NVME, config_for, differing, state_of
from tieroff.core.tensor import Tier
from tieroff.integrations.transformers import TieroffCallback
from tieroff.runtime.engine import Engine

pytestmark = pytest.mark.long

STEPS, BATCH, LENGTH, WORDS, SIZE = 5, 4, 32, 128, 32
WIDTHS: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """A model and its data.

    Attributes:
        build: makes the model; torch is seeded before.
        data: makes inputs and labels of a number of examples.
        least: the smallest budget that is tried, as a share of what the step needs with nothing moved.
    """

    build: Callable[[], nn.Module]
    data: Callable[[int], Batch]
    least: str = "25%"


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=64, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
    )


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, max_position_embeddings=LENGTH, **WIDTHS))


def bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **WIDTHS))


def vit() -> nn.Module:
    return ViTForImageClassification(ViTConfig(image_size=SIZE, patch_size=8, num_labels=10, **WIDTHS))


def resnet() -> nn.Module:
    return ResNetForImageClassification(
        ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[4, 4], layer_type="basic", num_labels=10)
    )


def words(count: int) -> Batch:
    ids = torch.randint(0, WORDS, (count, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


def pictures(count: int) -> Batch:
    return {"pixel_values": torch.randn(count, 3, SIZE, SIZE), "labels": torch.randint(0, 10, (count,))}


SUBJECTS = {
    "gpt2": Subject(gpt2, words),
    "llama": Subject(llama, words),
    "bert": Subject(bert, words),
    "vit": Subject(vit, pictures, least="35%"),  # of so small ones the update of one weight needs 30 %
    "resnet": Subject(resnet, pictures, least="35%"),
}
each_subject = pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
each_budget = pytest.mark.parametrize("is_least", [True, False], ids=["least", "half"])


@dataclass
class Outcome:
    """What a run computed."""

    losses: list[float]
    values: dict[str, Tensor]
    state: dict[str, Any]


def config_of(subject: Subject, is_least: bool, folder: Path) -> dict[str, Any]:
    share = subject.least if is_least else "50%"
    config = {"device": "cpu", **config_for(NVME, folder, policy="auto", device=share)}
    config["plan"]["min_bytes"] = 4096
    return config


def assert_moved_within_budget(engine: Engine) -> None:
    """Asserts that the last step followed its plan, moved bytes to the drive and back, and kept to the budget."""
    stats, plan = engine.stats(), engine.plan
    assert (stats.phase, stats.fallbacks) == ("planned", 0)
    assert stats.moved_bytes["nvme_write"] > 0
    assert stats.moved_bytes["nvme_read"] > 0
    assert 0 < stats.peak_device_bytes <= plan.budget_bytes[Tier.DEVICE]


def assert_equal(plain: Outcome, wrapped: Outcome) -> None:
    assert plain.losses == wrapped.losses
    assert len(set(plain.losses)) > 1
    assert differing(plain.values, wrapped.values) == []
    assert differing(plain.state, wrapped.state) == []


def run_loop(subject: Subject, config: dict[str, Any] | None) -> Outcome:
    torch.manual_seed(0)
    model = subject.build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    if config is not None:
        tieroff.wrap(model, optimizer, config)
    for step in range(STEPS):
        torch.manual_seed(1 + step)
        loss = model(**subject.data(BATCH)).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), norm.item()]
    if config is not None:
        assert_moved_within_budget(tieroff.engine(model))
        tieroff.unwrap(model)
    return Outcome(losses, model.state_dict(), state_of(optimizer))


@functools.cache
def plain_loop(subject: Subject) -> Outcome:
    return run_loop(subject, None)


@each_budget
@each_subject
def test_a_plain_loop_computes_the_same(subject: Subject, is_least: bool, tmp_path: Path) -> None:
    assert_equal(plain_loop(subject), run_loop(subject, config_of(subject, is_least, tmp_path)))


def run_trainer(subject: Subject, folder: Path, config: dict[str, Any] | None) -> Outcome:
    torch.manual_seed(0)
    model = subject.build()
    data = subject.data(STEPS * BATCH)
    callback = TieroffCallback(config)
    trainer = Trainer(
        model,
        TrainingArguments(
            str(folder / "out"),
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=[{name: rows[i] for name, rows in data.items()} for i in range(STEPS * BATCH)],
        callbacks=[callback] if config is not None else [],
    )
    trainer.train()
    losses = [entry[key] for entry in trainer.state.log_history[:-1] for key in ("loss", "grad_norm")]
    if config is not None:
        assert callback.engine is tieroff.engine(model)
        assert_moved_within_budget(callback.engine)
        tieroff.unwrap(model)
    return Outcome(losses, model.state_dict(), state_of(trainer.optimizer))


@functools.cache
def plain_trainer(subject: Subject) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return run_trainer(subject, Path(folder), None)


@each_budget
@each_subject
def test_its_trainer_computes_the_same(subject: Subject, is_least: bool, tmp_path: Path) -> None:
    config = config_of(subject, is_least, tmp_path)
    assert_equal(plain_trainer(subject), run_trainer(subject, tmp_path, config))
