"""What stays on the device while nothing is planned: a moment's needs, and, where there is room, what is used again soon.

[Note: room]
Room is what the budget leaves when every op has what it needs and everything else is away, by the traces of steps that were
recorded. Up to it saved tensors stay (least recently used leaves first), and what the update is done with. With a
`Foresight`, copies out begin before their room is needed, and what is foreseen is fetched; without, this is paging on demand.
Steps that are recorded or measured have no room: their traces must show what ops need. Nor have those with an input that is
larger than every recorded one.

[Note: homes]
Parameters and gradients stay no longer than without room: user code (hooks, forwards, whoever catches an exception) may write
them through `.data`, which no version shows, and where they lie below that counts. A parameter is foreseen only if no recorded
step wrote it in forward or backward, and lies above unused until it is read.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Iterable

from tieroff.core.seams import Foresight
from tieroff.runtime.execution.experience import Experience
from tieroff.runtime.execution.runner import PlanRunner
from tieroff.runtime.execution.state import StepState
from tieroff.runtime.items.activation import ActivationItem
from tieroff.runtime.items.homes import HomeItem, ParameterItem
from tieroff.runtime.items.item import Item
from tieroff.runtime.items.residency import Event, State
from tieroff.runtime.items.traffic import Traffic
from tieroff.runtime.step.kinds import Planned, Unplanned
from tieroff.runtime.step.mode import Mode

# How many fetched parameters are kept at hand: enough for a weight and its bias.
_PARAMETERS_HELD = 2
# More tensors than any op saves of its inputs before its kernel runs, and fills in that kernel.
TICKS_OF_ONE_OP = 3


class OnDemand:
    """The last parameters that were read, saved tensors that their op may not have filled yet, and what room is for.

    Attributes:
        room_bytes: device bytes that no op of this step needs; see [Note: room].
        experience: what recorded steps say.
    """

    def __init__(
        self, state: StepState, traffic: Traffic, runner: PlanRunner, foresight: Foresight | None = None
    ) -> None:
        self._state, self._traffic, self._runner = state, traffic, runner
        self._foresight = foresight
        self.room_bytes = 0
        self.experience = Experience()
        self._parameters: deque[ParameterItem] = deque()
        self._incomplete: deque[tuple[ActivationItem, int]] = deque()
        self._ticks = 0
        self._held: OrderedDict[int, Item] = OrderedDict()  # by id; the first to leave first
        self._known: dict[Hashable, Item] = {}

    @property
    def has_room(self) -> bool:
        """True while things may stay beyond the moment."""
        state = self._state
        if self.room_bytes <= 0 or state.mode is not Mode.DEMAND or state.record.recorder is not None:
            return False
        return state.kind is not None and isinstance(state.kind.stage, Unplanned | Planned)

    def begin(self, parameters: Iterable[ParameterItem]) -> None:
        """A step begins."""
        self.room_bytes = self.experience.room_bytes
        self._known = {item.key: item for item in parameters}
        if self._foresight is not None:
            self._foresight.begin()

    # -- what happens ----------------------------------------------------------------------------------------------

    def hold(self, item: ParameterItem) -> None:
        """Keeps a fetched parameter at hand for a moment: whoever uses it holds its memory himself."""
        self.claim(item)
        if item in self._parameters:
            return
        self._parameters.append(item)
        while len(self._parameters) > _PARAMETERS_HELD:
            self._drop(self._parameters.popleft())  # at once, whatever the room: user code may write what is lifted

    def dismiss(self, item: ParameterItem) -> None:
        """Lets go of a fetched parameter at once: nobody uses this copy of it."""
        with self._state.lock:
            if item in self._parameters:
                self._parameters.remove(item)
                self._drop(item)

    def claim(self, *items: Item) -> None:
        """These are used now: whoever uses them decides when they leave."""
        for item in items:
            self._held.pop(id(item), None)

    def used(self, key: Hashable) -> None:
        """Forward used a parameter."""
        if self._foresight is not None:
            with self._state.lock:
                self._foresight.used(key)
                self._look_ahead()

    def saved(self, item: Item) -> None:
        """Autograd saved this for backward."""
        if self._foresight is not None:
            with self._state.lock:
                self._known[item.key] = item
                self._foresight.saved(item.key)

    def wanted(self, item: Item) -> None:
        """Backward used what was saved."""
        if self._foresight is not None:
            with self._state.lock:
                self._foresight.wanted(item.key)
                self._look_ahead()

    def wait_for(self, item: ActivationItem) -> None:
        """Keeps a saved tensor until the ticks of its own op are over."""
        self._incomplete.append((item, self._ticks + TICKS_OF_ONE_OP))

    def tick(self, ticks: int = 1) -> None:
        """So many ticks went by: what was incomplete is complete after some, and may leave."""
        self._ticks += ticks
        while self._incomplete and self._incomplete[0][1] <= self._ticks:
            item, _ = self._incomplete.popleft()
            if item.device is not None and item.state is not State.ARRIVING:
                self.let_leave(item)

    def let_leave(self, *items: Item) -> None:
        """Has items leave that nothing uses right now: at once, or when their room is needed.

        Of homes only those that no user code can reach before the next `let_go`.
        """
        if not self.has_room:
            for item in items:
                item.leave(self._traffic)
            return
        for item in items:
            self._hold_last(item)
            if isinstance(item, HomeItem):
                self._copy_out(item)  # before user code runs next it has to lie below in any case
        self._shrink()

    def unpacked(self, item: ActivationItem) -> None:
        """Backward has a saved tensor, and as a rule it was the last to ask for it."""
        if not self.has_room or item.state is State.BOTH:
            item.leave(self._traffic)
        else:
            self.let_leave(item)  # it dies soon, and need not be copied before

    def let_go(self) -> None:
        """Lets everything leave that user code may hold or write: it runs next."""
        self.tick(TICKS_OF_ONE_OP)
        while self._parameters:
            self._drop(self._parameters.popleft())
        for item in list(self._held.values()):
            if isinstance(item, HomeItem):
                self.claim(item)
                self._drop(item)

    def clear(self) -> None:
        """Lets everything leave: the step is over, or what its ops need is not known."""
        self.let_go()
        while self._held:
            _, item = self._held.popitem()
            self._drop(item)

    def forget(self, item: Item) -> None:
        """The item is at its end."""
        self.claim(item)
        if self._known.get(item.key) is item:
            del self._known[item.key]

    # -- room ------------------------------------------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """Fetches what is foreseen, as far as there is room or something that is not foreseen can go without a wait."""
        if self._foresight is None or not self.has_room:
            return
        foreseen = [item for key in self._foresight.ahead() if (item := self._known.get(key)) is not None]
        self.fetch(item for item in foreseen if not isinstance(item, ParameterItem) or item.key in self.experience.clean)

    def fetch(self, items: Iterable[Item]) -> None:
        """Starts to fetch items in this order, up to the first for which no room can be made without a wait."""
        if self._foresight is None or not self.has_room:
            return
        traffic = self._traffic
        kept: set[int] = set()
        for item in items:
            kept.add(id(item))
            if item.state is not State.LOWER or item.place is None:
                continue
            self._make_room(item.size_bytes, kept)
            if traffic.device_bytes + item.size_bytes > self.room_bytes:
                return
            traffic.send(item, Event.FETCH)
            self._hold_last(item)

    def _hold_last(self, item: Item) -> None:
        """Puts an item behind all others that are held."""
        self._held[id(item)] = item
        self._held.move_to_end(id(item))

    def _make_room(self, size_bytes: int, kept: Collection[int]) -> None:
        """Lets go of what costs no wait and is not kept, until so much fits, or nothing is left."""
        traffic = self._traffic
        for key, item in list(self._held.items()):
            if traffic.device_bytes + size_bytes <= self.room_bytes:
                return
            if key not in kept and _goes_at_once(item):
                del self._held[key]
                self._drop(item)

    def _shrink(self) -> None:
        """Has what is held fit its room again, and copies under way of what leaves next: of half the room."""
        traffic = self._traffic
        while self._held and traffic.device_bytes > self.room_bytes:
            # What was fetched and not used yet goes last.
            item = next((i for i in self._held.values() if i.state is not State.ARRIVING), next(iter(self._held.values())))
            self.claim(item)
            self._drop(item)
        excess_bytes = traffic.device_bytes - self.room_bytes // 2
        for item in self._held.values():
            if excess_bytes <= 0:
                break
            excess_bytes -= item.size_bytes
            self._copy_out(item)

    def _copy_out(self, item: Item) -> None:
        """Begins a copy below, if there is no valid one."""
        traffic = self._traffic
        if self._foresight is None:
            return  # paging on demand alone: what leaves is copied when its room is needed
        if item.device is None or (isinstance(item, HomeItem) and item.may_be_written):
            return  # user code may hold such a parameter and go on writing: it is copied when it is dropped
        traffic.store(item)

    def _drop(self, item: Item) -> None:
        if item.device is not None and not self._runner.keeps(item):
            item.leave(self._traffic)


def _goes_at_once(item: Item) -> bool:
    """True for an item whose copy below is valid: its device copy goes without a wait."""
    if isinstance(item, HomeItem) and item.was_written():
        return False
    return item.state is State.BOTH or (item.state is State.LEAVING and item.leaving is not None and item.leaving.done())
