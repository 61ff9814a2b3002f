"""What the integrations share: the torch optimizer inside a trainer's, and when a model is wrapped or only attached."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from tieroff.api import ConfigSource, engine, engine_of, unwrap, wrap
from tieroff.config import Config
from tieroff.errors import ConfigError, StateError
from tieroff.runtime.engine import Engine

log = logging.getLogger("tieroff")


def torch_optimizer(optimizer: object) -> torch.optim.Optimizer:
    """Returns the optimizer whose `step` updates parameters: trainers hand out wrappers that keep it as `.optimizer`.

    Raises:
        StateError: there is no torch optimizer, or its updates are made by something else.
    """
    inner = optimizer
    while isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
        inner = inner.optimizer  # type: ignore[attr-defined]
    if not isinstance(inner, torch.optim.Optimizer):
        raise StateError(
            f"the trainer's optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer; turn DeepSpeed or the like "
            "off, or train without tieroff"
        )
    return inner


def with_budget(config: ConfigSource, budget: int | str | None) -> ConfigSource:
    """Returns a config with the device budget that was given beside it, as `tieroff.wrap` takes both.

    Raises:
        ConfigError: the budget has another form, or the config cannot be read.
    """
    return config if budget is None else Config.load(config).with_device_budget(budget)


def attach(model: torch.nn.Module, optimizer: object, config: ConfigSource, device: torch.device) -> Engine:
    """Has a trainer's model and optimizer train under tieroff, and returns the engine.

    A model that is wrapped already keeps its engine, and with it its config, when no optimizer is attached to it yet or
    this very one is. With another optimizer (of an earlier run of the trainer) it is unwrapped and wrapped anew.

    Args:
        model: the root whose forward begins a step.
        optimizer: torch's, or a trainer's wrapper round it.
        config: as for `tieroff.wrap`.
        device: where the trainer computes.

    Raises:
        ConfigError: the config cannot be used on this machine, or has the model compute elsewhere than its trainer does.
        StateError: the model or the optimizer cannot be wrapped.
        StoreError: a drive failed or is full.
    """
    inner = torch_optimizer(optimizer)
    found = engine_of(model)
    if found is not None and found.optimizer is inner:
        return found
    if found is not None and found.optimizer is None:
        found.attach(inner)
        return found
    if found is not None:
        log.info("this model was wrapped with another optimizer: it is unwrapped, and wrapped with the new one")
        unwrap(model)
    check_ranks(model, config)
    wrap(model, inner, config)
    made = engine(model)
    try:
        check_device(made, device)
    except ConfigError:
        unwrap(model)
        raise
    return made


def attach_all(
    parts: Sequence[tuple[torch.nn.Module, torch.optim.Optimizer | None]], config: ConfigSource, device: torch.device
) -> list[Engine]:
    """Has several models of a trainer share one budget, as `tieroff.wrap` of lists does, and returns their engines.

    One without an optimizer is not trained. Models that are wrapped already with these very optimizers keep their engines; else
    all are wrapped anew.

    Raises:
        As `attach` does.
    """
    found = [engine_of(model) for model, _ in parts]
    if all(one is not None and one.optimizer is optimizer for one, (_, optimizer) in zip(found, parts, strict=True)):
        return [one for one in found if one is not None]
    for (model, _), one in zip(parts, found, strict=True):
        if one is not None:
            unwrap(model)
        check_ranks(model, config)
    models, optimizers = [model for model, _ in parts], [optimizer for _, optimizer in parts]
    wrap(models, optimizers, config)
    try:
        check_device(engine(models[0]), device)
    except ConfigError:
        for model in models:
            unwrap(model)
        raise
    return [engine(model) for model in models]


def check_device(made: Engine, device: torch.device) -> None:
    """Checks that a trainer computes where an engine does.

    Raises:
        ConfigError: it does not.
    """
    if made.device.type != device.type:
        raise ConfigError(
            f"device: the trainer uses {device.type} and tieroff {made.device.type}; set device in the config, or the "
            "trainer's; tieroff supports cpu and cuda"
        )


def owner_of(optimizer: torch.optim.Optimizer, root: torch.nn.Module) -> torch.nn.Module:
    """Returns the module that a loop by hand calls for what an optimizer trains: the child of a root that has all of that.

    A child that cannot be called, such as a `ModuleDict`, stands for its own children; where no child has all, it is the root.
    """
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for child in root.children():
        if wanted and wanted <= {id(parameter) for parameter in child.parameters()}:
            found = child if type(child).forward is not torch.nn.Module.forward else owner_of(optimizer, child)
            return found if type(found).forward is not torch.nn.Module.forward else root
    return root


def check_ranks(model: torch.nn.Module, config: ConfigSource) -> None:
    """Checks that parameters may move although the trainer may have wrapped the model in DDP.

    Raises:
        StateError: they may not. DDP listens on nodes of a parameter's device and would miss every gradient.
    """
    is_spread = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not is_spread or torch.distributed.get_world_size() == 1 or all(p.is_cpu for p in model.parameters()):
        return
    covered = sorted({"parameters", "gradients"} & set(Config.load(config).plan.cover))
    if covered:
        raise StateError(
            f"[plan] cover includes {' and '.join(covered)}, but the trainer spreads the model over several GPUs, and DDP "
            "would lose the gradients of parameters that move; leave them out of cover (activations and optimizer state still "
            "move), or call tieroff.wrap before the trainer sees the model"
        )
