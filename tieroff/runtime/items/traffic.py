"""Traffic: the one place where bytes of items are moved and counted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence

import torch

from tieroff.core.seams import Recorder
from tieroff.core.tensor import Tier, allocated_bytes
from tieroff.errors import StoreError
from tieroff.runtime.backend.base import Backend, await_arrival
from tieroff.runtime.backend.held import Counts, Held
from tieroff.runtime.backend.place import Place
from tieroff.runtime.backend.stamp import Time
from tieroff.runtime.items.item import Item
from tieroff.runtime.items.residency import ARRIVING, BOTH, DEVICE, LEAVING, LOWER, ON_DEVICE, STALE, Do, Event, transition
from tieroff.runtime.items.spill import Spill
from tieroff.storage.completion import Completion, Timed

log = logging.getLogger("tieroff")


class Traffic:
    """Carries out what the state machine of an item asks for, and counts it.

    Attributes:
        device_bytes: bytes of device copies that the engine holds now.
        tell_held: called with all memory that is taken for items, where others have to know.
        counts: bytes moved and time waited since `counts` was last replaced.
        keeps_timeline: what moves when is of interest.
        keep_spans: so it is, and in the step that runs.
        spans: copies as (item index, link, arrival, bytes), when `keep_spans`.
        waits: waits for copies as (item index, source, target, start, stop), when `keep_spans`.
        held: per tier, at the end of each op of a planned step, when `keep_spans`.
        refused: what was to leave and could not, once for each time; see [Note: refusals] in execution/refusals.py.
    """

    def __init__(self, backend: Backend, spill: Spill) -> None:
        self.backend = backend
        self.spill, self.stores = spill, spill.stores
        self.counts = Counts()
        self.device_bytes = 0
        self._keeps_spares = False
        self._recorder: Recorder | None = None
        self._spares: dict[Hashable, Item] = {}
        self.refused: list[Item] = []
        self._device_type = backend.device.type
        self.keeps_timeline = self._is_waiting = False
        self.tell_held: Callable[[torch.Tensor], None] | None = None
        self.begin_step()

    @property
    def is_watching(self) -> bool:
        """True when nobody sees each write just now, so that an item is told when there are two copies of it.

        A recorder sees all from the forward of its step to the end of the update. What user code does from there to the next
        step, as an evaluation, it does not see.
        """
        return self._recorder is None or not self._recorder.is_on

    def begin_step(self, *, is_planned: bool = False, is_quiet: bool = False, recorder: Recorder | None = None) -> None:
        """Counts and spans are those of the step that begins here, which a recorder may watch; a quiet one has no spans."""
        self.keep_spans = self.keeps_timeline and not is_quiet
        self._recorder = recorder
        self._keeps_spares = is_planned
        if not is_planned:
            self.forget_spares()
        self.counts = Counts()
        self.spans: list[tuple[int, str, Timed, int]] = []
        self.waits: list[tuple[int, Tier, Tier, Time, Time]] = []
        self.held = Held(self.stores)

    def hold(self, item: Item, device: torch.Tensor) -> None:
        """Takes a device copy that the program or the backend made under the engine's care."""
        if item.device is None:
            self.device_bytes += allocated_bytes(item.size_bytes, self._device_type)
        item.device, item.is_given = device, None
        self.register_memory(device)

    def register_memory(self, memory: torch.Tensor) -> None:
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
                if event is Event.DROP and item.state is not BOTH:
                    return  # the copy out failed for good or was stale: the device copy stays
            elif do is Do.START_OUT:
                self._start_out(item)
            elif do is Do.START_IN:
                self._start_in(item)
            elif do is Do.AWAIT_IN:
                self._settle_in(item)
            elif do is Do.AWAIT_UPDATE:
                self._await_update(item)
            else:
                self.free_device(item)
        item.state = state

    def recall(self, item: Item, device: torch.Tensor) -> None:
        """Makes memory that the program holds the item's device copy; what lies below is old."""
        self.settle(item)
        self.hold(item, device)
        item.state = DEVICE

    def want(self, item: Item) -> torch.Tensor:
        """Returns the item's valid device copy, fetching or awaiting it when it is not there."""
        item.is_refused = False
        if item.state not in ON_DEVICE:
            if item.state is not ARRIVING:
                self.counts.faults += 1
                self.fetch(item)
            self._settle_in(item)
        assert item.device is not None
        return item.device

    def store(self, item: Item) -> None:
        """Begins a copy of the device's bytes below, if there is no valid one."""
        item.refresh(self)
        if item.state is STALE or item.state is DEVICE:
            self.send(item, Event.STORE)

    def leave(self, item: Item) -> None:
        """Frees the item's device copy now, after a copy out if the lower copy is not valid."""
        if item.state is ARRIVING:
            self._settle_in(item)
        if item.state is STALE or item.state is DEVICE:
            self.send(item, Event.STORE)
        if item.state is BOTH:
            self.free_device(item)
            item.state = LOWER
        else:
            self.send(item, Event.DROP)

    def fetch(self, item: Item) -> None:
        """Begins a copy to the device of what lies below."""
        self.send(item, Event.FETCH)

    def settle(self, item: Item) -> None:
        """Waits for whatever of the item is in flight."""
        if item.leaving is not None:
            self._await_out(item)
        if item.arriving is not None:
            self._settle_in(item)
        if item.updating is not None:
            self._await_update(item)

    def settle_all(self, items: Sequence[Item]) -> None:
        """Waits for whatever of them is in flight, as one wait where nobody asks for each."""
        start = self.backend.stamp() if len(items) > 1 and not self.keep_spans else None
        if start is None:
            for item in items:
                self.settle(item)
            return
        try:
            self._is_waiting = True
            for item in items:
                self.settle(item)
        finally:
            self._is_waiting = False
            self.counts.stalls.append((start, self.now()))

    def flush(self) -> None:
        """Blocks the host until every copy below is there."""
        self.backend.flush()

    def end(self, item: Item) -> None:
        """The tensor is dead: waits for what is in flight, then gives all its bytes back."""
        self._await_end(item)
        self.held.has_changed = True
        if item.device is not None:
            self.free_device(item)
        if item.place is not None:
            item.place.free()
            item.place = None

    def _await_end(self, item: Item) -> None:
        for arrival in (item.leaving, item.arriving):
            if arrival is None:
                continue
            try:
                self._wait(item, arrival, f"ending {item.name}")
            except StoreError as error:
                log.warning("%s; nobody needs these bytes any more", error)
        item.leaving = item.arriving = None

    def retire(self, item: Item) -> None:
        """The tensor is dead; its item waits for its like of the next step, with its place where that may rest."""
        place = item.place
        if not self._keeps_spares or item.key in self._spares or (place is not None and not place.may_rest):
            self.end(item)
            return
        self._await_end(item)
        if item.device is not None:
            self.free_device(item)
        self._spares[item.key] = item
        if place is not None:
            self.held.has_changed = True
            place.rest()

    def spare(self, key: Hashable, size_bytes: int) -> Item | None:
        """Returns the item that waits under this key, if it is of this size; its caller makes it stand for another tensor."""
        item = self._spares.pop(key, None)
        if item is None:
            return None
        if item.place is not None:
            self.held.has_changed = True
            item.place = item.place if item.place.resume() else None
        if item.size_bytes == size_bytes:
            return item
        self.end(item)
        return None

    def forget_spares(self) -> None:
        """Gives back what spare items keep."""
        while self._spares:
            _, item = self._spares.popitem()
            self.end(item)

    def release(self, item: Item) -> None:
        """Lets go of the item's device copy, whatever its state; nothing may be in flight."""
        if item.device is not None:
            item.device, item.is_refused = None, False
            self.device_bytes -= allocated_bytes(item.size_bytes, self._device_type)

    def unmanage(self, item: Item) -> None:
        """Stops counting and holding an item whose tensor lives on by itself; nothing may be in flight."""
        self.release(item)
        self.held.has_changed = True
        if item.place is not None:
            item.place.free()
            item.place = None
        item.state = DEVICE

    # -- the four moves ------------------------------------------------------------------------------------------

    def _start_out(self, item: Item) -> None:
        item.part_with_lent()
        if item.place is None:
            item.place = self._make_place(item)
        source = item.source()
        if self.is_watching:
            item.on_second_copy()
        item.leaving = self.backend.copy_out(source, item.place)
        self._count(item, "d2h" if item.place.tier is Tier.HOST else "nvme_write", item.leaving)

    def _make_place(self, item: Item) -> Place:
        self.held.has_changed = True
        try:
            return item.make_place(self)
        except StoreError as error:
            if self._spares:
                self.forget_spares()
                return self._make_place(item)
            if not self._demote(item, error):
                raise
            return item.make_place(self)

    def _demote(self, item: Item, error: StoreError) -> bool:
        """Gives an item another tier after its copy out failed; spare items make room there, if that is what it takes."""
        if self.spill.demote(item, error):
            return True
        if not self._spares:
            return False
        self.forget_spares()
        return self.spill.demote(item, error)

    def _await_out(self, item: Item) -> None:
        arrival = item.leaving
        if arrival is None:
            return
        try:
            self._wait(item, arrival, f"copying {item.name} out")
            if item.state is LEAVING:  # not STALE: then these bytes are no news
                assert item.place is not None
                item.place.publish()
        except StoreError as error:
            # The source is intact: try the other tier once, else raise.
            item.leaving = None
            item.state, _ = transition(item.state, Event.STORE_FAILED)
            if item.place is not None:
                item.place.free()
                item.place = None
            if not self._demote(item, error):
                raise
            self.send(item, Event.STORE)
            self._await_out(item)
            return
        item.leaving = None
        item.state, _ = transition(item.state, Event.STORED)

    def update(self, item: Item, job: Completion) -> None:
        """A job of the host's threads reads what lies below, or writes it; whoever wants those bytes waits for it."""
        assert item.place is not None
        item.place.note(job)  # the room, too, is given to nobody else before
        item.state, _ = transition(item.state, Event.UPDATE)
        item.updating = job

    def _await_update(self, item: Item) -> None:
        job = item.updating
        if job is None:
            return
        self._wait(item, job, f"updating {item.name} in host memory")
        item.state, _ = transition(item.state, Event.UPDATED)
        item.updating = None

    def _start_in(self, item: Item) -> None:
        assert item.place is not None
        self.hold(item, self.backend.empty(item.place.size_bytes))
        assert item.device is not None
        item.before_fetch()
        if self.is_watching:
            item.on_second_copy()
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
            self.free_device(item)
            item.state, _ = transition(item.state, Event.FETCH_FAILED)
            raise
        state, _ = transition(item.state, Event.ARRIVED)
        # Before the state says that there are two copies: interrupted in between, the one that came up is dropped by repair,
        # while one that counts would have an item that knows the version of the memory before.
        item.arrived()
        item.state = state
        item.arriving = None

    def free_device(self, item: Item) -> None:
        """Lets go of the item's device copy, which its tensor no longer lies on from here."""
        self.held.has_changed, item.is_refused = True, False
        if item.device is not None:
            self.backend.order_frees()
            item.before_free()
            item.device = None
            self.device_bytes -= allocated_bytes(item.size_bytes, self._device_type)

    def _wait(self, item: Item, arrival: Completion, what: str) -> None:
        if self._is_waiting:
            await_arrival(arrival, what)
            return
        # A copy that has ended by now stalls nothing. What is over when a device gets here, its stamps will say. Making and
        # reading two costs the host a third of a copy: where nobody reads each wait, those that are over have none.
        is_over = not self.keep_spans and arrival.done()
        start: Time | None = None if is_over else self.backend.stamp()
        if start is None and not is_over and not arrival.done():
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

    def _count(self, item: Item, link: str, arrival: Timed) -> None:
        self.counts.moved_bytes[link] += item.size_bytes
        self.counts.by_class[item.class_name] += item.size_bytes
        if self.keep_spans:
            self.spans.append((item.index, link, arrival, item.size_bytes))
