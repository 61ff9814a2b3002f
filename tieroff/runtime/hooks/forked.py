"""Tensors in a forked child whose bytes the child does not have: using one raises.

What lies on a drive is mapped for the parent alone ([Note: memory a child does not have] in storage/memory.py). A child that
touched it would end with a signal; so its tensors change class at the fork, and functions that want their data raise.
Views and aliases that were made before the fork are beyond this.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from tieroff.core.tensor import Tier
from tieroff.errors import StateError
from tieroff.runtime.items.data_functions import asks_no_data
from tieroff.runtime.items.gradient import GradientItem
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.offloaded import own_class, restore_class, untouched


class Owner(Protocol):
    """Whoever has tensors below."""

    def below(self) -> Iterable[HomeItem]:
        """Returns the items that user code can reach."""


class Writer(Protocol):
    """Whoever has threads that write tensors below."""

    def settle(self) -> None:
        """Blocks until none writes."""


class _Missing:
    """The `__torch_function__` of both classes."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if asks_no_data(func):
            with untouched():
                return func(*args, **(kwargs or {}))
        raise StateError(
            "expected a tensor of a wrapped model to be used in the process that wrapped it, got it in a forked child, which "
            "has nothing of what lies on NVMe; copy what the child needs before the fork"
        )


class MissingParameter(_Missing, torch.nn.Parameter):
    """The class of a parameter that a child does not have."""


class MissingTensor(_Missing, torch.Tensor):
    """The same for a gradient or a tensor of optimizer state."""


_MISSING: dict[type, type] = {torch.nn.Parameter: MissingParameter, torch.Tensor: MissingTensor}


def _missing(kind: type) -> type:
    """Returns the class of such a tensor in a child that does not have it."""
    if kind not in _MISSING:  # one that is known to hold its own bytes: see `movable.package_of`
        _MISSING[kind] = type(kind.__name__, (_Missing, kind), {})
    return _MISSING[kind]


_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def guard_forks_of(owner: Owner) -> None:
    """From now on, children have what they cannot read of this owner's tensors raise."""
    _owners.add(owner)


def _in_child() -> None:
    """Takes no lock: a thread that the child does not have may have held it."""
    for owner in list(_owners):
        for item in owner.below():
            is_missing = item.is_shown_below and not item.is_lifted and item.place is not None and item.place.tier is Tier.NVME
            tensor: Any
            if is_missing:
                for tensor in (item.tensor, *item.others):
                    if tensor is not None:
                        tensor.__class__ = _missing(own_class(tensor))
            elif item.is_shown_below and not item.is_lifted and item.tensor is not None:
                restore_class(item)  # nobody looks after it in the child: what waits is done now, in the child's own memory
                if isinstance(item, GradientItem):
                    item.multiply_in_child()


_writers: weakref.WeakSet[Any] = weakref.WeakSet()


def settle_before_forks(writer: Writer) -> None:
    """From now on, children have what this writer's threads were to write; they have none of those threads."""
    _writers.add(writer)


def _before() -> None:
    for writer in list(_writers):
        writer.settle()


os.register_at_fork(before=_before, after_in_child=_in_child)
