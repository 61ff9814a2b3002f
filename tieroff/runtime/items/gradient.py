"""Gradients as items: they can be multiplied while they lie below, without moving for it.

[Note: factors that wait]
Clipping multiplies every gradient by one number, between backward and update. Where a gradient lies below, that would bring it
up, or read and write it through its mapping, and send it down again, right before its update brings it up once more. So the
factor waits. What lies below is then without it, and the tensor's value is the bytes below times its factors, in their order:
the very `mul_` of the program, made later. So is its `zero_` (`zero_grad(set_to_none=False)`), of one that lies below a device:
nothing moves for it, and it waits for no update that reads the bytes.
Factors belong to the copy below, so they count only while that is valid (states LOWER, ARRIVING, BOTH, UPDATING); bytes of the
device in other states have them. A copy that comes up gets them before anybody sees it. Whatever else wants the bytes below has
them multiplied there first. An exception may come between any two lines: how many factors are in is told by the version counter
of the memory that was multiplied, which moves with the multiplication itself.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tieroff.core.tensor import TensorClass, Tier
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.item import Mover
from tieroff.runtime.items.offloaded import guard_class, is_offloaded
from tieroff.runtime.items.parameter import ParameterItem
from tieroff.runtime.items.residency import ARRIVING, BOTH, LOWER, UPDATING, Event
from tieroff.runtime.items.traffic import Traffic


class Zero(Enum):
    """The one of its kind that sets a gradient to 0, which no product does: infinities stay, and signs."""

    ZERO = "zero"


ZERO: Final = Zero.ZERO
Factor = torch.Tensor | float | Zero


@dataclass(frozen=True, slots=True)
class Waiting:
    """The factors of one tensor, oldest first.

    Attributes:
        factors: numbers, tensors of shape [] that nobody writes, or ZERO.
        below_version: of the memory below, before the first of them.
    """

    factors: tuple[Factor, ...]
    below_version: int

    def and_then(self, factor: Factor) -> Waiting:
        """Returns these with one more."""
        return Waiting((*self.factors, factor), self.below_version)

    def apply(self, memory: torch.Tensor, version: int) -> None:
        """Multiplies memory by all of them that are not in yet; `version`: its version when none was.

        It is no op of the step that may be recorded just now: it stands for one of user code.
        """
        with torch.no_grad(), _disable_current_modes():
            for factor in self.left_of(memory, version):
                if factor is ZERO:
                    memory.zero_()
                    continue
                if isinstance(factor, torch.Tensor) and factor.device != memory.device:  # the memory is the host's
                    factor = factor.to(memory.device)
                memory.mul_(factor)

    def left_of(self, memory: torch.Tensor, version: int) -> tuple[Factor, ...]:
        """Returns those that are not in memory yet; `version`: its version when none was."""
        return self.factors[memory._version - version :]


# States in which the copy below is valid: an update reads it.
_HAS_BELOW = (LOWER, ARRIVING, BOTH, UPDATING)


class GradientItem(HomeItem):
    """The gradient of a moved parameter.

    Attributes:
        waiting: see [Note: factors that wait]; None: there are none.
    """

    __slots__ = ("_arrived_version", "waiting")

    def __init__(self, of: ParameterItem, tensor: torch.Tensor, tier: Tier) -> None:
        name = f"gradient of {of.name}"
        super().__init__(("gradient", of.position), name, TensorClass.GRADIENT, tensor, tier, of.guard)
        self.waiting: Waiting | None = None
        self._arrived_version = 0

    def may_wait(self) -> bool:
        """True when a factor may wait until the gradient comes up: nobody but the engine sees its bytes below."""
        tensor, has_copy_below = self.tensor, self.state in _HAS_BELOW and self.lower is not None
        is_guarded = is_offloaded(tensor)
        return has_copy_below and is_guarded and not self.is_lifted and not self.stays_below and self.is_current()

    def wait_with(self, factor: Factor) -> None:
        """The gradient is multiplied by a number when it comes up next."""
        assert self.lower is not None
        waiting = self.waiting if self.waiting is not None else Waiting((), self.lower._version)
        self.waiting = waiting.and_then(factor)

    def wait_with_zero(self) -> None:
        """The gradient, which lies below alone, is set to 0 when it comes up next; other factors make no difference."""
        assert self.lower is not None and self.device is None
        self.waiting = Waiting((ZERO,), self.lower._version)

    def multiply_below(self, traffic: Mover) -> None:
        """Somebody is about to use the bytes below as they are: what waits is done there."""
        waiting, lower = self.waiting, self.lower
        if waiting is None or lower is None or self.state not in _HAS_BELOW:
            return
        traffic.settle(self)
        if self.device is not None:
            traffic.send(self, Event.DROP)  # older than what will lie below
        waiting.apply(lower, waiting.below_version)
        self.waiting = None
        self.note()

    def multiply_in_child(self) -> None:
        """The same in a forked child, which has nothing that moves, and memory of its own."""
        if self.waiting is not None and self.lower is not None and self.state in _HAS_BELOW:
            self.waiting.apply(self.lower, self.waiting.below_version)

    def scaled(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the gradient's value, given that of its bytes below, which is not changed."""
        if self.waiting is None or self.state not in _HAS_BELOW:
            return value
        copy = value.detach().clone()
        self.waiting.apply(copy, copy._version)
        return copy

    def source(self) -> torch.Tensor:
        self.waiting = None  # they are in the device's bytes
        source = super().source()
        if self.guard is not None:
            self.guard.leaves(self)
        return source

    def arrived(self) -> None:
        super().arrived()
        self._arrived_version = self.valid_value._version

    def before_expose(self) -> None:
        if self.waiting is not None and self.state is BOTH:
            with self.guard.multiplying() if self.guard is not None else contextlib.nullcontext():
                self.waiting.apply(self.valid_value, self._arrived_version)

    def is_below_now(self) -> None:
        if self.guard is not None and self.guard.watches(self):
            guard_class(self)

    def detach(self, traffic: Traffic) -> None:
        if self.is_shown_below and not self.is_lifted:
            self.multiply_below(traffic)
        super().detach(traffic)

    def put_back(self, traffic: Mover) -> None:
        self.waiting = None
        super().put_back(traffic)
