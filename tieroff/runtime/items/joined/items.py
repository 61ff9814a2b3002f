"""Items of several tensors that move as one; see [Note: several parts] in joint.py."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from tieroff.core.tensor import TensorClass, Tier
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.item import Mover
from tieroff.runtime.items.joined.joint import Joint
from tieroff.runtime.items.offloaded import Guard, address_of
from tieroff.runtime.items.parameter import ParameterItem
from tieroff.runtime.items.residency import ON_DEVICE
from tieroff.runtime.items.traffic import Traffic
from tieroff.runtime.movable import is_wrapper, with_parts

if TYPE_CHECKING:
    _Home = HomeItem
else:
    _Home = object  # two bases with slots of their own do not go together


class _Joined(_Home):
    """What differs from a home of one tensor: the others lie wherever the first does, and count as it does.

    Attributes:
        joint: the memory of all of them.
    """

    __slots__ = ()
    joint: Joint

    @property
    def others(self) -> tuple[torch.Tensor, ...]:
        return self.joint.others

    @property
    def sharers(self) -> int:
        return 1 + len(self.joint.others)

    def adopt(self, traffic: Traffic) -> None:
        self.joint.gather(traffic.backend.empty(self.size_bytes))
        super().adopt(traffic)
        if self.placeholder is not None:
            message = f"{self.name} lies below the device: tieroff has its bytes"
            self.joint.make_placeholders(lambda value: traffic.backend.placeholder(value, message))

    def _follow_first(self) -> None:
        """The others lie where the first does."""
        if self.is_unmanaged:
            return
        if self.is_lifted and self.value is not None:
            self.joint.follow(self.value)
        elif self.placeholder is not None and not self.is_lifted:
            self.joint.hide()
        elif self.lower is not None and not self.is_lifted:
            self.joint.follow(self.lower)

    def follow(self) -> None:
        self._follow_first()

    def lift(self, traffic: Traffic) -> None:
        super().lift(traffic)
        self._follow_first()

    def before_free(self) -> None:
        super().before_free()
        self._follow_first()

    def hide(self) -> None:
        super().hide()
        self._follow_first()

    def put_back(self, traffic: Mover) -> None:
        super().put_back(traffic)
        self._follow_first()

    def _is_where_it_was_put(self, tensor: torch.Tensor | None) -> bool:
        return super()._is_where_it_was_put(tensor) and self.joint.is_as_put

    def is_as_left(self) -> bool:
        tensor = self.ref()
        if tensor is None or self.placeholder is not None or self.may_be_written or self.is_unmanaged:
            return False
        at = self.value_address if self.is_lifted else self.lower_address
        if address_of(tensor) != at or not self.joint.lies_at(at):
            return False
        return not self.was_written()

    def was_written(self) -> bool:
        return super().was_written() or (self.tensor is not None and self.joint.was_written())

    def note(self) -> None:
        super().note()
        self.joint.note()

    def may_take(self, value: torch.Tensor) -> bool:
        return False  # the others do not lie on it

    def unmanage(self, traffic: Mover) -> None:
        traffic.settle(self)
        # Where the first went the others do not go: each gets its bytes back, since what the engine has of them ends here.
        memory = self.device if self.state in ON_DEVICE else self.lower
        if memory is not None and self.value is not None:
            memory = memory.to(self.value.device)
        self.joint.part(memory)
        super().unmanage(traffic)

    def detach(self, traffic: Traffic) -> None:
        super().detach(traffic)
        self.joint.part(None)
        self.joint.let_go()

    def on_memory(self, held: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        found = self.joint.held_on(held, memory)
        if found is not None:
            return found
        return with_parts(held, iter(self.joint.views(memory))) if is_wrapper(held) else memory


class JoinedParameter(_Joined, ParameterItem):
    """A parameter of several tensors; people hold a wrapper subclass of them, or the first."""

    __slots__ = ("_parameter", "joint")

    def __init__(
        self,
        position: int,
        name: str,
        parameter: torch.Tensor,
        parts: Sequence[torch.Tensor],
        tier: Tier,
        guard: Guard | None = None,
    ) -> None:
        super().__init__(position, name, parts[0], tier, guard)
        self._parameter = parameter
        self.is_part_of(parameter, parts[0])
        self.joint = Joint(parts)
        self.size_bytes = self.joint.size_bytes

    @property
    def leaf(self) -> torch.Tensor | None:
        return self._parameter

    @property
    def grad(self) -> torch.Tensor | None:
        return self._parameter.grad


class JoinedState(_Joined, HomeItem):
    """Optimizer state of several tensors: a wrapper subclass of them, or an object that holds them."""

    __slots__ = ("joint",)

    def __init__(self, key: Hashable, name: str, parts: Sequence[torch.Tensor], tier: Tier, guard: Guard | None = None) -> None:
        super().__init__(key, name, TensorClass.OPTIMIZER, parts[0], tier, guard)
        self.joint = Joint(parts)
        self.size_bytes = self.joint.size_bytes
