"""The home items of one engine, and how they leave and come home.

[Note: late evictions]
The copies of what the last update wrote would hold up the end of the step, since nothing else is left to do. So a plan may let
optimizer state go in the next step, where nothing uses it. The runtime begins to copy it when user code runs again, after
the update, and hides it: people find it offloaded from there on, as if it lay below, and whoever uses it has it brought up,
which here means shown, and written: then it is copied anew. So between two steps nothing else has to know. Its bytes count as
long as it is there: a step that follows no such plan, a forward that is no part of a step, a sleeping model and a call that
wants its room have it leave first, as does a step that leaves its plan. Where tensors are shown below (the device is the host)
they leave at the end of their own step: what is not there yet cannot be shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import attrgetter, call, is_
from typing import Any

import torch

from tieroff.core.tensor import Tier
from tieroff.runtime.items.gradient import GradientItem
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.offloaded import PLAIN, untouched, unwatch
from tieroff.runtime.items.parameter import ParameterItem
from tieroff.runtime.items.residency import BOTH, DEVICE, LEAVING
from tieroff.runtime.items.traffic import Traffic
from tieroff.storage.nvme.pages import MappedFiles


@dataclass(frozen=True, slots=True)
class HomeTable:
    """Every tensor under the engine's care that user code can reach.

    Attributes:
        parameters: by id of the parameter.
        gradients: by position of their parameter.
        states: optimizer state, by id of the parameter and key.
        names: by id, of every parameter of the model, moved or not.
    """

    parameters: dict[int, ParameterItem] = field(default_factory=dict)
    gradients: dict[int, GradientItem] = field(default_factory=dict)
    states: dict[tuple[int, str], HomeItem] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[HomeItem]:
        return chain(self.parameters.values(), self.gradients.values(), self.states.values())

    def drop(self, item: HomeItem) -> None:
        """Forgets an item, whichever class it is of."""
        tables: tuple[dict[Any, Any], ...] = (self.parameters, self.gradients, self.states)
        for table in tables:
            for key in [key for key, known in table.items() if known is item]:
                del table[key]

    def kept(self) -> list[HomeItem]:
        """Returns what cannot leave the device now: calls of user code use it, or the program holds it."""
        return [item for item in self if item.device is not None and (item.pins or item.is_held)]

    def parameter(self, tensor: object) -> ParameterItem | None:
        """Returns the item of a parameter, or None. An item holds its parameter, whose id is no other's meanwhile."""
        return self.parameters.get(id(tensor))


def settle_below(item: HomeItem, traffic: Traffic, mapped: MappedFiles) -> None:
    """Moves a newly adopted tensor to its lower tier; pages of a mapped checkpoint that held it leave memory."""
    memory = item.device
    item.leave(traffic)
    if memory is not None and memory.is_cpu and item.device is None:
        mapped.page_out(memory.data_ptr(), item.size_bytes)


def begin_to_leave(item: HomeItem, traffic: Traffic) -> None:
    """Begins to copy a tensor below, as if it lay there; `leave` frees its device copy. See [Note: late evictions]."""
    item.end_copy_out(traffic)
    if item.is_held:  # asked before the copy begins, which holds its source too
        return
    traffic.store(item)
    if item.is_lifted and item.state in (LEAVING, BOTH):
        item.hide()


def is_leaving(item: HomeItem) -> bool:
    """True for a tensor that began to leave, and was not used since."""
    return item.device is not None and not item.is_lifted and item.state in (LEAVING, BOTH)


def leave_place(item: HomeItem, traffic: Traffic) -> None:
    """Gives the room below back; the tensor stays where it is lifted to. One that is held below keeps it."""
    if not item.is_lifted or item.is_unmanaged:
        return
    traffic.settle(item)
    traffic.held.has_changed = True
    if item.place is not None:
        item.place.free()
        item.place = None
    item.lower = None
    item.state = DEVICE
    unwatch(item.tensor)


def lies_up(item: HomeItem) -> bool:
    """True for a lifted tensor that still lies on its device copy; written or not."""
    tensor = item.tensor
    if tensor is not None and item.placeholder is None and type(tensor) in PLAIN:
        return tensor.data_ptr() == item.value_address and not item.is_unmanaged
    return item.is_current() and not item.is_unmanaged


def lies_in(item: HomeItem, tier: Tier | None) -> bool:
    """True for a tensor as the engine left it that lies in this tier alone; None: on the device."""
    if tier is None:
        return item.is_lifted and item.place is None and item.device is not None and lies_up(item)
    return item.device is None and item.tier is tier and item.place is not None and item.is_as_left()


class ResidentSnapshot:
    """The items that a plan has on the device all the time, as a look at each of them found them: there, and nowhere else.

    Every step has to know whether somebody moved one of hundreds. That is asked of all at once, by functions of the
    interpreter's own, as in hooks/forward/walk.py. No memory is held for it.

    Args:
        items: of one engine.
        plan: that says what stays, or None.

    Attributes:
        plan: that one.
        others: those that have to be looked at one by one.
    """

    def __init__(self, items: Sequence[HomeItem], plan: object = None) -> None:
        self._all, self.plan = items, plan
        self._items, self.others = list[HomeItem](), list[HomeItem]()
        for item in items:
            is_alone = item.stays_resident and item.is_lifted and item.place is None and item.device is not None
            (self._items if is_alone and not item.is_unmanaged and item.is_current() else self.others).append(item)
        self._is_whole = not any(item.stays_resident for item in self.others)  # else some are away, and come back
        self._refs = [item.ref for item in self._items]
        self._parameters = [item.ref for item in self._items if isinstance(item, ParameterItem)]
        self._bytes_elsewhere: int | None = None
        self._seen = self._look()

    def is_of(self, items: Sequence[HomeItem], plan: object) -> bool:
        """True where these are the items of this plan, and all that it keeps stood when they were looked at."""
        is_same = plan is self.plan and len(items) == len(self._all) and all(map(is_, items, self._all))
        return is_same and self._is_whole

    def holds(self) -> bool:
        """True while all that stood still stand, parameters with the type and form that they had."""
        try:
            return self._look() == self._seen
        except (RuntimeError, TypeError):  # an offloaded tensor has no address, and one that died nothing
            return False

    def bytes_elsewhere(self, gave: Callable[[torch.Tensor], bool]) -> int:
        """Returns the same of all of them, which is asked once: they lie where they lay."""
        if self._bytes_elsewhere is None:
            self._bytes_elsewhere = bytes_elsewhere(self._items, gave)
        return self._bytes_elsewhere

    def _look(self) -> tuple[list[Any], ...]:
        with untouched():
            tensors: Any = map(call, self._refs)
            parameters: Any = [*map(call, self._parameters)]
            where = [*map(_ADDRESS, tensors)], [*map(_PLACE, self._items)]
            return *where, [*map(_DTYPE, parameters)], [*map(_SHAPE, parameters)], [*map(_STRIDE, parameters)]


_ADDRESS, _STRIDE = torch.Tensor.data_ptr, torch.Tensor.stride
_PLACE, _DEVICE, _DTYPE, _SHAPE = map(attrgetter, ("place", "device", "dtype", "shape"))


def all_have_copies(items: Sequence[HomeItem]) -> bool:
    """True where each has a device copy: one look, without a line of Python for each."""
    return not any(map(is_, map(_DEVICE, items), repeat(None)))


def bytes_elsewhere(items: Iterable[HomeItem], gave: Callable[[torch.Tensor], bool]) -> int:
    """Returns the bytes of device copies that lie in memory which the backend did not give, as `gave` says."""
    copies = [item for item in items if item.device is not None]
    for item in [item for item in copies if item.is_given is None]:
        item.is_given = item.device is not None and gave(item.device)
    return sum([item.size_bytes for item in copies if not item.is_given])


def bring_home(item: HomeItem, traffic: Traffic) -> None:
    """Gives the tensor ordinary device memory with its latest value; the engine's care ends."""
    if item.tensor is None:
        traffic.end(item)
        return
    if item.is_current():
        item.refresh(traffic)
        item.lift(traffic)
    item.detach(traffic)
