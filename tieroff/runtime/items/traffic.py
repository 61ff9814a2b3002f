"""Traffic: the one place where bytes of items are moved and counted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tieroff.core.tensor import TensorClass, Tier
from tieroff.errors import StoreError
from tieroff.runtime.backend.base import Backend, await_arrival
from tieroff.runtime.backend.stamp import Time, ns_of
from tieroff.runtime.items.item import Item
from tieroff.runtime.items.residency import ON_DEVICE, Do, Event, State, transition
from tieroff.runtime.items.spill import Spill
from tieroff.storage.completion import Completion

log = logging.getLogger("tieroff")


@dataclass
class Counts:
    """What moved since the step began."""

    moved_bytes: dict[str, int] = field(default_factory=lambda: {"d2h": 0, "h2d": 0, "nvme_write": 0, "nvme_read": 0})
    by_class: dict[str, int] = field(default_factory=lambda: {kind.value: 0 for kind in TensorClass})
    stalls: list[tuple[Time, Time]] = field(default_factory=list)
    fallbacks: int = 0
    faults: int = 0  # tensors that were used before their fetch had begun

    @property
    def stall_ns(self) -> int:
        """How long compute waited for copies, by the device's clock; waits for it."""
        return sum(max(ns_of(stop) - ns_of(start), 0) for start, stop in self.stalls)


class Traffic:
    """Carries out what the state machine of an item asks for, and counts it.

    Attributes:
        device_bytes: bytes of device copies that the engine holds now.
        tell_held: called with all memory that is taken for items, where others have to know.
        counts: bytes moved and time waited since `counts` was last replaced.
        spans: copies as (item index, link, arrival, bytes), when `keep_spans`.
        waits: waits for copies as (item index, source, target, start, stop), when `keep_spans`.
        memory: bytes held per tier at the end of each op of a planned step, when `keep_spans`.
    """

    def __init__(self, backend: Backend, spill: Spill) -> None:
        self.backend = backend
        self.spill = spill
        self.stores = spill.stores
        self.counts = Counts()
        self.device_bytes = 0
        self.keep_spans = False
        self.tell_held: Callable[[torch.Tensor], None] | None = None
        self.begin_step()

    def begin_step(self) -> None:
        """Counts and spans are those of the step that begins here."""
        self.counts = Counts()
        self.spans: list[tuple[int, str, Completion, int]] = []
        self.waits: list[tuple[int, Tier, Tier, Time, Time]] = []
        self.memory: dict[Tier, list[int]] = {tier: [] for tier in Tier}

    def note_memory(self, device_bytes: int) -> int:
        """Keeps what each tier holds at the end of an op; returns `device_bytes`."""
        if self.keep_spans:
            for tier, held in self.memory.items():
                store = self.stores.get(tier)
                held.append(device_bytes if tier is Tier.DEVICE else store.taken_bytes if store is not None else 0)
        return device_bytes

    def hold(self, item: Item, device: torch.Tensor) -> None:
        """Takes a device copy that the program or the backend made under the engine's care."""
        if item.device is None:
            self.device_bytes += item.size_bytes
        item.device = device
        self.took(device)

    def took(self, memory: torch.Tensor) -> None:
        """Memory is an item's from here on, on the device or below."""
        if self.tell_held is not None:
            self.tell_held(memory)

    def send(self, item: Item, event: Event) -> None:
        """Applies an event: moves bytes as needed, and counts the time that was waited.

        Raises:
            StoreError: a copy failed and could not be placed elsewhere; the item's source copy is intact.
            StateError: the event is refused in the item's state.
        """
        state, todo = transition(item.state, event)
        for do in todo:
            if do is Do.AWAIT_OUT:
                self._await_out(item)
                if event is Event.DROP and item.state is not State.BOTH:
                    return  # the copy out failed for good or was stale: the device copy stays
            elif do is Do.START_OUT:
                self._start_out(item)
            elif do is Do.START_IN:
                self._start_in(item)
            elif do is Do.AWAIT_IN:
                self._settle_in(item)
            else:
                self._free_device(item)
        item.state = state

    def recall(self, item: Item, device: torch.Tensor) -> None:
        """Makes memory that the program holds the item's device copy; what lies below is old."""
        self.settle(item)
        self.hold(item, device)
        item.state = State.DEVICE

    def want(self, item: Item) -> torch.Tensor:
        """Returns the item's valid device copy, fetching or awaiting it when it is not there."""
        if item.state not in ON_DEVICE:
            if item.state is State.LOWER:
                self.counts.faults += 1
                self.send(item, Event.FETCH)
            self._settle_in(item)
        assert item.device is not None
        return item.device

    def store(self, item: Item) -> None:
        """Begins a copy of the device's bytes below, if there is no valid one."""
        item.refresh(self)
        if item.state in (State.DEVICE, State.STALE):
            self.send(item, Event.STORE)

    def leave(self, item: Item) -> None:
        """Frees the item's device copy now, after a copy out if the lower copy is not valid."""
        if item.state is State.ARRIVING:
            self._settle_in(item)
        if item.state in (State.DEVICE, State.STALE):
            self.send(item, Event.STORE)
        self.send(item, Event.DROP)

    def settle(self, item: Item) -> None:
        """Waits for whatever of the item is in flight."""
        if item.leaving is not None:
            self._await_out(item)
        if item.arriving is not None:
            self._settle_in(item)

    def flush(self) -> None:
        """Blocks the host until every copy below is there."""
        self.backend.flush()

    def end(self, item: Item) -> None:
        """The tensor is dead: waits for what is in flight, then gives all its bytes back."""
        for arrival in (item.leaving, item.arriving):
            if arrival is None:
                continue
            try:
                self._wait(item, arrival, f"ending {item.name}")
            except StoreError as error:
                log.warning("%s; nobody needs these bytes any more", error)
        item.leaving = item.arriving = None
        if item.device is not None:
            self._free_device(item)
        if item.place is not None:
            item.place.free()
            item.place = None

    def release(self, item: Item) -> None:
        """Lets go of the item's device copy, whatever its state; nothing may be in flight."""
        if item.device is not None:
            item.device = None
            self.device_bytes -= item.size_bytes

    def let_go(self, item: Item) -> None:
        """Stops counting and holding an item whose tensor lives on by itself; nothing may be in flight."""
        self.release(item)
        if item.place is not None:
            item.place.free()
            item.place = None
        item.state = State.DEVICE

    # -- the four moves ------------------------------------------------------------------------------------------

    def _start_out(self, item: Item) -> None:
        item.part_with_lent()
        try:
            if item.place is None:
                item.place = item.make_place(self)
        except StoreError as error:
            if not self.spill.demote(item, error):
                raise
            item.place = item.make_place(self)
        item.leaving = self.backend.copy_out(item.source(), item.place)
        self._count(item, "d2h" if item.place.tier is Tier.HOST else "nvme_write", item.leaving)

    def _await_out(self, item: Item) -> None:
        arrival = item.leaving
        if arrival is None:
            return
        try:
            self._wait(item, arrival, f"copying {item.name} out")
            if item.state is State.LEAVING:  # not STALE: then these bytes are no news
                assert item.place is not None
                item.place.publish()
        except StoreError as error:
            # The source is intact: try the other tier once, else raise.
            item.leaving = None
            item.state, _ = transition(item.state, Event.STORE_FAILED)
            if item.place is not None:
                item.place.free()
                item.place = None
            if not self.spill.demote(item, error):
                raise
            self.send(item, Event.STORE)
            self._await_out(item)
            return
        item.leaving = None
        item.state, _ = transition(item.state, Event.STORED)

    def _start_in(self, item: Item) -> None:
        assert item.place is not None
        self.hold(item, self.backend.empty(item.place.size_bytes))
        assert item.device is not None
        item.arriving = self.backend.copy_in(item.place, item.device)
        self._count(item, "h2d" if item.place.tier is Tier.HOST else "nvme_read", item.arriving)

    def _settle_in(self, item: Item) -> None:
        arrival = item.arriving
        if arrival is None:
            return
        try:
            self._wait(item, arrival, f"bringing {item.name} back")
        except StoreError:
            item.arriving = None
            self._free_device(item)
            item.state, _ = transition(item.state, Event.FETCH_FAILED)
            raise
        item.state, _ = transition(item.state, Event.ARRIVED)
        item.arrived()
        item.arriving = None

    def _free_device(self, item: Item) -> None:
        if item.device is not None:
            self.backend.order_frees()
            item.freed()
            item.device = None
            self.device_bytes -= item.size_bytes

    def _wait(self, item: Item, arrival: Completion, what: str) -> None:
        # A copy that has ended by now stalls nothing. What is over when a device gets here, its stamps will say.
        start: Time | None = self.backend.stamp()
        if start is None and not arrival.done():
            start = time.monotonic_ns()
        try:
            await_arrival(arrival, what)
        finally:
            if start is not None:
                stop = self.now()
                self.counts.stalls.append((start, stop))
                if self.keep_spans:
                    below = item.place.tier if item.place is not None else item.tier
                    ends = (Tier.DEVICE, below) if arrival is item.leaving else (below, Tier.DEVICE)
                    self.waits.append((item.index, *ends, start, stop))

    def now(self) -> Time:
        """Returns when compute gets here."""
        stamp = self.backend.stamp()
        return stamp if stamp is not None else time.monotonic_ns()

    def _count(self, item: Item, link: str, arrival: Completion) -> None:
        self.counts.moved_bytes[link] += item.size_bytes
        self.counts.by_class[item.kind.value] += item.size_bytes
        if self.keep_spans:
            self.spans.append((item.index, link, arrival, item.size_bytes))
