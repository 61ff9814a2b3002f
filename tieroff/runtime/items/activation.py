"""An activation: a storage that autograd saved for backward.

[Note: lent activations]
A Function that is not torch's may write what it finds among its saved tensors, as fused kernels scale gradients that forward
has computed. Of a graph that is retained, the next backward finds what was written. So what was brought up for one counts as
written, and leaves when nobody else holds that memory any more; mostly its graph is gone by then, and nothing is copied.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

from tieroff.core.tensor import TensorClass, Tier
from tieroff.runtime.backend.place import BlockPlace, Place
from tieroff.runtime.items.item import Item, Mover
from tieroff.runtime.items.residency import DEVICE, Event
from tieroff.runtime.tensors import is_storage_held, owners_by, storage_of

_REFERENCES_OF_ENGINE = 2  # of the view, and of the call that counts


class ActivationItem(Item):
    """One storage that autograd saved; it may be packed several times, as different views.

    Attributes:
        ordinal: how many other storages were packed before it in this step.
        packs: references to the `Packed` objects that are alive.
        is_kept: it does not leave the device: the program writes it behind autograd's back.
        is_lent: its bytes on the device went to somebody who may write them; see [Note: lent activations].
        lives: how many storages it stood for; see `Traffic.retire`.
    """

    __slots__ = ("is_kept", "is_lent", "lives", "ordinal", "packs")

    def __init__(self, ordinal: int, size_bytes: int, tier: Tier) -> None:
        super().__init__(("activation", ordinal), f"activation {ordinal}", TensorClass.ACTIVATION, size_bytes, tier)
        self.ordinal = ordinal
        self.packs: set[weakref.ref[object]] = set()
        self.is_kept = self.is_lent = False
        self.lives = 1

    def begin_again(self) -> None:
        """Stands for another storage of the same size from here on."""
        self.state, self.is_kept, self.is_lent = DEVICE, False, False
        self.lives += 1

    def views(self) -> Iterator[Any]:
        """Yields the `Packed` objects that are alive."""
        return (view for ref in tuple(self.packs) if (view := ref()) is not None)

    def before_free(self) -> None:
        for view in self.views():
            view.take_back()

    @property
    def is_held(self) -> bool:
        """True while somebody else than the engine holds its memory on the device."""
        assert self.device is not None
        owners = owners_by(storage_of(self.device)) - 1 + is_storage_held(self.device)
        lent = [view for view in self.views() if view.lent is not None]
        return owners > len(lent) or any(sys.getrefcount(view.lent) > _REFERENCES_OF_ENGINE for view in lent)

    def make_place(self, traffic: Mover) -> Place:
        return BlockPlace(traffic.stores[self.tier], self.size_bytes)

    def leave(self, traffic: Mover) -> None:
        """Leaves the device, unless it is kept there."""
        if self.is_kept:
            return
        if self.is_lent and self.device is not None:
            if self.is_held:
                self.refuse(traffic)
                return
            traffic.settle(self)
            traffic.send(self, Event.TOUCH)  # no copy from before tells what was written since
            self.is_lent = False
        traffic.leave(self)

    def refuse(self, traffic: Mover) -> None:
        """It cannot leave just now, and is asked again."""
        self.is_refused = True
        traffic.refused.append(self)
