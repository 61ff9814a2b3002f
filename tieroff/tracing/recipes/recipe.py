"""What people train with: the types of weights, what of them is trained, what runs again in backward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tieroff.errors import ConfigError
from tieroff.tracing.dry import DryModel
from tieroff.tracing.recipes.configuration import expect_library
from tieroff.tracing.recipes.kinds import Recipe
from tieroff.tracing.recipes.packed import PackedLinear, pack_layers

LORA_RANK = 16
"""Of the adapters, on every linear layer but the output's."""


@dataclass(frozen=True)
class Settings:
    """One step of a recipe.

    Attributes:
        recipe: how the model is trained.
        tokens: of each sequence.
        batch: sequences of one forward and backward.
        is_checkpointed: layers keep only their input, and run again in backward (non-reentrant).
        autocast: the type that forward and loss run under `torch.autocast` with; None: without.
    """

    recipe: Recipe
    tokens: int
    batch: int
    is_checkpointed: bool = True
    autocast: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights that are not packed."""
        return torch.float32 if self.recipe is Recipe.full_fp32 else torch.bfloat16


@dataclass(frozen=True)
class Built:
    """What a recipe made of a configuration.

    Attributes:
        name: of the model's class.
        count, weight_bytes: parameters and their bytes; packed ones count as the values that they stand for.
        trained_count: parameters that are trained.
        attention: transformers' name of the implementation.
        positions: that the configuration gives; 0 if it does not say.
        notes: what is otherwise than the recipe says, a sentence each.
    """

    name: str
    count: int
    weight_bytes: int
    trained_count: int
    attention: str
    positions: int
    notes: tuple[str, ...]


class RecipeStep:
    """One step of a recipe.

    Attributes:
        built: what the factory made; None before it was called.
    """

    def __init__(self, config: Any, settings: Settings) -> None:
        """Takes transformers' configuration of the model, which is not changed, and the sizes of the step."""
        self._config, self._settings = config, settings
        self.built: Built | None = None

    def factory(self) -> DryModel:
        """Returns the step for `dry_trace`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries: names that are to go, a layer's layout that peft finds out
            model = build_model(self._config, self._settings)
        self.built = _described(model, self._config, self._settings.recipe)
        return DryModel(
            model,
            example_inputs(self._settings),
            loss=lambda out: out.loss,
            optimizer=trained_by_adamw,
            autocast=self._settings.autocast,
        )


def _described(model: Any, config: Any, recipe: Recipe) -> Built:
    packed = {id(layer.weight): layer.value_count for layer in model.modules() if isinstance(layer, PackedLinear)}
    params = list(model.parameters())
    whole = model.get_base_model() if recipe.has_adapters else model
    unpacked = sum(p.numel() for p in params if p.dim() == 3 and not p.requires_grad)
    notes: tuple[str, ...] = ()
    if recipe is Recipe.qlora and unpacked:
        notes = (f"Experts in one tensor stay in bfloat16, as transformers leaves them: {unpacked:,} parameters.",)
    return Built(
        type(whole).__name__,
        sum(packed.get(id(p), p.numel()) for p in params),
        sum(p.numel() * p.element_size() for p in params),
        sum(p.numel() for p in params if p.requires_grad),
        str(whole.config._attn_implementation),
        int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0),
        notes,
    )


def build_model(config: Any, settings: Settings) -> nn.Module:
    """Returns the model as a recipe trains it, on torch's default device.

    Raises:
        ConfigError: peft is missing, transformers has no model with a language model's loss for the configuration, or the
            model cannot run its layers again.
    """
    config = copy.deepcopy(config)
    config.use_cache = config.get_text_config().use_cache = False  # keys and values of earlier words are of no use in training
    recipe = settings.recipe
    model = _class_of(config).from_config(config, dtype=settings.dtype)
    if recipe is Recipe.qlora:
        pack_layers(model, model.get_output_embeddings(), settings.dtype)
    if settings.is_checkpointed:
        _run_layers_again(model)
    if recipe.has_adapters:
        peft = expect_library("peft")
        adapters = peft.LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, lora_dropout=0.0, target_modules="all-linear")
        model = peft.get_peft_model(model, adapters)
    trained: nn.Module = model.train()
    return trained


def example_inputs(settings: Settings) -> dict[str, torch.Tensor]:
    """Returns a batch without padding, whose labels are its own words."""
    words = torch.zeros(settings.batch, settings.tokens, dtype=torch.long)
    return {"input_ids": words, "labels": words.clone()}


def trained_by_adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns the optimizer of what is not frozen."""
    return torch.optim.AdamW([param for param in params if param.requires_grad])


def _class_of(config: Any) -> Any:
    """Returns transformers' automatic class for the head that the configuration names, else that of a language model."""
    transformers = expect_library("transformers")
    heads = {
        "ForCausalLM": transformers.AutoModelForCausalLM,
        "LMHeadModel": transformers.AutoModelForCausalLM,
        "ForConditionalGeneration": transformers.AutoModelForSeq2SeqLM,
        "ForMaskedLM": transformers.AutoModelForMaskedLM,
    }
    named = [auto for end, auto in heads.items() if any(name.endswith(end) for name in config.architectures or ())]
    for auto in (*named, *heads.values()):
        if type(config) in auto._model_mapping:
            return auto
    raise ConfigError(
        f"--hf: expected the configuration of a language model, got that of {config.model_type!r}; for another one write a "
        "factory, and give it by --model"
    )


def _run_layers_again(model: Any) -> None:
    # The first name came with transformers 5.24; the second one warns since then.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(f"--hf: {error} Plan without: --no-checkpointing") from error
