"""Contents: what a step finds as it begins, beside its model and inputs. A plan has room for that and for nothing else.

[Note: contents]
Which parameters the optimizer updates, in which order (so what each bucket holds), which of them have state, which gradients
are there from before, what optimizers have made that are not attached: each takes memory, and none shows in the inputs of a
forward. So they are a part of what makes a kind of step. The first step of a program makes the state that all later ones find:
a recorded step is of the kind that the next one begins as, since its trace is a ring, which has at its begin what is there at
its end. Where user code changes the optimizer between a step's begin and its update, that update goes without the plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from tieroff.runtime.items.offloaded import untouched
from tieroff.runtime.managed.model import ManagedModel

_GRADIENT = attrgetter("grad")


@dataclass(frozen=True, slots=True)
class Held:
    """What an optimizer holds; parameters are named by identity.

    Attributes:
        updated: its parameters, in order.
        with_state: those that have state, and how many entries each.
    """

    updated: tuple[int, ...] = ()
    with_state: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Contents:
    """See [Note: contents].

    Attributes:
        held: by the optimizer.
        unattached: what others hold, each by itself.
        with_gradient: whether each parameter, of the model and then of the optimizer, has a gradient.
    """

    held: Held = Held()
    unattached: tuple[Held, ...] = ()
    with_gradient: bytes = b""


def held_by(optimizer: torch.optim.Optimizer | None) -> Held:
    """Returns what an optimizer holds now; nothing where there is none."""
    if optimizer is None:
        return Held()
    state: dict[Any, Any] = optimizer.state
    entries = [len(values) if isinstance(values, dict) else 0 for values in state.values()]
    return Held(tuple(map(id, _updated_by(optimizer))), tuple(zip(map(id, state), entries, strict=True)))


def contents_of(used: Iterable[torch.Tensor], managed: ManagedModel) -> Contents:
    """Returns the contents of a step that begins now.

    Args:
        used: the parameters of the model.
        managed: knows its optimizers.
    """
    optimizer = managed.optimizer
    updated = _updated_by(optimizer) if optimizer is not None else []
    with untouched():  # of a subclass, too, whether there is one, without a call of its own
        gradients = list(map(_GRADIENT, (*used, *updated)))
    others = tuple(map(held_by, managed.unattached.optimizers()))
    return Contents(held_by(optimizer), others, bytes(gradient is not None for gradient in gradients))


def _updated_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
