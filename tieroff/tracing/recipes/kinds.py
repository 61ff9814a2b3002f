"""The names of the recipes, without torch: the command line lists them."""

from __future__ import annotations

from enum import StrEnum


class Recipe(StrEnum):
    """How a model is trained; AdamW and the loss that transformers computes in all of them.

    full_fp32: weights, gradients and optimizer state in float32.
    full_bf16: all of them in bfloat16.
    lora: frozen weights in bfloat16, and peft's adapters in float32, the only ones that are trained.
    qlora: the same, with the weights of linear layers packed to four bits (NF4, scales packed too).
    """

    full_fp32 = "full-fp32"
    full_bf16 = "full-bf16"
    lora = "lora"
    qlora = "qlora"

    @property
    def has_adapters(self) -> bool:
        """True if only adapters are trained."""
        return self in (Recipe.lora, Recipe.qlora)
