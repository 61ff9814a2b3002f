"""What stays on the device while nothing is planned: a moment's needs, and, where there is room, what is used again soon.

[Note: room]
Room is what the budget leaves when every op has what it needs and everything else is away, by the traces of steps that were
recorded. Up to it, what was used last stays (least recently used leaves first). With a `Foresight`, copies out begin before
their room is needed, and what is foreseen is fetched; without, this is paging on demand. Steps that are recorded or measured
have no room: their traces must show what ops need. Nor has a step with more input than any that was recorded.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Iterable
from typing import TYPE_CHECKING

from tieroff.core.foresight import Foresight
from tieroff.runtime.activations import ActivationItem
from tieroff.runtime.homes import HomeItem, ParameterItem
from tieroff.runtime.item import Item
from tieroff.runtime.program import Mode, Phase
from tieroff.runtime.state import Event, State

if TYPE_CHECKING:
    from tieroff.runtime.executor import Executor

# How many fetched parameters are kept at hand: enough for a weight and its bias.
_PARAMETERS_HELD = 2
# More tensors than any op saves of its inputs before its kernel runs, and fills in that kernel.
_TICKS_OF_ONE_OP = 3


class OnDemand:
    """The last parameters that were read, saved tensors that their op may not have filled yet, and what room is for.

    Attributes:
        room_bytes: device bytes that no op needs; see [Note: room].
        clean: keys of parameters that recorded steps read and never wrote.
    """

    def __init__(self, executor: Executor, foresight: Foresight | None = None) -> None:
        self._executor = executor
        self._foresight = foresight
        self.room_bytes = 0
        self.clean: frozenset[Hashable] = frozenset()
        self._parameters: deque[ParameterItem] = deque()
        self._incomplete: deque[tuple[ActivationItem, int]] = deque()
        self._ticks = 0
        self._held: OrderedDict[int, Item] = OrderedDict()  # by id; the first to leave first
        self._known: dict[Hashable, Item] = {}

    @property
    def has_room(self) -> bool:
        """True while things may stay beyond the moment."""
        executor = self._executor
        if self.room_bytes <= 0 or executor.mode is not Mode.DEMAND or executor.recorder is not None:
            return False
        return executor.program is not None and executor.program.phase in (Phase.FREE, Phase.PLANNED)

    def begin(self) -> None:
        """A step begins."""
        self._held.clear()
        self._known = {item.key: item for item in self._executor.gate.items.values()}
        if self._foresight is not None:
            self._foresight.begin()

    # -- what happens ----------------------------------------------------------------------------------------------

    def hold(self, item: ParameterItem) -> None:
        """Keeps a fetched parameter at hand for a moment: whoever uses it holds its memory himself."""
        if item in self._parameters:
            self._parameters.remove(item)
        self._parameters.append(item)
        while len(self._parameters) > _PARAMETERS_HELD:
            old = self._parameters.popleft()
            if not self.has_room:
                self._drop(old)
            elif id(old) not in self._held:
                self._held[id(old)] = old
        if self.has_room:
            self._held.pop(id(item), None)
            self._shrink()

    def used(self, key: Hashable) -> None:
        """Forward used a parameter."""
        if self._foresight is not None:
            self._foresight.used(key)
            self.look_ahead()

    def saved(self, item: Item) -> None:
        """Autograd saved this for backward."""
        if self._foresight is not None:
            self._known[item.key] = item
            self._foresight.saved(item.key)

    def wanted(self, item: Item) -> None:
        """Backward used what was saved."""
        if self._foresight is not None:
            self._foresight.wanted(item.key)
            self.look_ahead()

    def wait_for(self, item: ActivationItem) -> None:
        """Keeps a saved tensor until the ticks of its own op are over."""
        self._incomplete.append((item, self._ticks + _TICKS_OF_ONE_OP))

    def tick(self, ticks: int = 1) -> None:
        """So many ticks went by: what was incomplete is complete after some, and may leave."""
        self._ticks += ticks
        while self._incomplete and self._incomplete[0][1] <= self._ticks:
            item, _ = self._incomplete.popleft()
            if item.device is not None and item.state is not State.ARRIVING:
                self.let_leave(item)

    def let_leave(self, *items: Item) -> None:
        """Has items leave that nothing uses right now: at once, or when their room is needed."""
        if not self.has_room:
            for item in items:
                self._executor.release(item)
            return
        for item in items:
            self._held[id(item)] = item
            self._held.move_to_end(id(item))
            if isinstance(item, HomeItem):
                self._copy_out(item)  # before user code runs next it has to lie below in any case
        self._shrink()

    def unpacked(self, item: ActivationItem) -> None:
        """Backward has a saved tensor, and as a rule it was the last to ask for it."""
        if not self.has_room or item.state is State.BOTH:
            self._executor.release(item)
        else:
            self.let_leave(item)  # it dies soon, and need not be copied before

    def let_go(self) -> None:
        """Lets everything leave that user code may hold or write: it runs next."""
        self.tick(_TICKS_OF_ONE_OP)
        while self._parameters:
            self._drop(self._parameters.popleft())
        for key, item in list(self._held.items()):
            if isinstance(item, HomeItem):
                del self._held[key]
                self._drop(item)

    def forget(self, item: Item) -> None:
        """The item is at its end."""
        self._held.pop(id(item), None)
        self._known.pop(item.key, None)

    # -- room ------------------------------------------------------------------------------------------------------

    def look_ahead(self) -> None:
        """Fetches what is foreseen, as far as there is room or something that is not foreseen can go without a wait."""
        if self._foresight is None or not self.has_room:
            return
        foreseen = [item for key in self._foresight.ahead() if (item := self._known.get(key)) is not None]
        self.fetch(item for item in foreseen if not isinstance(item, ParameterItem) or item.key in self.clean)

    def fetch(self, items: Iterable[Item]) -> None:
        """Starts to fetch items in this order, up to the first for which no room can be made without a wait."""
        if self._foresight is None or not self.has_room:
            return
        traffic = self._executor.traffic
        kept: set[int] = set()
        for item in items:
            kept.add(id(item))
            if item.state is not State.LOWER or item.place is None:
                continue
            self._make_room(item.size_bytes, kept)
            if traffic.device_bytes + item.size_bytes > self.room_bytes:
                return
            traffic.send(item, Event.FETCH)
            self._held[id(item)] = item
            self._held.move_to_end(id(item))

    def _make_room(self, size_bytes: int, kept: Collection[int]) -> None:
        """Lets go of what costs no wait and is not kept, until so much fits, or nothing is left."""
        traffic = self._executor.traffic
        for key, item in list(self._held.items()):
            if traffic.device_bytes + size_bytes <= self.room_bytes:
                return
            if key not in kept and _goes_at_once(item):
                del self._held[key]
                self._drop(item)

    def _shrink(self) -> None:
        """Has what is held fit its room again, and copies under way of what leaves next: of half the room."""
        traffic = self._executor.traffic
        while self._held and traffic.device_bytes > self.room_bytes:
            _, item = self._held.popitem(last=False)
            self._drop(item)
        excess_bytes = traffic.device_bytes - self.room_bytes // 2
        for item in self._held.values():
            if excess_bytes <= 0:
                break
            excess_bytes -= item.size_bytes
            self._copy_out(item)

    def _copy_out(self, item: Item) -> None:
        """Begins a copy below, if there is no valid one."""
        traffic = self._executor.traffic
        if self._foresight is None:
            return  # paging on demand alone: what leaves is copied when its room is needed
        if item.device is None or (isinstance(item, HomeItem) and item.may_be_written):
            return  # user code may hold such a parameter and go on writing: it is copied when it is dropped
        if isinstance(item, HomeItem):
            item.refresh(traffic)
        if item.state in (State.DEVICE, State.STALE):
            traffic.send(item, Event.STORE)

    def _drop(self, item: Item) -> None:
        if item.device is not None and not self._executor.keeps(item):
            self._executor.release(item)


def _goes_at_once(item: Item) -> bool:
    """True for an item whose copy below is valid: its device copy goes without a wait."""
    if isinstance(item, HomeItem) and item.was_written():
        return False
    return item.state is State.BOTH or (item.state is State.LEAVING and item.leaving is not None and item.leaving.done())
