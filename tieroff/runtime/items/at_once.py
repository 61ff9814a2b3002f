"""Small tensors that people hold, moved many at once: what a bucket of optimizer state needs in one tick.

[Note: moved at once]
A tensor of some KiB is copied in less than a microsecond; what its move costs is the Python around it. So where a tick moves
many, each is looked at once, one call makes all copies, and then each is told. That is only for the usual case: the item has a
near place and a room (backend/rooms.py), lies where the engine put it, and nobody else holds that memory. Whatever is different
takes the general way, one by one: `Traffic.fetch`, `Traffic.store`, `HomeItem.leave` and `HomeItem.lift` do the same and are
right for all. Loops are written out, without a call for each look: there are three looks at a tensor for every copy of it.
An exception may come between any two lines: an item's state changes after its bytes were copied and before anybody sees them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeGuard

import torch

from tieroff.runtime.backend.place import HomePlace
from tieroff.runtime.backend.rooms import Room
from tieroff.runtime.items.hollow import PLAIN, unwatch
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.item import Item
from tieroff.runtime.items.parameter import ParameterItem
from tieroff.runtime.items.residency import BOTH, DEVICE, LOWER
from tieroff.runtime.items.traffic import Traffic
from tieroff.runtime.tensors import is_storage_held, owners_by, storage_of

# Kinds of items of which nobody else has to know when their bytes move.
_SIMPLE = frozenset({HomeItem, ParameterItem})


class Route:
    """The way of a small item between its room and its place, with what a move needs at hand.

    Attributes:
        room, place, lower: see `HomeItem`.
        memory, address, value: the room's.
        lower_address: of the place.
        up, down: copies between them, as `Engine.copy_now` takes them.
    """

    __slots__ = (
        "_block",
        "_lower_storage",
        "address",
        "down",
        "lower",
        "lower_address",
        "memory",
        "place",
        "room",
        "up",
        "value",
    )

    def __init__(self, item: HomeItem, room: Room, place: HomePlace, lower: torch.Tensor) -> None:
        self.room, self.place, self.lower = room, place, lower
        self.memory, self.address = room.memory, room.address
        self.value = room.whole(item.dtype, item.size, item.stride)
        self.lower_address = item.lower_address
        self.up = (self.address, self.lower_address, item.size_bytes)
        self.down = (self.lower_address, self.address, item.size_bytes)
        self._block, self._lower_storage = place.block, storage_of(lower)

    def is_idle(self) -> bool:
        """True while no copy of the place is under way."""
        return not self._block.transfers

    def holders_below(self) -> int:
        """How many tensors share the memory below besides the engine's view."""
        return owners_by(self._lower_storage) - 1 + is_storage_held(self.lower)


def _route_of(item: Item) -> Route | None:
    """Returns the way of an item that may move at once, whatever it does just now; None for any other."""
    route = item.route
    if route is not None and item.room is route.room and item.place is route.place:
        return route
    item.route = None
    if type(item) not in _SIMPLE:
        return None
    assert isinstance(item, HomeItem)
    room, place, lower = item.room, item.place, item.lower
    if not isinstance(place, HomePlace) or not place.is_near or lower is None or room is None or item.hollow is not None:
        return None
    item.route = Route(item, room, place, lower)
    return item.route


def fetch_all(traffic: Traffic, items: Iterable[Item]) -> None:
    """Begins to bring up those items that lie below; as `Traffic.fetch` does."""
    ready: list[tuple[HomeItem, Route]] = []
    copies: list[int] = []
    for item in items:
        if item.state is not LOWER:
            continue
        route = _route_of(item)
        if route is not None and isinstance(item, HomeItem) and _may_come(item, route):
            ready.append((item, route))
            copies += route.up
        elif not item.stays_below:
            traffic.fetch(item)
    if ready and not traffic.copy_all(ready, copies, "h2d"):
        for item, _ in ready:
            traffic.fetch(item)
        return
    for item, route in ready:
        traffic.hold(item, route.memory)
        item.state = BOTH
        item.value, item.value_address = route.value, route.address
        item.note()
        if traffic.is_watching:
            item.doubled()


def _may_come(item: HomeItem, route: Route) -> bool:
    """True for one that lies below where the engine put it, and that nobody but its tensor holds there, or in its room."""
    tensor = item.tensor
    return (
        tensor is not None
        and type(tensor) in PLAIN
        and tensor.data_ptr() == route.lower_address
        and not item.readers
        and route.is_idle()
        and route.holders_below() <= 1
        and route.room.is_free
    )


def show_all(items: Sequence[HomeItem]) -> Sequence[HomeItem]:
    """Lifts items that were brought up, to be written; returns those that are left, with nothing done, to the general way."""
    if torch._C._len_torch_dispatch_stack():
        return items
    left: list[HomeItem] = []
    for item in items:
        route = item.route
        if (
            route is None
            or item.state is not BOTH
            or item.is_lifted
            or item.readers
            or item.lower is not route.lower
            or item.value is not route.value
            or not item.is_as_left()
            or route.holders_below() > 1
        ):
            left.append(item)
            continue
        tensor = item.living
        unwatch(tensor)  # its user is an optimizer's step
        tensor.data = route.value
        item.is_lifted, item.is_refused = True, False
        item.state = DEVICE  # the device copy counts from here on, wherever an exception may come
        item.note()
    return left


def store_all(traffic: Traffic, items: Iterable[Item]) -> None:
    """Begins to copy below those items whose valid copy is on the device alone; as `Traffic.store` does."""
    ready: list[tuple[HomeItem, Route]] = []
    copies: list[int] = []
    for item in items:
        route = _route_of(item)
        if route is None or not isinstance(item, HomeItem) or not _is_only_above(item, route):
            traffic.store(item)
            continue
        ready.append((item, route))
        copies += route.down
        item.note()  # what is written from here on is newer than the copy
        if traffic.is_watching:
            item.doubled()
    if ready and not traffic.copy_all(ready, copies, "d2h"):
        for item, _ in ready:
            traffic.store(item)
        return
    for item, _ in ready:
        item.state = BOTH


def _is_only_above(item: HomeItem, route: Route) -> bool:
    """True for one that its tensor lies on in its room, while its bytes below are void and nobody's."""
    tensor = item.tensor
    return (
        tensor is not None
        and item.state is DEVICE
        and item.is_lifted
        and item.device is route.memory
        and type(tensor) in PLAIN
        and tensor.data_ptr() == route.address
        and route.is_idle()
        and route.holders_below() == 0
    )


def leave_all(traffic: Traffic, items: Sequence[Item]) -> None:
    """Sends items below; as their own `leave` does."""
    store_all(traffic, [item for item in items if item.state is DEVICE and _may_go(item)])
    for item in items:
        if item.state is not BOTH or not _may_go(item) or not item.is_as_left():
            item.leave(traffic)
            continue
        traffic.free_device(item)
        item.state = LOWER


def _may_go(item: Item) -> TypeGuard[HomeItem]:
    """True for one in its room that nobody but its tensor holds."""
    route = _route_of(item)
    if route is None or not isinstance(item, HomeItem) or item.pins or item.readers or item.device is not route.memory:
        return False
    return not item.is_lifted or route.room.holders <= 1
