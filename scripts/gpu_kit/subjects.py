"""The models of the kit, made from sizes with random weights, and a step of each; the same for real runs and for dry ones."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from llama_steps import SIZES_8B, Llama, Sizes, evenly
from tieroff import DryModel
from tieroff.tracing.recipes.packed import pack_layers

ROPE_BASE = 500_000.0
ROUNDS = 2
"""Of the curve: an update of 65,536 tokens is two batches."""
LORA_RANK = 16
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class SubjectAbsent(Exception):
    """What this model needs is not installed."""


@dataclass(frozen=True)
class Subject:
    """A model and its step.

    Attributes:
        make: returns the model; called with its device and type as torch's defaults.
        words: how many tokens differ.
        rows, length: of a batch.
        loss: of the model and a batch (rows, length).
        dtype: of the weights.
        autocast: the type that forward runs under `torch.autocast` with; None: without.
        rounds: batches per update, whose gradients add up.
        is_updated_in_backward: its loop has nothing between backward and update, and asks for updates in backward.
        min_bytes: smaller tensors never move; None: as by default.
        layers: what FSDP2 shards by itself.
    """

    make: Callable[[], nn.Module]
    words: int
    rows: int
    length: int
    loss: Callable[[nn.Module, Tensor], Tensor]
    dtype: torch.dtype
    autocast: torch.dtype | None = None
    rounds: int = 1
    is_updated_in_backward: bool = False
    min_bytes: int | None = None
    layers: Callable[[nn.Module], Iterable[nn.Module]] = lambda model: ()

    @property
    def tokens(self) -> int:
        """Tokens of an update."""
        return self.rows * self.length * self.rounds

    def build(self, device: torch.device) -> nn.Module:
        """Returns the model with random weights."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device(device):
                return self.make().train()
        finally:
            torch.set_default_dtype(default)

    def batches(self, device: torch.device, count: int = 4) -> list[list[Tensor]]:
        """Returns random tokens of so many updates, which a run takes in turn."""
        numbers = torch.Generator().manual_seed(0)

        def batch() -> Tensor:
            return torch.randint(self.words, (self.rows, self.length), generator=numbers).to(device)

        return [[batch() for _ in range(self.rounds)] for _ in range(count)]

    def dry(self, optimizer: Optimizer | None = None) -> DryModel:
        """Returns the step for `dry_trace`, which has made the meta device the default; with `adamw`, or with another."""
        model = self.build(torch.device("meta"))
        return DryModel(
            _WithLoss(model, self.loss),
            (torch.zeros((self.rows, self.length), dtype=torch.long),),
            loss=lambda loss: loss,
            optimizer=optimizer or adamw,
            autocast=self.autocast,
            rounds=self.rounds,
            update_in_backward=self.is_updated_in_backward,
        )


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, tokens: Tensor) -> Tensor:
        with _unpacked():
            return self._loss(self.model, tokens)


@contextlib.contextmanager
def _unpacked() -> Iterator[None]:
    """Has transformers take a batch for whole rows, as it does where it can look at values.

    Of fake tensors it takes them for packed ones, and attention then runs with a mask of all pairs, ten times as long.
    """
    try:
        masks: Any = importlib.import_module("transformers.masking_utils")
    except ImportError:  # a model of another library
        yield
        return
    with mock.patch.object(masks, "find_packed_sequence_indices", lambda *_, **__: None):
        yield


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns the optimizer of the rows: AdamW in one kernel."""
    return torch.optim.AdamW((p for p in parameters if p.requires_grad), lr=1e-5, fused=True)


def foreach_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns AdamW as PyTorch makes it where nothing is said, of which the CPU's updates have the bits of a GPU's."""
    return torch.optim.AdamW((p for p in parameters if p.requires_grad), lr=1e-5, foreach=True)


# -- Llama-3-8B as others measured it: bf16 throughout, no outputs of norms or silu kept ---------------------------------


def _tiled_llama(sizes: Sizes, length: int, kept: tuple[int, int, int]) -> nn.Module:
    model = Llama(sizes, length, evenly(*kept))
    rates = ROPE_BASE ** -(torch.arange(0, sizes.head, 2, dtype=torch.float32) / sizes.head)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * torch.cat((rates, rates))
    model.angles = torch.stack((angles.cos(), angles.sin())).to(torch.get_default_dtype())
    for module in model.modules():  # PyTorch's own start lets a residual stream of 32 layers grow
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
    return model


def _curve(length: int, kept: tuple[int, int, int], tokens: int = 32 << 10, sizes: Sizes = SIZES_8B) -> Subject:
    return Subject(
        partial(_tiled_llama, sizes, length, kept),
        words=128_256,
        rows=tokens // length,
        length=length,
        loss=lambda model, tokens: model(tokens) / (ROUNDS * tokens.numel()),
        dtype=torch.bfloat16,
        rounds=ROUNDS,
        is_updated_in_backward=True,
    )


# -- models of transformers, as its users train them ---------------------------------------------------------------------


@dataclass(frozen=True)
class HfSizes:
    """Sizes of a Llama of transformers."""

    width: int
    layers: int
    heads: int
    shared_heads: int
    inner: int
    words: int = 128_256
    is_tied: bool = True


HF_8B = HfSizes(4096, 32, 32, 8, 14_336, is_tied=False)
HF_3B = HfSizes(3072, 28, 24, 8, 8192)
HF_1B = HfSizes(2048, 16, 32, 8, 8192)
HF_TINY = HfSizes(64, 3, 4, 2, 128, words=512)
TINY = Sizes(64, 4, 4, 2, 128)


def _hf_llama(sizes: HfSizes, length: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes.words,
        hidden_size=sizes.width,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.shared_heads,
        max_position_embeddings=length,
        tie_word_embeddings=sizes.is_tied,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model: nn.Module = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    return model


def _lora(sizes: HfSizes, length: int, *, is_quantized: bool) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model: Any = _hf_llama(sizes, length)
    if is_quantized and model.device.type == "meta":
        pack_layers(model.model, None, torch.bfloat16)  # bitsandbytes has no kernels there; bytes and products are as with it
    elif is_quantized:
        _quantize(model)
    model.enable_input_require_grads()
    return get_peft_model(model, LoraConfig(r=LORA_RANK, target_modules=list(LORA_TARGETS), lora_dropout=0.0))


def _quantize(model: nn.Module) -> None:
    """Puts bitsandbytes' NF4 in the place of each decoder layer's products."""
    try:
        bnb: Any = importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise SubjectAbsent(f"bitsandbytes is not installed ({error})") from error
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in LORA_TARGETS:
            sizes = (module.in_features, module.out_features)
            packed = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta")
            weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4")
            packed.weight = weight.to(module.weight.device)  # packs
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, packed)


def _hf_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _hf_layers(model: nn.Module) -> Iterable[nn.Module]:
    inner: Any = model
    return inner.model.layers  # type: ignore[no-any-return]


def _full(sizes: HfSizes, length: int) -> Subject:
    return Subject(
        partial(_hf_llama, sizes, length),
        words=sizes.words,
        rows=1,
        length=length,
        loss=_hf_loss,
        dtype=torch.float32,
        autocast=torch.bfloat16,
        layers=_hf_layers,
    )


def _adapted(sizes: HfSizes, length: int, *, is_quantized: bool) -> Subject:
    make = partial(_lora, sizes, length, is_quantized=is_quantized)
    return replace(_full(sizes, length), make=make, dtype=torch.bfloat16)


SUBJECTS: dict[str, Subject] = {
    "8b-4096-few": _curve(4096, (5, 1, 28)),
    "8b-4096-many": _curve(4096, (28, 1, 31)),
    "8b-1024-few": _curve(1024, (5, 1, 28)),
    "8b-1024-many": _curve(1024, (28, 1, 31)),
    "3b-full": _full(HF_3B, 4096),
    "8b-lora": _adapted(HF_8B, 4096, is_quantized=False),
    "8b-nf4": _adapted(HF_8B, 4096, is_quantized=True),
    "1b-drive": _full(HF_1B, 2048),
}
_TINY: dict[str, Subject] = {
    **{name: _curve(length, (2, 1, 3), 512, TINY) for name, length in (("8b-4096-few", 128), ("8b-4096-many", 128))},
    **{name: _curve(length, (2, 1, 3), 512, TINY) for name, length in (("8b-1024-few", 64), ("8b-1024-many", 64))},
    "3b-full": _full(HF_TINY, 64),
    "8b-lora": _adapted(HF_TINY, 64, is_quantized=False),
    "8b-nf4": _adapted(HF_TINY, 64, is_quantized=True),
    "1b-drive": _full(HF_TINY, 64),
}
TINY_SUBJECTS = {name: replace(subject, min_bytes=0) for name, subject in _TINY.items()}
"""In small, where everything moves that moves in large."""
