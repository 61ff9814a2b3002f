"""Lightning: one callback."""

from __future__ import annotations

import logging
from typing import Any

from tieroff.api import ConfigSource
from tieroff.errors import ConfigError, StateError
from tieroff.integrations.attaching import attach, with_budget
from tieroff.runtime.engine import Engine

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise ConfigError(f"lightning is not installed: {error}; pip install 'tieroff[lightning]'") from error

log = logging.getLogger("tieroff")


class TieroffCallback(Callback):
    """Has a Lightning `Trainer` train within a memory budget: `Trainer(..., callbacks=[TieroffCallback(budget="50%")])`.

    The module is wrapped when training begins, after its optimizer was made or read from a checkpoint; a step begins with
    `training_step`, so what the loss saves is moved too. It stays wrapped when training ends, since the whole of it with its
    optimizer's state need not fit the device: validate, test, predict and save go on as they are, and
    `tieroff.unwrap(module)` gives a plain one.

    Attributes:
        engine: of the module, once training has begun; None before.
    """

    def __init__(self, config: ConfigSource = None, *, budget: int | str | None = None) -> None:
        """Takes config and budget as `tieroff.wrap` does.

        Raises:
            ConfigError: the budget has another form.
        """
        self.config = with_budget(config, budget)
        self.engine: Engine | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Wraps the module.

        Raises:
            ConfigError: the config cannot be used on this machine.
            StateError: the module optimizes by hand or with several optimizers, or it cannot be wrapped.
            StoreError: a folder is missing, read-only or too small.
        """
        if not pl_module.automatic_optimization:
            raise StateError(
                "TieroffCallback needs automatic optimization: a training_step that calls backward and step has no separate "
                "forward; leave the callback out and call tieroff.wrap(self.model, optimizer) on the inner model in "
                "on_train_start instead, or on several at once: tieroff.wrap([self.generator, self.discriminator], "
                "[o.optimizer for o in self.optimizers()], budget=...)"
            )
        if getattr(pl_module, "_compiler_ctx", None) is not None:
            raise StateError("TieroffCallback: the module is compiled, which bypasses tieroff; leave torch.compile out")
        if len(trainer.optimizers) != 1:
            raise StateError(f"TieroffCallback: expected one optimizer, got {len(trainer.optimizers)}; a wrapped model has one")
        self.engine = attach(pl_module, trainer.optimizers[0], self.config, trainer.strategy.root_device)
        self.engine.begin_in("training_step")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Says what was done."""
        if self.engine is not None and not self.engine.is_closed:
            log.info("%s", self.engine.explain())
