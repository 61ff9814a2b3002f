"""An optimizer that updates a wrapped model and was never attached: seen at its first update, and said."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tieroff.errors import StateError

log = logging.getLogger("tieroff")


class Unattached:
    """Watches for updates of a model's parameters by an optimizer that its engine does not know.

    It is not attached by itself: an engine takes one optimizer, may refuse this one, and changes how it is stepped. Only who
    wrote the loop knows whether it is the one, or a second of several.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._handle: Any = None
        self._was_told = False

    def watch(self) -> None:
        """Watches from now on, until `stop` or until something was said."""
        if self._handle is None and not self._was_told:
            self._handle = register_optimizer_step_post_hook(self._stepped)

    def stop(self) -> None:
        """Ends watching."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _stepped(self, optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        model = self._model()
        if model is None:
            self.stop()
            return
        count = shared_count(model, optimizer)
        if not count:
            return  # of another model
        self.stop()
        self._was_told = True
        log.warning(
            "%s updates %d parameters of the wrapped %s, which has no optimizer attached: its state stays on the device and "
            "counts as memory that cannot move. Write tieroff.engine(model).attach(optimizer) after you have made it, or make "
            "it first and write tieroff.wrap(model, optimizer)",
            type(optimizer).__name__,
            count,
            type(model).__name__,
        )


def check_shares(model: torch.nn.Module, optimizer: object) -> None:
    """Returns when an optimizer updates some of a model's parameters, or is none of torch's, which others refuse.

    Raises:
        StateError: all its parameters are others.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or shared_count(model, optimizer):
        return
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    raise StateError(
        f"expected an optimizer of this model's parameters, got {type(optimizer).__name__} with {count} others, none of "
        f"{type(model).__name__}; wrap each model with its own optimizer, made from model.parameters()"
    )


def shared_count(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns how many of the optimizer's parameters are the model's."""
    own = {id(parameter) for parameter in model.parameters()}
    return sum(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


def inside(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer inside a trainer's (accelerate's), which is one by its type alone: it was never made as one.

    Raises:
        StateError: the trainer's has a loss scale, and puts back the inner one's `step` after each of its own.
    """
    inner = getattr(optimizer, "optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer) or hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):
        return optimizer
    if getattr(optimizer, "scaler", None) is not None:
        raise StateError(
            f"expected the program's own optimizer, got {type(optimizer).__name__} with a loss scale, which replaces its step; "
            "write tieroff.integrations.accelerate.prepare(accelerator, ...) in the place of accelerator.prepare(...)"
        )
    return inner
