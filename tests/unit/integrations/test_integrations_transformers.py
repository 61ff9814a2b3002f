"""Hugging Face `Trainer` with the callback: what it does besides steps, and setups that are refused."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: nothing is downloaded

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BatchEncoding,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import tieroff
from tests.support.oracles.bytes.device import DeviceBytes
from tests.support.parity import NVME, config_for, differing, state_of
from tieroff.core.tensor import TensorClass, Tier
from tieroff.errors import StateError
from tieroff.integrations.transformers import TieroffCallback
from tieroff.runtime.hooks.forward.inputs import signature_of, storages_in
from tieroff.runtime.hooks.forward.walk import Walk

# The name that is to go is the one that every version 5 knows; peft uses it too.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")]

WORDS, LENGTH = 64, 16


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def gpt2(width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=width, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )


def lora() -> nn.Module:
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
        )
    )
    return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def examples(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, WORDS, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer_of(
    model: nn.Module, folder: Path, callback: TrainerCallback | None, kind: type[Trainer] = Trainer, **arguments: Any
) -> Any:
    settings: dict[str, Any] = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **arguments,
    }
    return kind(
        model,
        TrainingArguments(str(folder / "out"), **settings),
        train_dataset=examples(24),
        eval_dataset=examples(4),
        callbacks=[callback] if callback is not None else [],
    )


def floor(folder: Path, min_bytes: int = 0) -> dict[str, Any]:
    """Returns a config under which everything leaves for the drive between any two uses."""
    config = {"device": "cpu", **config_for(NVME, folder)}
    config["plan"]["min_bytes"] = min_bytes
    return config


def seen(trainer: Trainer, model: nn.Module) -> dict[str, Any]:
    """Returns everything that a run computed: logged numbers, parameters, optimizer state."""
    timings = ("runtime", "per_second", "total_flos", "train_loss")  # or of what this process did, not of the whole run
    logged = {
        f"log {i} {key}": value
        for i, entry in enumerate(trainer.state.log_history)
        for key, value in entry.items()
        if not any(part in key for part in timings)
    }
    values = {name: value.clone() for name, value in model.state_dict().items()}
    return {**logged, **values, **state_of(trainer.optimizer)}


def check(build: Any, folder: Path, *, min_bytes: int = 0, phase: str = "planned", **arguments: Any) -> TieroffCallback:
    """Asserts that a trainer computes the same with the callback as without, with bytes moved, and returns the callback."""
    plain = build()
    without = trainer_of(plain, folder / "plain", None, **arguments)
    without.train()
    wrapped, callback = build(), TieroffCallback(floor(folder, min_bytes))
    trainer = trainer_of(wrapped, folder / "wrapped", callback, **arguments)
    trainer.train()
    assert differing(seen(without, plain), seen(trainer, wrapped)) == []
    assert callback.engine is not None
    stats = callback.engine.stats()
    assert stats.phase == phase
    assert stats.moved_bytes["nvme_read"] > 0
    tieroff.unwrap(wrapped)
    assert differing(seen(without, plain), seen(trainer, wrapped)) == []
    return callback


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
        {"gradient_checkpointing": True},
        {"bf16": True},
        {"label_smoothing_factor": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"optim": "adafactor"},
        {"neftune_noise_alpha": 1.0},
        {"eval_strategy": "steps", "eval_steps": 2},
    ],
    ids=["accumulation", "checkpointing", "bf16", "smoothing", "adafactor", "neftune", "evaluation"],
)
def test_a_trainer_computes_the_same_with(arguments: dict[str, Any], tmp_path: Path) -> None:
    check(gpt2, tmp_path, **arguments)


def test_a_checkpoint_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    plain = gpt2()
    without = trainer_of(plain, tmp_path / "plain", None)
    without.train()
    first = gpt2()
    trainer = trainer_of(first, tmp_path / "run", TieroffCallback(floor(tmp_path)), save_strategy="steps", save_steps=4)
    trainer.train()
    assert differing(seen(without, plain), seen(trainer, first)) == []
    tieroff.unwrap(first)
    for callback in (None, TieroffCallback(floor(tmp_path))):  # a checkpoint of a wrapped run is an ordinary one
        model = gpt2()
        resumed = trainer_of(model, tmp_path / "run", callback)
        resumed.train(resume_from_checkpoint=str(tmp_path / "run/out/checkpoint-4"))
        assert differing(seen(without, plain), seen(resumed, model)) == []
        if callback is not None:
            assert tieroff.engine(model).stats().moved_bytes["nvme_read"] > 0
            tieroff.unwrap(model)


def test_the_best_model_is_loaded_into_a_wrapped_one(tmp_path: Path) -> None:
    check(
        gpt2,
        tmp_path,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )


def test_a_model_stays_wrapped_after_training_and_trains_on(tmp_path: Path) -> None:
    outcomes = []
    for callback in (None, TieroffCallback(floor(tmp_path))):
        model = gpt2()
        trainer = trainer_of(model, tmp_path, callback)
        trainer.train()
        engine = callback.engine if callback is not None else None
        evaluated = trainer.evaluate()["eval_loss"]
        trainer.train()
        if callback is not None:
            assert callback.engine is engine, "a second run with the same optimizer keeps its engine"
        again = trainer_of(model, tmp_path, callback)  # makes another optimizer
        again.train()
        if callback is not None:
            assert callback.engine is not engine
            assert callback.engine is tieroff.engine(model)
            assert engine is not None and engine.is_closed
        trainer.save_model(str(tmp_path / "saved"))
        saved = GPT2LMHeadModel.from_pretrained(tmp_path / "saved").state_dict()
        outcomes.append({**seen(again, model), **{f"saved {k}": v for k, v in saved.items()}, "evaluated": evaluated})
    assert differing(*outcomes) == []


def test_frozen_weights_under_lora_are_never_written(tmp_path: Path) -> None:
    callback = check(lora, tmp_path, min_bytes=4096)
    engine = callback.engine
    assert engine is not None
    trace, plan = engine.trace, engine.plan
    frozen = {i for i, tensor in enumerate(trace.tensors) if tensor.kind is TensorClass.PARAMETER}
    assert {t.tensor for t in plan.transfers} >= frozen
    assert [t for t in plan.transfers if t.tensor in frozen and t.source is Tier.DEVICE] == []
    activations = sum(t.size_bytes for t in trace.tensors if t.kind is TensorClass.ACTIVATION)
    assert engine.stats().moved_bytes["nvme_write"] <= activations
    assert engine.stats().moved_bytes_by_class["parameter"] > 0


class Distilled(Trainer):
    """A trainer with a second model, which it calls and does not train, as TRL's have a reference."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        teacher = gpt2(width=128).requires_grad_(False)
        self.teacher = self.accelerator.prepare_model(teacher, evaluation_mode=True)

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        with torch.no_grad():
            wanted = self.teacher(**inputs).logits.softmax(-1)
        return -(wanted * model(**inputs).logits.log_softmax(-1)).sum(-1).mean()


class Peak(TrainerCallback):
    """Measures what a trainer takes of the device from its fifth step on."""

    def __init__(self) -> None:
        self.taken, self.step = DeviceBytes(torch.device("cpu")), 0

    def on_step_begin(self, *args: Any, **others: Any) -> None:
        self.step += 1
        if self.step == 5:
            self.taken.begin()


def test_a_model_that_the_trainer_only_calls_shares_the_budget(tmp_path: Path) -> None:
    """Left out, it lies on the device all the time, where a layer of it at a time is enough."""
    found, peaks = dict[str, dict[str, Any]](), dict[str, int]()
    for name in ("plain", "left out", "managed"):
        peak, model = Peak(), gpt2()
        trainer = trainer_of(model, tmp_path / name, peak, kind=Distilled, max_steps=8)
        if name != "plain":
            frozen = [trainer.teacher] if name == "managed" else []
            trainer.add_callback(TieroffCallback(floor(tmp_path), frozen=frozen))
        trainer.train()
        found[name], peaks[name] = seen(trainer, model), peak.taken.peak_bytes
        if name == "managed":
            assert tieroff.engine(trainer.teacher).optimizer is None and tieroff.engine(model).stats().phase == "planned"
    assert differing(found["plain"], found["left out"]) == [] and differing(found["plain"], found["managed"]) == []
    teacher_bytes = sum(p.nbytes for p in gpt2(width=128).parameters())
    assert peaks["managed"] < peaks["left out"] - teacher_bytes // 2


def test_the_forward_of_a_wrapped_model_shows_its_own_arguments(tmp_path: Path) -> None:
    model = gpt2()
    before = inspect.signature(model.forward)
    tieroff.wrap(model, None, floor(tmp_path))
    assert inspect.signature(model.forward) == before
    trainer = trainer_of(model, tmp_path, None)
    assert trainer.model_accepts_loss_kwargs
    trainer._set_signature_columns_if_needed()
    assert set(before.parameters) <= set(trainer._signature_columns)
    tieroff.unwrap(model)


RANKS = """
import sys
from pathlib import Path
import torch
from tests.unit.integrations import test_integrations_transformers as own

torch.set_num_threads(1)
own.check(own.gpt2, Path(sys.argv[1]), ddp_backend="gloo", gradient_accumulation_steps=2, ddp_find_unused_parameters=False)
torch.distributed.destroy_process_group()
print("right", flush=True)
"""


def test_two_ranks_of_a_trainer_compute_the_same(project: Path, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("right") == 2


def test_batches_of_a_tokenizer_tell_kinds_of_steps_apart() -> None:
    def batch(length: int) -> BatchEncoding:
        return BatchEncoding({"input_ids": torch.zeros(2, length), "more": {"mask": torch.ones(2)}})

    model, short = nn.Linear(1, 1), batch(3)
    trained = Walk(model).trained
    assert signature_of(model, (short,), {}, trained) == signature_of(model, (batch(3),), {}, trained)
    assert signature_of(model, (short,), {}, trained) != signature_of(model, (batch(4),), {}, trained)
    assert {storage._cdata for storage in storages_in(short)} == {
        t.untyped_storage()._cdata for t in (short["input_ids"], short["more"]["mask"])
    }


def test_a_model_compiled_in_place_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.compile(backend="eager")
    with pytest.raises(StateError, match="compiled in place"):
        tieroff.wrap(model, None, floor(tmp_path))
    assert type(model._parameters) is dict


def test_a_model_wrapped_before_keeps_its_engine(tmp_path: Path) -> None:
    model = tieroff.wrap(gpt2(), None, floor(tmp_path))
    engine = tieroff.engine(model)
    callback = TieroffCallback({"device": "cpu", "budget": {"device": "1%"}})  # would do for no step
    trainer_of(model, tmp_path, callback).train()
    assert callback.engine is engine
    assert engine.stats().phase == "planned"
    tieroff.unwrap(model)


@pytest.mark.parametrize(
    ("setting", "told"), [({"n_gpu": 2}, "one process uses 2 GPUs"), ({"torch_compile": True}, "torch_compile=False")]
)
def test_setups_that_cannot_work_are_refused(setting: dict[str, Any], told: str) -> None:
    arguments = types.SimpleNamespace(**{"n_gpu": 0, "torch_compile": False, "device": torch.device("cpu"), **setting})
    model = nn.Linear(2, 2)
    with pytest.raises(StateError, match=told):
        TieroffCallback().on_train_begin(arguments, None, None, model=model, optimizer=torch.optim.SGD(model.parameters()))
    assert type(model._parameters) is dict


@pytest.mark.parametrize("frozen", [nn.Sequential(nn.Linear(2, 2)), [None]], ids=["a model alone", "none, as under adapters"])
def test_frozen_takes_what_a_trainer_has(frozen: Any, tmp_path: Path) -> None:
    arguments = types.SimpleNamespace(n_gpu=0, torch_compile=False, device=torch.device("cpu"))
    model, callback = nn.Linear(2, 2), TieroffCallback(floor(tmp_path), frozen=frozen)
    callback.on_train_begin(arguments, None, None, model=model, optimizer=torch.optim.SGD(model.parameters()))
    assert callback.engine is tieroff.engine(model)
    for wrapped in [model, *([frozen] if isinstance(frozen, nn.Module) else [])]:
        tieroff.unwrap(wrapped)
