"""Training steps that others measured, and the same steps as the work of their kernels.

The layout is NeuSight's: GPU/MODEL-train-SEQUENCE-BATCH.json with the time of forward and backward in fp32, without update.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from tieroff.core.machine import Machine, machine_from_mapping
from tieroff.core.trace import Trace
from tieroff.tracing.clock.interval import refill_ns
from tieroff.tracing.clock.model import Clock, Constants
from tieroff.tracing.clock.work import Work, work_of
from tieroff.tracing.dry import DryModel, dry_trace
from tieroff.units import NS_PER_S

GPUS = Path(__file__).resolve().parent / "data" / "gpus.toml"
_STEP = re.compile(r"(?P<model>.+)-train-(?P<sequence>\d+)-(?P<batch>\d+)")
_EAGER: dict[str, Any] = {"attn_implementation": "eager"}
_EXTRA = ("file", "source", "link_bytes_per_s", "host_bytes")


def _gpt(layers: int, width: int, heads: int) -> Callable[[int], torch.nn.Module]:
    def make(sequence: int) -> torch.nn.Module:
        sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": sequence}
        model: torch.nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, **_EAGER))
        return model

    return make


def _bert(sequence: int) -> torch.nn.Module:
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    model: torch.nn.Module = BertForMaskedLM(BertConfig(**sizes, max_position_embeddings=sequence, **_EAGER))
    return model


def _opt(sequence: int) -> torch.nn.Module:
    sizes = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192}
    sizes |= {"word_embed_proj_dim": 2048, "max_position_embeddings": sequence}
    model: torch.nn.Module = OPTForCausalLM(OPTConfig(**sizes, use_cache=False, **_EAGER))
    return model


MODELS: dict[str, Callable[[int], torch.nn.Module]] = {
    "bert_large": _bert,
    "gpt2_large": _gpt(36, 1280, 20),
    "gpt3_xl": _gpt(24, 3072, 24),
    "gpt3_27": _gpt(32, 2560, 32),
    "opt_13": _opt,
}
"""Of each model, from the length of its sequences; what is not here (Switch: its routing depends on values) is left out."""


class _NoUpdate(torch.optim.SGD):
    """The steps were measured without an optimizer."""

    def step(self, closure: Any = None) -> Any:
        """Does nothing."""


class Collected:
    """Prices nothing, and keeps what work there was."""

    is_repeatable: ClassVar[bool] = False  # each call is to be counted

    def __init__(self) -> None:
        self.works: Counter[Work] = Counter()

    def duration_ns(self, func: Any, args: Any, kwargs: Any, out: Any) -> int:
        """Notes the work of a call; it takes no time."""
        work = work_of(func, args, kwargs, out)
        if work is not None:
            self.works[work] += 1
        return 0


@dataclass(frozen=True)
class Step:
    """One training step of a model as work.

    Attributes:
        name: MODEL-train-SEQUENCE-BATCH.
        works: each kernel's, and how often it runs.
        trace: the structure, without durations.
    """

    name: str
    works: Counter[Work]
    trace: Trace

    @property
    def model(self) -> str:
        """The name without sequence and batch."""
        return self.name.split("-train-")[0]


@dataclass(frozen=True)
class Measured:
    """A step's time in seconds on a GPU, as somebody measured it."""

    gpu: str
    step: str
    seconds: float


def measured_steps(folder: Path) -> list[Measured]:
    """Returns the steps that were measured, of the models that are known here."""
    found = []
    for path in sorted(folder.glob("*/*-train-*.json")):
        if path.stem.split("-train-")[0] in MODELS:
            seconds = json.loads(path.read_text())["e2e_latency"] / 1000
            found.append(Measured(path.parent.name, path.stem, seconds))
    return found


def step_of(name: str) -> Step:
    """Returns a step as work; takes seconds to a minute."""
    match = _STEP.fullmatch(name)
    assert match is not None, name
    sequence, batch = int(match["sequence"]), int(match["batch"])

    def factory() -> DryModel:
        tokens = torch.zeros((batch, sequence), dtype=torch.long)
        model = MODELS[match["model"]](sequence).train()
        return DryModel(model, (tokens,), lambda out: out.logits.sum(), lambda params: _NoUpdate(params, lr=0.1))

    collected = Collected()
    trace = dry_trace(factory, Machine(), name=name, kernels="cuda", prices=collected)
    return Step(name, collected.works, trace)


def load_gpus(path: Path = GPUS) -> dict[str, Machine]:
    """Returns the machine of each GPU, from its maker's figures alone."""
    tables = tomllib.loads(path.read_text())
    return {
        gpu: machine_from_mapping({key: value for key, value in table.items() if key not in _EXTRA}, gpu)
        for gpu, table in tables.items()
    }


def predict_s(step: Step, machine: Machine, constants: Constants | None = None) -> float:
    """Returns the predicted time of a step with nothing moved, in seconds."""
    clock = Clock.of(machine, constants)
    kernels_s = sum(clock.work_s(work) * count for work, count in step.works.items())
    return kernels_s + refill_ns(step.trace, machine, clock.constants) / NS_PER_S
