"""`accelerate`: prepare and wrap in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tieroff.api import ConfigSource
from tieroff.errors import ConfigError, StateError
from tieroff.integrations.attaching import attach, attach_all, torch_optimizer, with_budget
from tieroff.runtime.engine import Engine

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise ConfigError(f"accelerate is not installed: {error}; pip install 'tieroff[accelerate]'") from error


def prepare(accelerator: Accelerator, *objects: Any, config: ConfigSource = None, budget: int | str | None = None) -> Any:
    """Does what `accelerator.prepare(*objects)` does, and wraps the model with its optimizer.

    Args:
        accelerator: an `accelerate.Accelerator`.
        objects: what `accelerator.prepare` takes; one module and one optimizer must be among them.
        config, budget: as for `tieroff.wrap`.

    Returns:
        What `accelerator.prepare` returns: the prepared objects, in order.

    Raises:
        ConfigError: the config cannot be used on this machine: a folder is missing, say.
        StateError: not one module and one optimizer, or they cannot be wrapped.
        StoreError: a drive failed or is full.
    """
    for kind, name in ((torch.nn.Module, "module"), (torch.optim.Optimizer, "optimizer")):
        count = sum(isinstance(item, kind) for item in objects)
        if count != 1:
            raise StateError(f"prepare: expected one {name} among the objects to prepare, got {count}; a wrapped model has one")
    config = with_budget(config, budget)
    prepared = accelerator.prepare(*objects)
    model = next(item for item in prepared if isinstance(item, torch.nn.Module))
    optimizer = next(item for item in prepared if isinstance(item, torch.optim.Optimizer))
    attach_accelerated(accelerator.unwrap_model(model), optimizer, config, accelerator.device)
    return prepared


def attach_accelerated(
    model: torch.nn.Module, optimizer: Any, config: ConfigSource, device: torch.device, frozen: Sequence[torch.nn.Module] = ()
) -> Engine:
    """Attaches a prepared optimizer, with models beside it that are not trained: see `attach`, which raises the errors."""
    if frozen:
        engine, *_ = attach_all([(model, torch_optimizer(optimizer)), *((one, None) for one in frozen)], config, device)
    else:
        engine = attach(model, optimizer, config, device)
    if isinstance(optimizer, AcceleratedOptimizer) and optimizer.scaler is not None:
        # With a loss scale it puts back, after every step, the `step` that it found when it was made: ours would be lost.
        # Unpickling makes it look again.
        optimizer.__setstate__(optimizer.__getstate__())
    return engine
