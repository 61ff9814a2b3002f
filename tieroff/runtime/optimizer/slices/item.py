"""A state tensor that begins below: nothing of it was ever on the device as a whole."""

from __future__ import annotations

import weakref
from collections.abc import Hashable

import torch

from tieroff.core.tensor import TensorClass, Tier
from tieroff.runtime.backend.place import HomePlace
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.offloaded import Guard, set_data
from tieroff.runtime.items.residency import LOWER, State
from tieroff.runtime.items.traffic import Traffic


class SlicedState(HomeItem):
    """State of which the first update makes row after row.

    Args:
        key, name, tier, guard: see `HomeItem`.
        like: has the geometry of the tensor, which `begin` makes.
    """

    __slots__ = ()

    def __init__(self, key: Hashable, name: str, like: torch.Tensor, tier: Tier, guard: Guard | None) -> None:
        super().__init__(key, name, TensorClass.OPTIMIZER, like, tier, guard)
        self.is_sliced = True

    @property
    def begins(self) -> State:
        return LOWER

    def begin(self, traffic: Traffic, place: HomePlace) -> torch.Tensor:
        """Returns the tensor, whose value is what the place holds; the caller has somebody keep it."""
        backend, like = traffic.backend, self.living
        self.placeholder = backend.placeholder(like, f"{self.name} lies below the device: tieroff has its bytes")
        tensor = torch.empty(0, dtype=self.dtype, device=backend.device)
        self.ref, self.place, self.is_lifted = weakref.ref(tensor), place, False
        traffic.register_memory(lower := self.lie_in(place))
        set_data(tensor, lower if self.placeholder is None else self.placeholder)
        self.hide()
        self.note()
        return tensor
