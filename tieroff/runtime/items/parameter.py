"""A parameter as an item: the whole of it, or the shard that this rank has."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tieroff.core.tensor import TensorClass, Tier
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.item import Mover
from tieroff.runtime.items.offloaded import PLAIN, Guard, guard_class, may_be_watched, restore_class, set_data, unwatch, watch
from tieroff.runtime.items.residency import ARRIVING, BOTH, LEAVING
from tieroff.runtime.items.traffic import Traffic
from tieroff.runtime.movable import local_of, why_unmovable, with_local
from tieroff.storage.completion import Completion

# There is a copy below and one on the device, or one is on its way to the other.
_DOUBLED = frozenset({BOTH, LEAVING, ARRIVING})


def nothing_shown() -> None:
    """What `shown` gives where `LiveValues` knows of no value."""


class ParameterItem(HomeItem):
    """A parameter.

    Attributes:
        position: its index among the model's parameters.
        shown: gives the value of which `LiveValues` knows, for one that stays on the device, without keeping it alive: the next
            plan may send it below.
    """

    __slots__ = ("position", "shown")

    def __init__(self, position: int, name: str, tensor: torch.Tensor, tier: Tier, guard: Guard | None = None) -> None:
        super().__init__(("param", position), name, TensorClass.PARAMETER, tensor, tier, guard)
        self.position = position
        self.shown: Callable[[], torch.Tensor | None] = nothing_shown
        # The model holds it anyway; a weak reference would forbid torch.utils.swap_tensors. A lambda would be a line of Python.
        self.ref = itertools.repeat(tensor).__next__

    def adopt(self, traffic: Traffic) -> None:
        super().adopt(traffic)
        may_be_watched(self)

    def lift(self, traffic: Traffic) -> None:
        super().lift(traffic)
        self.watch(traffic)

    def watch(self, traffic: Traffic) -> None:
        """User code runs next: what it may write through `.data` is noticed, by whoever sees all writes or by its class."""
        if not traffic.is_watching:
            unwatch(self.tensor)
        elif self.state in _DOUBLED and (self.is_lifted or self.is_shown_below):
            watch(self.tensor)

    def rest(self, traffic: Traffic) -> None:
        """User code runs next, and finds the tensor below; a device copy that equals it stays for the next use."""
        if not self.is_lifted or (self.stays_resident and self.place is None):
            return  # it is below already, or lies nowhere else
        self.refresh(traffic)
        tensor = self.tensor
        is_plain = type(tensor) in PLAIN  # the class of another has a `__torch_function__` of its own
        if self.state is not BOTH or self.is_held or not is_plain or tensor is None or self.lower is None:
            self.leave(traffic)
        elif self.placeholder is not None:
            self.hide()
        else:
            unwatch(tensor)
            tensor.data = self.lower
            self.is_lifted = False
            self.note()
            guard_class(self)  # versions do not show what is written through NumPy: the first use ends the copy

    def on_second_copy(self) -> None:
        watch(self.tensor)

    def before_free(self) -> None:
        super().before_free()
        unwatch(self.tensor)
        if self.is_shown_below:
            restore_class(self)

    def touch(self, traffic: Mover) -> None:
        super().touch(traffic)
        unwatch(self.tensor)

    def reaches_data(self, traffic: Traffic) -> None:
        """User code gets `.data`, and may write it: what there is besides the memory that it gets is old from here on."""
        if self.is_lifted:
            self.touch(traffic)
        else:
            self._drop_copy(traffic)
            unwatch(self.tensor)

    @property
    def leaf(self) -> torch.Tensor | None:
        """The parameter that people hold: the tensor itself, but of one that is split over ranks."""
        return self.tensor

    @property
    def grad(self) -> torch.Tensor | None:
        """The tensor with the bytes of its gradient, or None."""
        return self.living.grad


class ShardItem(ParameterItem):
    """This rank's part of a parameter, of which people hold the DTensor.

    Attributes:
        arrival: the copy that made the device copy; None where no copy did.
    """

    __slots__ = ("_parameter", "arrival")

    def __init__(self, position: int, name: str, parameter: torch.Tensor, tier: Tier, guard: Guard | None = None) -> None:
        super().__init__(position, name, local_of(parameter), tier, guard)
        self._parameter = parameter
        self.is_part_of(parameter, local_of(parameter))
        self.arrival: Completion | None = None

    def arrived(self) -> None:
        self.arrival = self.arriving
        super().arrived()

    def before_free(self) -> None:
        self.arrival = None
        super().before_free()

    @property
    def leaf(self) -> torch.Tensor | None:
        return self._parameter

    @property
    def grad(self) -> torch.Tensor | None:
        """The local tensor of the gradient, which FSDP2 has made a part of all gradients that it reduced together."""
        grad = self._parameter.grad
        return local_of(grad) if grad is not None else None

    def is_current(self) -> bool:
        return super().is_current() and local_of(self._parameter) is self.tensor


def part_from_others(local: torch.Tensor) -> None:
    """Gives a parameter's local tensor that shares its memory some of its own, so that its bytes can leave by themselves."""
    if why_unmovable(local):
        set_data(local, local.detach().clone(memory_format=torch.contiguous_format))


def part_gradient(parameter: torch.Tensor, copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Gives a sharded parameter's gradient memory of its own.

    FSDP2 makes gradients as views of the memory that it reduced together. A view keeps all of that alive, whatever its `.data`
    is set to: so the gradient is another `DTensor` afterwards, equal in everything else.

    Args:
        copied: makes a copy.
    """
    grad = parameter.grad
    if grad is None or not is_traceable_wrapper_subclass(grad):
        return
    local = local_of(grad)
    if local._base is None and not why_unmovable(local):
        return
    parameter.grad = with_local(grad, copied(local))
