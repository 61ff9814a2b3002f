"""The public calls: wrap a model, find its engine, unwrap it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tieroff.config import Config
from tieroff.core.io.json_files import load_plan
from tieroff.core.plan import Plan
from tieroff.errors import StateError
from tieroff.planner.policies import find_policy
from tieroff.runtime.backend.base import Backend
from tieroff.runtime.engine import Engine
from tieroff.runtime.hooks.forward.slot import ForwardSlot
from tieroff.session.build import build
from tieroff.session.ranks import Ranks, on_wrap

ConfigSource = Config | Mapping[str, Any] | str | Path | None


def wrap(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: ConfigSource = None,
    *,
    plan: Plan | str | Path | None = None,
    backend: Backend | None = None,
) -> torch.nn.Module:
    """Makes a model train within a memory budget, with an unchanged training loop.

    With `[parallel] plan` in the config, the ranks of this run hold the model together: it is split over them first (see
    `tieroff.parallelize`), and parameters are DTensors from then on, also after `unwrap`.

    Args:
        model: the root module whose forward begins a step.
        optimizer: whose `step` ends it; may be attached later with `engine(model).attach`.
        config: a path, a mapping or a `Config`; None takes the file named by TIEROFF_CONFIG, else `tieroff.toml`, else
            defaults.
        plan: run this plan (or the one in this file) instead of making one; its trace must be that of the recorded step.
        backend: where computing happens; None follows `device` of the config. For tests.

    Returns:
        The same module.

    Raises:
        ConfigError: the config cannot be used on this machine, or its partition not on this model and these ranks.
        StateError: this is no module, it is wrapped already, or it or the optimizer cannot be wrapped.
        StoreError: a folder is missing, read-only or too small.
    """
    if not sys.platform.startswith("linux"):
        raise StateError(f"tieroff.wrap runs on Linux; this is {sys.platform}. plan and compare work everywhere")
    if not isinstance(model, torch.nn.Module):
        raise StateError(f"expected a torch.nn.Module to wrap, got {type(model).__name__}")
    if engine_of(model) is not None:
        raise StateError("this model is wrapped already; tieroff.unwrap(model) first to wrap it with another config")
    loaded = Config.load(config)
    find_policy(loaded.plan.policy)
    given = load_plan(plan) if isinstance(plan, (str, Path)) else plan
    if loaded.parallel.plan is not None:
        from tieroff.partition.ranks import split_over_ranks  # DTensor takes long to import

        split_over_ranks(model, optimizer, loaded.parallel.plan, Ranks.here().world)
    engine = build(model, loaded, backend, given)
    if optimizer is not None:
        try:
            engine.attach(optimizer)
        except BaseException:
            engine.close()
            raise
    if (note := on_wrap.get()) is not None:
        note(engine)
    return model


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Restores a plain module and optimizer with their values, and closes the files and threads of the engine.

    Raises:
        StateError: the model is not wrapped.
    """
    engine(model).close()
    return model


def engine(model: torch.nn.Module) -> Engine:
    """Returns the engine of a wrapped model.

    Raises:
        StateError: the model is not wrapped.
    """
    found = engine_of(model)
    if found is None:
        raise StateError(f"this {type(model).__name__} is not wrapped (or is a copy of one that is); call tieroff.wrap first")
    return found


def scope(model: torch.nn.Module) -> Any:
    """Returns a context manager under which tensors saved outside the model (by a loss, say) are moved too."""
    return engine(model).scope()


def on_host(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager under which parameters, gradients and buffers are used on the host, all at once if need be.

    For what needs more of them together than the device's budget holds: a vector of all parameters, a norm over a list.
    Functions that get some of them give CPU tensors, without a gradient; writes in place count. On the CPU nothing changes.

    Raises:
        StateError: the model is not wrapped.
    """
    return engine(model).on_host()


def engine_of(model: torch.nn.Module) -> Engine | None:
    """Returns the engine of a wrapped model, None for one that is not."""
    slot = getattr(model, "__dict__", {}).get("forward")
    while slot is not None:
        owner = slot.engine if isinstance(slot, ForwardSlot) else None
        if isinstance(owner, Engine) and owner.model is model and not owner.is_closed:
            return owner
        # Others wrap their forward around this one (a trainer's mixed precision), which stays inside when ours is removed.
        slot = slot.inner if isinstance(slot, ForwardSlot) else getattr(slot, "__wrapped__", None)
    return None
