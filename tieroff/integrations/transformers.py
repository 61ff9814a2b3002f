"""Hugging Face `Trainer`: one callback."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from tieroff.api import ConfigSource
from tieroff.errors import ConfigError, StateError
from tieroff.integrations.accelerate import attach_accelerated
from tieroff.integrations.attaching import with_budget
from tieroff.runtime.engine import Engine

try:
    from transformers.trainer_callback import TrainerCallback
except ImportError as error:
    raise ConfigError(f"transformers is not installed: {error}; pip install 'tieroff[transformers]'") from error

log = logging.getLogger("tieroff")


class TieroffCallback(TrainerCallback):
    """Has a `transformers.Trainer` train within a memory budget: `Trainer(..., callbacks=[TieroffCallback(budget="50%")])`.

    The model is wrapped when training begins, after the trainer has made its optimizer or read it from a checkpoint. It
    stays wrapped when training ends, because model and optimizer state need not fit the device: evaluate,
    predict and save work as before, and `tieroff.unwrap(model)` gives a plain model.

    A model that the trainer calls and does not train takes device memory, too, as long as it is not managed. A trainer of TRL
    makes it: `trainer.add_callback(TieroffCallback(budget="50%", frozen=[trainer.ref_model]))`.

    Attributes:
        engine: of the model, once training has begun; None before.
    """

    def __init__(
        self,
        config: ConfigSource = None,
        *,
        budget: int | str | None = None,
        frozen: torch.nn.Module | Sequence[torch.nn.Module | None] = (),
    ) -> None:
        """Takes config and budget as `tieroff.wrap` does.

        Args:
            config, budget: as for `tieroff.wrap`.
            frozen: models that the trainer calls and does not train (a reference, a teacher, a judge); they share the budget.
                None among them is passed over: a trainer of TRL has no reference model where it trains adapters.

        Raises:
            ConfigError: the budget has another form.
        """
        self.config = with_budget(config, budget)
        given = (frozen,) if isinstance(frozen, torch.nn.Module) else frozen
        self._frozen = tuple(model for model in given if model is not None)
        self.engine: Engine | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: torch.nn.Module, optimizer: Any, **others: Any
    ) -> None:
        """Wraps the model.

        Raises:
            ConfigError: the config cannot be used on this machine: a folder is missing, say.
            StateError: tieroff does not support the trainer's settings, or the model cannot be wrapped.
            StoreError: a drive failed or is full.
        """
        if args.n_gpu > 1:
            raise StateError(
                f"one process uses {args.n_gpu} GPUs: torch.nn.DataParallel makes copies that no budget covers; start with "
                "`tieroff launch` or torchrun, or show the process one GPU (CUDA_VISIBLE_DEVICES)"
            )
        if args.torch_compile:
            raise StateError("torch_compile=True: calls of the compiled copy would bypass tieroff; set torch_compile=False")
        self.engine = attach_accelerated(model, optimizer, self.config, args.device, self._frozen)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Logs what the plan did."""
        if self.engine is not None and not self.engine.is_closed:
            log.info("%s", self.engine.explain())
