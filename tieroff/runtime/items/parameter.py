"""A parameter as an item: the whole of it, or the shard that this rank has; and its gradient."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tieroff.core.tensor import TensorClass, Tier
from tieroff.runtime.items.hollow import Guard, set_data
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.movable import local_of, why_unmovable
from tieroff.runtime.items.residency import State
from tieroff.runtime.tensors import owners_by


class ParameterItem(HomeItem):
    """A parameter.

    Attributes:
        position: its index among the model's parameters.
    """

    __slots__ = ("position",)

    def __init__(self, position: int, name: str, tensor: torch.Tensor, tier: Tier, guard: Guard | None = None) -> None:
        super().__init__(("param", position), name, TensorClass.PARAMETER, tensor, tier, guard)
        self.position = position
        self._ref = lambda: tensor  # the model holds it anyway; a weak reference would forbid torch.utils.swap_tensors

    @property
    def leaf(self) -> torch.Tensor | None:
        """The parameter that people hold: the tensor itself, but of one that is split over ranks."""
        return self.tensor

    @property
    def grad(self) -> torch.Tensor | None:
        """The tensor with the bytes of its gradient, or None."""
        return self.living.grad


class ShardItem(ParameterItem):
    """This rank's part of a parameter, of which people hold the DTensor."""

    __slots__ = ("_parameter",)

    def __init__(self, position: int, name: str, parameter: torch.Tensor, tier: Tier, guard: Guard | None = None) -> None:
        super().__init__(position, name, local_of(parameter), tier, guard)
        self._parameter = parameter

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


class GradientItem(HomeItem):
    """A gradient. The next one of its parameter takes its item over when it is dead; see `Traffic.retire`."""

    __slots__ = ()

    def __init__(self, of: ParameterItem, tensor: torch.Tensor, tier: Tier) -> None:
        name = f"gradient of {of.name}"
        super().__init__(("gradient", of.position), name, TensorClass.GRADIENT, tensor, tier, of.guard)

    def begin_again(self, tensor: torch.Tensor, guard: Guard | None) -> bool:
        """Stands for another tensor of the same kind from here on; False, with nothing done, where it cannot.

        It must not be in flight, and its own tensor dead. What somebody holds of that one's memory below is his.
        """
        if (self.dtype, self.size, self.stride) != (tensor.dtype, tuple(tensor.size()), tuple(tensor.stride())):
            return False
        if self.lower is None if self.place is not None else self.lower is not None:
            return False
        if self.lower is not None and owners_by(self._lower_storage) > 1:
            return False
        self._ref, self.version = weakref.ref(tensor), tensor._version
        self.is_lifted, self.may_be_written, self.is_let_go = True, False, False
        self.guard, self.pins, self.readers, self.state = guard, 0, 0, State.DEVICE
        return True


def part_from_others(local: torch.Tensor) -> None:
    """Gives a parameter's local tensor that shares its memory some of its own, so that its bytes can leave by themselves."""
    if why_unmovable(local):
        set_data(local, local.detach().clone(memory_format=torch.contiguous_format))


def part_gradient(parameter: torch.Tensor) -> None:
    """Gives a sharded parameter's gradient memory of its own.

    FSDP2 makes gradients as views of the memory that it reduced together. A view keeps all of that alive, whatever its `.data`
    is set to: so the gradient is another `DTensor` afterwards, equal in everything else.
    """
    grad = parameter.grad
    if grad is None or not is_traceable_wrapper_subclass(grad):
        return
    local = local_of(grad)
    if local._base is None and not why_unmovable(local):
        return
    names, context = grad.__tensor_flatten__()
    parts = {name: getattr(grad, name) for name in names}
    parts = {name: part.detach().clone() if part is local else part for name, part in parts.items()}
    parameter.grad = type(grad).__tensor_unflatten__(parts, context, grad.shape, grad.stride())
