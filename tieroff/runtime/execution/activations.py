"""The activations that living graphs saved, from the first pack to the death of the last."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tieroff.core.place import place_here
from tieroff.runtime.execution.on_demand import OnDemand
from tieroff.runtime.execution.runner import PlanRunner
from tieroff.runtime.execution.state import StepState
from tieroff.runtime.items.activation import ActivationItem
from tieroff.runtime.items.traffic import Traffic


class _Watched(weakref.ref[object]):
    """A reference to an object that autograd got for an item.

    Attributes:
        item: what it stands for.
    """

    __slots__ = ("item",)

    item: ActivationItem


class LiveActivations:
    """The activations under the engine's care.

    Objects that stand for them die in any thread, also where an item is moved just now, so their items end at the next tick.
    What hears of a death is `deque.append`: it needs no lock, and is no line of Python that an exception could interrupt.

    Attributes:
        dead: references to what died since the last `drain`.
    """

    def __init__(self, state: StepState, traffic: Traffic, runner: PlanRunner, on_demand: OnDemand) -> None:
        self._state, self._traffic, self._runner, self._on_demand = state, traffic, runner, on_demand
        self._items: dict[int, ActivationItem] = {}
        self.dead: deque[weakref.ref[object]] = deque()

    def __iter__(self) -> Iterator[ActivationItem]:
        return iter(list(self._items.values()))

    def add(self, item: ActivationItem) -> None:
        """Takes an item under care."""
        self._items[id(item)] = item

    def watch(self, packed: object, item: ActivationItem) -> None:
        """Autograd gets an object that stands for an item; its death is noticed."""
        watched = _Watched(packed, self.dead.append)
        watched.item = item
        item.packs.add(watched)

    def drain(self) -> None:
        """Ends the items that no graph can ask for any more."""
        while self.dead:
            watched = self.dead[0]  # it stays until it is dealt with: an interrupted `drain` is gone through again
            assert isinstance(watched, _Watched)
            watched.item.packs.discard(watched)
            if not watched.item.packs and id(watched.item) in self._items:
                self._end(watched.item)
            self.dead.popleft()

    def _end(self, item: ActivationItem) -> None:
        self._items.pop(id(item), None)
        self._on_demand.forget(item)
        self._state.record.died(item.key)
        self._runner.unassign(item)
        self._traffic.retire(item)

    def lower(self) -> None:
        """A step begins by a plan, in which what older graphs saved and still hold has no room: it leaves the device."""
        self.drain()
        for item in self:
            if item.device is not None and (item.place is not None or self._traffic.spill.has_room(item.size_bytes)):
                item.leave(self._traffic)

    def end_unused(self) -> None:
        """Ends items that no graph got, since an exception came first."""
        self.drain()
        for item in self:
            if not item.packs:
                self._end(item)

    def bring_home(self) -> None:
        """Puts what living graphs saved back on the device, for good."""
        self.drain()
        for item in self:
            self._traffic.want(item)
            self._traffic.settle(item)
            if item.place is not None:
                item.place.free()
                item.place = None


def label_here(path: str, maker: torch.autograd.graph.Node | None) -> str:
    """Returns what is saved here, for people, such as "layers.3.mlp.fc1: saved by GELU, made by addmm (model.py:41)".

    Args:
        path: of the module whose parameter was used last.
        maker: the op that made the tensor, if autograd knows.
    """
    place = place_here()
    by = "" if maker is None else f", made by {maker.name().partition('Backward')[0].lower()}"
    line = f" ({place.line})" if place.line else ""
    return f"{path or 'the model'}: saved by {place.kind or 'the loop'}{by}{line}"


@dataclass(frozen=True, slots=True)
class ActivationStorage:
    """A storage that stands for an activation.

    Attributes:
        storage: itself, as long as it lives.
        item: the activation's.
        lives: how many storages that had stood for by then; see `Traffic.retire`.
        version: of the memory that backward was given, as it was given; -1: it is memory that autograd was about to save.
    """

    storage: weakref.ref[torch.UntypedStorage]
    item: ActivationItem
    lives: int
    version: int = -1


class ActivationStorages:
    """Which storages stand for an activation.

    [Note: one activation]
    What is saved again is the activation that it was, wherever that lies: an event of a step must not depend on the plan. So
    the memory that backward got for one stands for it as much as the memory that autograd saved first. It comes here again
    where modules run in backward (the input of a checkpoint), and where a backward makes a graph (`create_graph`).
    """

    def __init__(self) -> None:
        self._found: dict[int, ActivationStorage] = {}

    def saved(self, storage: torch.UntypedStorage, item: ActivationItem) -> None:
        """Autograd saves what lies on this storage, and it is this activation."""
        self._found[storage._cdata] = ActivationStorage(weakref.ref(storage), item, item.lives)

    def given(self, tensor: torch.Tensor, item: ActivationItem) -> None:
        """Backward gets this for an activation."""
        storage = tensor.untyped_storage()
        if self.on(storage) is None:
            self._found[storage._cdata] = ActivationStorage(weakref.ref(storage), item, item.lives, tensor._version)

    def on(self, storage: torch.UntypedStorage) -> ActivationStorage | None:
        """Returns what a storage stands for while some graph has that saved, or None."""
        found = self._found.get(storage._cdata)
        if found is None or found.storage() is not storage:
            return None
        item = found.item
        stands = item.lives == found.lives and item.size_bytes == storage.nbytes() and next(item.views(), None) is not None
        return found if stands else None

    def sweep(self) -> None:
        """Forgets storages that died."""
        self._found = {key: found for key, found in self._found.items() if found.storage() is not None}
