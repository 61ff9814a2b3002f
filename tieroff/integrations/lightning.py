"""Lightning: one callback."""

from __future__ import annotations

import logging
from typing import Any

import torch

from tieroff.api import ConfigSource
from tieroff.errors import ConfigError, StateError
from tieroff.integrations.attaching import attach, attach_all, owner_of, torch_optimizer, with_budget
from tieroff.runtime.engine import Engine

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise ConfigError(f"lightning is not installed: {error}; pip install 'tieroff[lightning]'") from error

log = logging.getLogger("tieroff")

Parts = list[tuple[torch.nn.Module, torch.optim.Optimizer]]
"""Models and the optimizer of each."""


class TieroffCallback(Callback):
    """Has a Lightning `Trainer` train within a memory budget: `Trainer(..., callbacks=[TieroffCallback(budget="50%")])`.

    The module is wrapped when training begins, after its optimizer was made or read from a checkpoint; a step begins with
    `training_step`, so what the loss saves is moved too. One that optimizes by hand has a model for each of its optimizers
    (a generator and a discriminator): the child that has all parameters of one, whose forward begins a step. They share the
    budget. All stay wrapped when training ends, since the whole of it with its optimizer's state need not fit the device:
    validate, test, predict and save go on as they are, and `tieroff.unwrap` of what was wrapped gives a plain one.

    Attributes:
        engines: of what was wrapped, in the order of the optimizers, once training has begun; () before.
    """

    def __init__(self, config: ConfigSource = None, *, budget: int | str | None = None) -> None:
        """Takes config and budget as `tieroff.wrap` does.

        Raises:
            ConfigError: the budget has another form.
        """
        self.config = with_budget(config, budget)
        self.engines: tuple[Engine, ...] = ()

    @property
    def engine(self) -> Engine | None:
        """Of the module, or of the first of several models; None before training has begun."""
        return self.engines[0] if self.engines else None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Wraps the module, or those of its children that it trains by hand.

        Raises:
            ConfigError: the config cannot be used on this machine: a folder is missing, say.
            StateError: several optimizers of one module, or a module that cannot be wrapped.
            StoreError: a drive failed or is full.
        """
        if getattr(pl_module, "_compiler_ctx", None) is not None:
            raise StateError("TieroffCallback: the module is compiled, which bypasses tieroff; leave torch.compile out")
        device = trainer.strategy.root_device
        if not pl_module.automatic_optimization:
            parts = _by_hand(pl_module, [torch_optimizer(optimizer) for optimizer in trainer.optimizers])
            one = len(parts) == 1
            self.engines = (attach(*parts[0], self.config, device),) if one else tuple(attach_all(parts, self.config, device))
            return
        if len(trainer.optimizers) != 1:
            raise StateError(f"TieroffCallback: expected one optimizer, got {len(trainer.optimizers)}; a wrapped model has one")
        made = attach(pl_module, trainer.optimizers[0], self.config, device)
        made.begin_in("training_step")
        self.engines = (made,)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Says what was done."""
        for engine in self.engines:
            if not engine.is_closed:
                log.info("%s", engine.explain())


def _by_hand(module: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> Parts:
    """Returns the model of each optimizer of a module that optimizes by hand.

    Raises:
        StateError: there is no optimizer, or two have parameters of the same model.
    """
    parts = [(owner_of(optimizer, module), optimizer) for optimizer in optimizers]
    inside = [{id(inner) for inner in model.modules()} for model, _ in parts]
    if not parts or any(a & b for i, a in enumerate(inside) for b in inside[:i]):
        names = {id(inner): name or type(module).__name__ for name, inner in module.named_modules()}
        got = ", ".join(f"{type(optimizer).__name__} of {names[id(model)]}" for model, optimizer in parts)
        raise StateError(
            "TieroffCallback: expected a child of the module for each optimizer, apart from the others', got "
            f"{got or 'no optimizer'}; leave the callback out and "
            "call tieroff.wrap(self.model, optimizer) in on_train_start, with the optimizer whose state is the largest"
        )
    return parts
