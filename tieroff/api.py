"""The public calls: wrap a model, find its engine, unwrap it."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch

from tieroff.config import Config
from tieroff.core.io.json_files import load_plan
from tieroff.core.plan import Plan
from tieroff.errors import StateError
from tieroff.planner.policies import find_policy
from tieroff.runtime.backend.base import Backend
from tieroff.runtime.engine import Engine
from tieroff.runtime.hooks.forward.slot import ForwardSlot
from tieroff.runtime.optimizer.state_dicts import engine_by_hooks
from tieroff.session.build import build
from tieroff.session.links import stand_in
from tieroff.session.ranks import Ranks, on_wrap
from tieroff.session.shared import Budget

ConfigSource = Config | Mapping[str, Any] | str | Path | None


@overload
def wrap(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: ConfigSource = None,
    *,
    budget: int | str | Budget | None = None,
    plan: Plan | str | Path | None = None,
    backend: Backend | None = None,
) -> torch.nn.Module: ...


@overload
def wrap(
    model: Sequence[torch.nn.Module],
    optimizer: Sequence[torch.optim.Optimizer | None] | None = None,
    config: ConfigSource = None,
    *,
    budget: int | str | Budget | None = None,
    backend: Backend | None = None,
) -> list[torch.nn.Module]: ...


def wrap(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer | None] | None = None,
    config: ConfigSource = None,
    *,
    budget: int | str | Budget | None = None,
    plan: Plan | str | Path | None = None,
    backend: Backend | None = None,
) -> torch.nn.Module | list[torch.nn.Module]:
    """Makes a model train within a memory budget, with an unchanged training loop.

    With `[parallel] plan` in the config, the ranks of this run hold the model together: it is split over them first (see
    `tieroff.parallelize`), and parameters are DTensors from then on, also after `unwrap`.

    Args:
        model: the root module whose forward begins a step; or a list of several, which share one budget (see `tieroff.Budget`).
        optimizer: whose `step` ends it; may be attached later with `engine(model).attach`. For a list of models a list as long:
            None for a model that is not trained.
        config: a path, a mapping or a `Config`; None takes the file named by TIEROFF_CONFIG, else `tieroff.toml`, else
            defaults.
        budget: device memory for the tensors of a step, in place of the config's `[budget] device`: bytes such as 6442450944 or
            "6GiB", a share of what the step needs with nothing moved such as "50%", or "min", the least that it runs in; or a
            `tieroff.Budget` that several models share.
        plan: run this plan (or the one in this file) instead of making one; its trace must be that of the recorded step.
        backend: where computing happens; None follows `device` of the config. For tests.

    Returns:
        The same module, or a list of the same modules.

    Raises:
        ConfigError: the config cannot be used on this machine (a folder is missing, say), or its partition not on this model
            and these ranks.
        StateError: this is no module, it is wrapped already, or it or the optimizer cannot be wrapped.
        StoreError: a drive failed or is full.
    """
    if not sys.platform.startswith("linux"):
        raise StateError(f"tieroff.wrap runs on Linux; this is {sys.platform}. plan and compare work everywhere")
    if isinstance(model, (list, tuple)):
        return _wrap_all(model, optimizer, config, budget, plan, backend)
    if not isinstance(model, torch.nn.Module):
        raise _no_module(model)
    if engine_of(model) is not None:
        raise StateError("this model is wrapped already; tieroff.unwrap(model) first to wrap it with another config")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise _no_optimizer(optimizer)
    loaded = Config.load(config)
    shared = budget if isinstance(budget, Budget) else None
    if (wanted := budget.wanted if isinstance(budget, Budget) else budget) is not None:
        loaded = loaded.with_device_budget(wanted)
    if (stand := stand_in.get()) is not None:
        loaded = stand.adapt(loaded)
    find_policy(loaded.plan.policy)
    given = load_plan(plan) if isinstance(plan, (str, Path)) else plan
    if given is not None and not isinstance(given, Plan):
        hint = "`tieroff plan --out FILE` writes one, and engine(model).plan is one"
        raise StateError(f"expected a plan, or the path of its file, got {type(given).__name__}; {hint}")
    if isinstance(backend, str):
        raise StateError(f'expected a backend object, got {backend!r}; a device is wrap(model, optimizer, {{"device": "cpu"}})')
    if loaded.parallel.plan is not None:
        from tieroff.partition.ranks import split_over_ranks  # DTensor takes long to import

        split_over_ranks(model, optimizer, loaded.parallel.plan, Ranks.here().world)
    engine = build(model, loaded, backend, given, shared)
    if optimizer is not None:
        try:
            engine.attach(optimizer)
        except BaseException:
            engine.close()
            raise
    if (note := on_wrap.get()) is not None:
        note(engine)
    return model


def _wrap_all(
    models: Sequence[torch.nn.Module],
    optimizers: object,
    config: ConfigSource,
    budget: int | str | Budget | None,
    plan: object,
    backend: Backend | None,
) -> list[torch.nn.Module]:
    """Wraps several models under one budget; all of them, or none."""
    given = [None] * len(models) if optimizers is None else optimizers
    if not isinstance(given, (list, tuple)) or len(given) != len(models):
        what = f"{len(given)} of them" if isinstance(given, (list, tuple)) else type(given).__name__
        raise StateError(
            f"expected a list of {len(models)} optimizers, one for each model (None for one that is not trained), got {what}; "
            "of one that several models share make one for each, which updates each parameter as before"
        )
    if plan is not None:
        raise StateError("a plan is of one model: wrap each with its own, tieroff.wrap(model, optimizer, budget=b, plan=...)")
    loaded = Config.load(config)
    if not isinstance(budget, Budget):
        budget = Budget(budget if budget is not None else loaded.budget.device)
    with contextlib.ExitStack() as wrapped:
        for model, optimizer in zip(models, given, strict=True):
            wrap(model, optimizer, loaded, budget=budget, backend=backend)
            wrapped.callback(unwrap, model)
        wrapped.pop_all()
    return list(models)


def _no_optimizer(given: object) -> StateError:
    if isinstance(given, (str, int, Path, Mapping, Config)):
        hint = "a config goes in wrap(model, optimizer, config=...), a budget in wrap(model, optimizer, budget=...)"
    elif isinstance(given, type):
        hint = f"make one: {given.__name__}(model.parameters())"
    elif isinstance(getattr(given, "optimizer", None), torch.optim.Optimizer):
        hint = "give its .optimizer"
    elif isinstance(given, Iterator):
        hint = "make one of these parameters: torch.optim.AdamW(model.parameters())"
    else:
        hint = "a model has one; several become one with param_groups, or leave it out and step them as you do"
    return StateError(f"expected a torch.optim.Optimizer, got {type(given).__name__}; {hint}")


def _no_module(given: object) -> StateError:
    hint = "it is tieroff.wrap(model, optimizer), or tieroff.wrap([a, b], [optimizer_a, optimizer_b])"
    if isinstance(given, type):
        hint = f"make one: {given.__name__}(...)"
    elif isinstance(given, torch.optim.Optimizer):
        hint = "the model comes first: tieroff.wrap(model, optimizer)"
    return StateError(f"expected a torch.nn.Module to wrap, got {type(given).__name__}; {hint}")


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Restores a plain module and optimizer with their values, and closes the files and threads of the engine.

    Raises:
        StateError: the model is not wrapped.
    """
    engine(model).close()
    # What the engine is made of refers to parameters and optimizer, and to itself in circles: until these are collected, layers
    # and an optimizer that the program drops next would keep their memory.
    gc.collect()
    return model


def engine(model: torch.nn.Module) -> Engine:
    """Returns the engine of a wrapped model.

    Raises:
        StateError: the model is not wrapped.
    """
    if isinstance(model, (list, tuple)):
        raise StateError(f"expected one wrapped model, got a {type(model).__name__}; call this for each of them")
    found = engine_of(model)
    if found is None:
        raise StateError(f"this {type(model).__name__} is not wrapped (or is a copy of one that is); call tieroff.wrap first")
    return found


def sleep(model: torch.nn.Module) -> None:
    """Sends everything of a wrapped model below that can move: for a phase of the program in which it rests.

    What stays on the device is what cannot move: buffers, and parameters that `explain()` names. A step, a forward without
    gradients or `state_dict()` of a sleeping model are right by themselves: a step wakes it, the others fetch what they use.
    Models that share a `tieroff.Budget` have its part meanwhile.

    Raises:
        StateError: the model is not wrapped, or a forward or backward of it runs.
        StoreError: a lower tier has no room.
    """
    engine(model).sleep()


def wake(model: torch.nn.Module) -> None:
    """Brings back what the plan of a sleeping model keeps on the device between its steps. Idempotent.

    Raises:
        StateError: the model is not wrapped.
        StoreError: a transfer failed.
    """
    engine(model).wake()


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
    owner = engine_by_hooks(model)  # of one whose forward somebody replaced by a function that says nothing of what is inside
    return owner if isinstance(owner, Engine) and owner.model is model and not owner.is_closed else None
