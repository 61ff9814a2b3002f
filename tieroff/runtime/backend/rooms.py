"""Rooms: device memory that a small item keeps from one fetch to the next.

[Note: rooms]
To take memory, make tensors over it and give it back costs some 10 us each time, more than to copy a few KiB. So in planned
steps a tensor whose place is near (see `Place.is_near`) is fetched to the same memory every time. What autograd or anybody else
still holds of it from the time before is not written: the item gets another room then. Rooms stay while their items are below,
in all no more than `ROOMS_BYTES_MAX`; with the default `[plan] min_bytes` no tensor is small enough to have one. Steps that are
recorded have none: their traces say how long each memory lives.
"""

from __future__ import annotations

import torch

from tieroff.runtime.tensors import is_storage_held, owners_by, storage_of, view_of

ROOMS_BYTES_MAX = 4 << 20
"""Of one engine's rooms, and as much of the places below that spare items keep; about what an allocator's free lists hold."""


class Room:
    """Device memory of one item.

    Attributes:
        memory: as a 1-d uint8 tensor.
        address: its first byte.
        views: tensors over it that stay with it, by geometry; nobody else gets them, but what shares their memory.
    """

    __slots__ = ("_storage", "address", "memory", "views")

    def __init__(self, size_bytes: int) -> None:
        with torch.inference_mode(False):  # it outlives whatever runs now
            self.memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        self.address = self.memory.data_ptr()
        self.views: dict[tuple[object, ...], torch.Tensor] = {}
        self._storage = storage_of(self.memory)

    @property
    def is_free(self) -> bool:
        """True when nobody else holds its memory."""
        return self.holders == 0

    def view(self, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int | torch.SymInt) -> torch.Tensor:
        """Returns a tensor of this geometry over it (offset in elements), which counts as an owner."""
        key = (dtype, size, stride, offset)
        view = self.views.get(key)
        if view is None:
            with torch.inference_mode(False):
                view = self.views[key] = view_of(self.memory, dtype, tuple(size), stride, int(offset))
        return view.detach()

    def whole(self, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        """Returns the one tensor of this geometry that its item lifts others to."""
        value = self.views.get(())
        if value is None:
            with torch.inference_mode(False):
                value = self.views[()] = view_of(self.memory, dtype, size, stride, 0)
        return value

    @property
    def holders(self) -> int:
        """How many tensors share it besides its own; a storage that is held counts as one."""
        return owners_by(self._storage) - 1 - len(self.views) + is_storage_held(self.memory)
