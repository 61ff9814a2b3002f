"""An activation: a storage that autograd saved for backward."""

from __future__ import annotations

from tieroff.core.tensor import TensorClass, Tier
from tieroff.runtime.backend.place import BlockPlace, Place
from tieroff.runtime.items.item import Item, Mover


class ActivationItem(Item):
    """One storage that autograd saved; it may be packed several times, as different views.

    Attributes:
        ordinal: how many other storages were packed before it in this step.
        packs: references to the `Packed` objects that are alive.
        is_kept: it does not leave the device: the program writes it behind autograd's back.
    """

    __slots__ = ("is_kept", "ordinal", "packs")

    def __init__(self, ordinal: int, size_bytes: int, tier: Tier) -> None:
        super().__init__(("activation", ordinal), f"activation {ordinal}", TensorClass.ACTIVATION, size_bytes, tier)
        self.ordinal = ordinal
        self.packs: set[object] = set()
        self.is_kept = False

    def make_place(self, traffic: Mover) -> Place:
        return BlockPlace(traffic.stores[self.tier], self.size_bytes)

    def leave(self, traffic: Mover) -> None:
        """Leaves the device, unless it is kept there."""
        if not self.is_kept:
            traffic.leave(self)
