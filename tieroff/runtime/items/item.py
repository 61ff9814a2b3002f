"""An item: one tensor under the engine's care."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Protocol

import torch

from tieroff.core.tensor import TensorClass, Tier
from tieroff.runtime.backend.place import Place
from tieroff.runtime.items.residency import DEVICE, Event, State
from tieroff.runtime.movable import with_local
from tieroff.storage.completion import Completion
from tieroff.storage.store import Store


class Mover(Protocol):
    """What an item asks of `Traffic`, which moves its bytes."""

    stores: dict[Tier, Store]
    refused: list[Item]

    def hold(self, item: Item, device: torch.Tensor) -> None:
        """Takes a device copy that the program made under the engine's care."""

    def register_memory(self, memory: torch.Tensor) -> None:
        """Memory is an item's from here on."""

    def send(self, item: Item, event: Event) -> None:
        """Applies an event to the item's residency."""

    def fetch(self, item: Item) -> None:
        """Begins a copy to the device of what lies below."""

    def leave(self, item: Item) -> None:
        """Frees the item's device copy."""

    def release(self, item: Item) -> None:
        """Lets go of the item's device copy, whatever its state; nothing may be in flight."""

    def settle(self, item: Item) -> None:
        """Waits for whatever of the item is in flight."""

    def flush(self) -> None:
        """Blocks the host until every copy below is there."""


class Item:
    """One tensor's bytes: a device copy, a place below, or both.

    Attributes:
        key: what the trace calls it: ("param", position), ("activation", ordinal), ...
        name: for messages.
        kind: its class.
        class_name: of that; an `Enum` looks its values up.
        size_bytes: bytes that count in the tiers.
        index: its tensor in the trace that runs, or -1.
        stays_resident: the plan that runs has it on the device all the time.
        tier: the lower tier it goes to.
        device: the device copy as a 1-d uint8 tensor; None in state LOWER.
        place: the room below, or None before the first copy out.
        is_given: the backend gave the device copy's memory; None while nobody asked.
        state: see `runtime/items/residency.py`.
        outer_ref: gives the `DTensor` that people hold, of which the tensor is this rank's part; None where it is of none.
        is_refused: it was to leave and could not, and nobody used it since; see [Note: refusals] in execution/refusals.py.
    """

    __slots__ = (
        "__weakref__",
        "arriving",
        "class_name",
        "device",
        "index",
        "is_given",
        "is_refused",
        "key",
        "kind",
        "leaving",
        "name",
        "outer_ref",
        "place",
        "size_bytes",
        "state",
        "stays_resident",
        "tier",
        "updating",
    )

    def __init__(self, key: Hashable, name: str, kind: TensorClass, size_bytes: int, tier: Tier) -> None:
        self.key = key
        self.name = name
        self.kind, self.class_name = kind, kind.value
        self.size_bytes = size_bytes
        self.index = -1
        self.stays_resident = self.is_refused = False
        self.tier = tier
        self.device: torch.Tensor | None = None
        self.is_given: bool | None = None
        self.place: Place | None = None
        self.state = self.begins
        self.leaving: Completion | None = None
        self.arriving: Completion | None = None
        self.updating: Completion | None = None
        self.outer_ref: Callable[[], torch.Tensor | None] | None = None

    @property
    def begins(self) -> State:
        """The state in which an item is made."""
        return DEVICE

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor that people hold, where it is known; None when it died, or for memory that only autograd knows."""
        return None

    @property
    def outer(self) -> torch.Tensor | None:
        """The `DTensor` that people hold, where the tensor is this rank's part of one."""
        return self.outer_ref() if self.outer_ref is not None else None

    def is_part_of(self, outer: torch.Tensor | None, tensor: torch.Tensor) -> None:
        """People hold `outer` for an item's tensor; None or the tensor itself: they hold no other."""
        if outer is not None and outer is not tensor:
            self.outer_ref = weakref.ref(outer)

    @property
    def others(self) -> tuple[torch.Tensor, ...]:
        """Tensors that lie in the item's memory besides its own; see [Note: several parts] in joined/joint.py."""
        return ()

    @property
    def sharers(self) -> int:
        """How many tensors of people lie in the item's memory."""
        return 1

    def on_memory(self, held: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Returns what one of the item's tensors, or the one that people hold for it, is on other memory."""
        return with_local(held, memory)

    def follow(self) -> None:
        """The others lie where the item's own tensor does."""

    # What a kind of item does when its copies change; overridden by those that people can reach.
    def make_place(self, traffic: Mover) -> Place:
        raise AssertionError("a concrete item makes its place")

    def part_with_lent(self) -> None:
        """Bytes below are about to be written: those that somebody outside reads are left to him."""

    def source(self) -> torch.Tensor:
        """Returns the device copy to be written out."""
        assert self.device is not None
        return self.device

    @property
    def stays_below(self) -> bool:
        """True while it is used where it lies below, so that nothing need be fetched."""
        return False

    def refresh(self, traffic: Mover) -> None:
        """Makes what was written since the last copy count."""

    def before_free(self) -> None:
        """The device copy is about to be let go."""

    def before_fetch(self) -> None:
        """A copy to the device of what lies below is about to begin: what is written below from here on is not in it."""

    def arrived(self) -> None:
        """The device copy is valid again."""

    def on_second_copy(self) -> None:
        """There is a copy below and one on the device from here on, or one is on its way to the other."""

    def leave(self, traffic: Mover) -> None:
        """Leaves the device, with the latest value."""
        traffic.leave(self)
