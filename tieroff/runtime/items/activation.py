"""An activation: a storage that autograd saved for backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from tieroff.core.tensor import TensorClass, Tier
from tieroff.runtime.backend.place import BlockPlace, Place
from tieroff.runtime.items.item import Item, Mover
from tieroff.runtime.items.residency import DEVICE


class ActivationItem(Item):
    """One storage that autograd saved; it may be packed several times, as different views.

    Attributes:
        ordinal: how many other storages were packed before it in this step.
        packs: references to the `Packed` objects that are alive.
        is_kept: it does not leave the device: the program writes it behind autograd's back.
        lives: how many storages it stood for; see `Traffic.retire`.
    """

    __slots__ = ("is_kept", "lives", "ordinal", "packs")

    def __init__(self, ordinal: int, size_bytes: int, tier: Tier) -> None:
        super().__init__(("activation", ordinal), f"activation {ordinal}", TensorClass.ACTIVATION, size_bytes, tier)
        self.ordinal = ordinal
        self.packs: set[weakref.ref[object]] = set()
        self.is_kept = False
        self.lives = 1

    def begin_again(self) -> None:
        """Stands for another storage of the same size from here on."""
        self.state, self.is_kept = DEVICE, False
        self.lives += 1

    def views(self) -> Iterator[Any]:
        """Yields the `Packed` objects that are alive."""
        return (view for ref in tuple(self.packs) if (view := ref()) is not None)

    def make_place(self, traffic: Mover) -> Place:
        return BlockPlace(traffic.stores[self.tier], self.size_bytes)

    def leave(self, traffic: Mover) -> None:
        """Leaves the device, unless it is kept there."""
        if not self.is_kept:
            traffic.leave(self)
