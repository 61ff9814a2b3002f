"""What stays on the device while nothing is planned: a moment's needs, and, where there is room, what is used again soon.

[Note: room]
Room is what the budget leaves when every op has what it needs and everything else is away, by the traces of steps that were
recorded. Up to it saved tensors stay (least recently used leaves first), and what the update is done with. With a
`Foresight`, copies out begin before their room is needed, and predicted tensors are fetched; without one, this is paging.
Steps that are recorded or measured have no room: their traces must show what ops need. Nor have those with an input that is
larger than every recorded one.

[Note: homes]
Parameters and gradients stay no longer than without room: user code (hooks, forwards, whoever catches an exception) may write
them through `.data`, which no version shows, and where they lie below that counts. Only parameters that no recorded
step wrote in forward or backward are prefetched; a prefetched copy is not handed out until it is read.

[Note: passes between steps]
A forward without gradients that is no part of a step (an evaluation, a token of a text) reads what it needs, and the next one
reads the same. So between two steps, what was fetched stays while it fits the room; what comes when that is full goes at once,
since of what is read over and over in one order the oldest is needed first. User code that runs between two passes finds each
parameter below, where its writes count, and the device copy goes with the first of them. Parameters that the plan has on the
device for the whole step stay as they are between steps.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Iterable, Iterator

from tieroff.core.seams import Foresight
from tieroff.runtime.execution.autograd import NO_NODE, node_here
from tieroff.runtime.execution.experience import Experience
from tieroff.runtime.execution.refusals import Refusals
from tieroff.runtime.execution.runner import PlanRunner
from tieroff.runtime.execution.state import StepState
from tieroff.runtime.items.activation import ActivationItem
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.item import Item
from tieroff.runtime.items.parameter import ParameterItem
from tieroff.runtime.items.residency import ARRIVING, BOTH, LEAVING, LOWER
from tieroff.runtime.items.traffic import Traffic
from tieroff.runtime.step.kinds import Planned, Unplanned
from tieroff.runtime.step.mode import DEMAND, PLANNED

# How many fetched parameters are kept at hand: enough for a weight and its bias.
_READ_KEPT = 2
# More tensors than any op saves of its inputs before its kernel runs, and fills in that kernel.
TICKS_OF_ONE_OP = 3


class OnDemand:
    """The last parameters that were read, saved tensors that their op may not have filled yet, and what room is for.

    Attributes:
        room_bytes: device bytes that no op of this step needs; see [Note: room].
        pass_room_bytes: the same of the pass that runs between steps, and 0 while none does.
        experience: what recorded steps say.
        refusals: of what could not leave.
    """

    def __init__(self, state: StepState, traffic: Traffic, runner: PlanRunner, foresight: Foresight | None = None) -> None:
        self._state, self._traffic, self._runner = state, traffic, runner
        self._foresight = foresight
        self.room_bytes = 0
        self.experience = Experience()
        self._read: deque[HomeItem] = deque()
        self._reader = NO_NODE
        self.refusals = Refusals(state, traffic, runner)
        self._incomplete: deque[tuple[ActivationItem, int]] = deque()
        self._ticks = 0
        self._kept: OrderedDict[int, Item] = OrderedDict()  # by id; the first to leave first
        self._known: dict[Hashable, Item] = {}
        self._strays: OrderedDict[int, HomeItem] = OrderedDict()  # by id, oldest first
        self.pass_room_bytes = self._calls = 0
        self._resting: dict[int, ParameterItem] = {}  # by id; see [Note: passes between steps]

    @property
    def has_room(self) -> bool:
        """True while things may stay beyond the moment."""
        state = self._state
        if self.room_bytes <= 0 or state.mode is not DEMAND or state.record.recorder is not None:
            return False
        return state.kind is not None and isinstance(state.kind.stage, Unplanned | Planned)

    def begin(self, parameters: Iterable[ParameterItem]) -> None:
        """A step begins."""
        self.room_bytes = self.experience.room_bytes
        self._known = {item.key: item for item in parameters}
        self._resting.clear()  # what the step does not have on the device has left
        if self._foresight is not None:
            self._foresight.begin()

    # -- what happens ----------------------------------------------------------------------------------------------

    def keep_read(self, item: HomeItem) -> None:
        """Keeps what was fetched for its user for a moment; on the host its user holds its own reference to the memory."""
        self.claim(item)
        if item in self._read:
            self._read.remove(item)
        self._read.append(item)
        self._reader = node_here()
        self._keep_few(_READ_KEPT if self._runner.has_room else 0)

    def _keep_few(self, count: int = _READ_KEPT) -> None:
        while len(self._read) > count and not self._calls:
            self._put_away(self._read.popleft())

    def make_way(self) -> None:
        """Frees what stays for a moment only: that is over, or its room is needed."""
        with self._state.lock:
            self._keep_few(0)

    def unpacks(self) -> None:
        """Autograd asks for what was saved: what was read before the node that it evaluates has been used.

        Else the last that a layer's recomputation reads would stay for all of that layer's backward, in which nothing is read.
        """
        if self._read and not self._calls and node_here() != self._reader:
            self.make_way()

    @property
    def keeps_read(self) -> bool:
        """True while something stays that was read."""
        return bool(self._read)

    def make_room(self, size_bytes: int, limit_bytes: int, used: Collection[HomeItem]) -> None:
        """Frees what stays for a moment, then what a plan has on the device, until so much more fits, or nothing can leave.

        What a plan has there comes back as it is used, or as the plan brings it back.

        Args:
            size_bytes: wanted for user code.
            limit_bytes: of the device.
            used: what stays: it is used together with what is wanted.
        """
        limit_bytes -= size_bytes + self._runner.beside_bytes
        if self._traffic.device_bytes <= limit_bytes:
            return
        self.refusals.ask()
        for read in [item for item in self._read if item not in used] if not self._calls else ():
            self._read.remove(read)
            self._put_away(read)
        self._runner.lower_late()
        for item in self._runner.latest_first():
            if self._traffic.device_bytes <= limit_bytes:
                return
            if not isinstance(item, HomeItem) or (item not in used and not item.is_held):
                item.leave(self._traffic)

    @contextlib.contextmanager
    def in_call(self) -> Iterator[None]:
        """Inside, all that is read stays: code that is not watched gets it as it begins, and uses it until it has ended."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls = max(self._calls - 1, 0)  # the step may have broken off in it
            with self._state.lock:
                self._keep_few()

    def abandon(self) -> None:
        """The step, or a pass, broke off: no call is under way, wherever in it the exception came."""
        self._calls = self.pass_room_bytes = 0
        self._resting.clear()

    def forget_read(self, item: HomeItem) -> None:
        """Somebody else decides when it leaves."""
        if self._strays:
            self._strays.pop(id(item), None)
        if self._read and item in self._read:
            self._read.remove(item)

    def release_read(self, item: ParameterItem) -> None:
        """Frees a fetched parameter at once: this copy is not used any more."""
        with self._state.lock:
            if item in self._read:
                self._read.remove(item)
                self._drop(item)

    def claim(self, *items: Item) -> None:
        """These are used now: their user decides when they leave."""
        if not self._kept and not self._strays and not self._resting:
            return
        for item in items:
            self._resting.pop(id(item), None)
            self._kept.pop(id(item), None)
            self._strays.pop(id(item), None)

    def stray(self, item: HomeItem) -> None:
        """Another thread than those of the step brings this up; it leaves as its next ones come, unless the step uses it."""
        self._resting.pop(id(item), None)
        self._strays[id(item)] = item
        self._strays.move_to_end(id(item))
        for old in list(self._strays.values())[:-_READ_KEPT]:
            if not old.pins:
                del self._strays[id(old)]
                self._drop(old)

    def is_resting(self, item: HomeItem) -> bool:
        """True for a parameter of which a pass between steps left a copy on the device, and that nobody used since."""
        return id(item) in self._resting

    def is_stray(self, item: HomeItem) -> bool:
        """True while another thread's call brought this up, and the step did not use it since."""
        return id(item) in self._strays

    @property
    def _predicts(self) -> bool:
        """False in a step that follows its plan: the plan says what comes next, and noting it would cost 4 us a tensor."""
        return self._state.mode is not PLANNED

    def used(self, key: Hashable) -> None:
        """Forward used a parameter."""
        if self._foresight is not None and self._predicts:
            with self._state.lock:
                self._foresight.used(key)
                self._look_ahead()

    def saved(self, item: Item) -> None:
        """Autograd saved this for backward."""
        if self._foresight is not None and self._predicts:
            with self._state.lock:
                self._known[item.key] = item
                self._foresight.saved(item.key)

    def wanted(self, item: Item) -> None:
        """Backward used what was saved."""
        if self._foresight is not None and self._predicts:
            with self._state.lock:
                self._foresight.wanted(item.key)
                self._look_ahead()

    def keep_until_complete(self, item: ActivationItem) -> None:
        """Keeps a saved tensor until the ticks of its own op are over."""
        self._incomplete.append((item, self._ticks + TICKS_OF_ONE_OP))

    def tick(self, ticks: int = 1) -> None:
        """Ticks went by: saved tensors whose own op is over may leave."""
        self._ticks += ticks
        while self._incomplete and self._incomplete[0][1] <= self._ticks:
            item, _ = self._incomplete.popleft()
            if item.device is not None and item.state is not ARRIVING:
                self.release(item)

    def release(self, *items: Item) -> None:
        """Releases items that nothing uses right now: they leave at once, or when their room is needed.

        Homes only where no user code can reach them before the next `release_reachable`.
        """
        if not self.has_room:
            for item in items:
                item.leave(self._traffic)
            return
        for item in items:
            self._keep_last(item)
            if isinstance(item, HomeItem):
                self._copy_out(item)  # before user code runs next it has to lie below in any case
        self._shrink()

    def unpacked(self, item: ActivationItem) -> None:
        """Backward has a saved tensor, and as a rule it was the last to ask for it."""
        if not self.has_room or item.state is BOTH:
            item.leave(self._traffic)
        else:
            self.release(item)  # it dies soon, and need not be copied before

    def release_reachable(self) -> None:
        """Frees everything that user code may hold or write, because it runs next."""
        with self._state.lock:  # other threads may read
            self.tick(TICKS_OF_ONE_OP)
            self.refusals.ask_all()
            while self._read:
                self._put_away(self._read.popleft())
            for resting in self._resting.values():
                resting.rest(self._traffic)
            for stray in list(self._strays.values()):
                if not stray.pins:
                    del self._strays[id(stray)]
                    self._drop(stray)
            for item in list(self._kept.values()):
                if isinstance(item, HomeItem):
                    self.claim(item)
                    self._drop(item)

    def release_all(self) -> None:
        """Frees everything: the step is over, or what its ops need is unknown."""
        with self._state.lock:
            self.release_reachable()
            while self._kept:
                _, item = self._kept.popitem()
                self._drop(item)
            self.refusals.step_ended()

    def forget(self, item: Item) -> None:
        """The item is at its end."""
        self.claim(item)
        if self._known.get(item.key) is item:
            del self._known[item.key]

    # -- passes between steps ---------------------------------------------------------------------------------------

    def begin_pass(self, room_bytes: int) -> None:
        """A pass between steps begins, which leaves so many device bytes; see [Note: passes between steps]."""
        self.pass_room_bytes = room_bytes
        while self._resting and self._traffic.device_bytes > room_bytes:
            self._drop(self._resting.popitem()[1])

    def _put_away(self, item: HomeItem) -> None:
        """The device copy of what was read is not used for now."""
        has_room = self.pass_room_bytes > 0 and self._traffic.device_bytes <= self.pass_room_bytes
        if has_room and isinstance(item, ParameterItem) and item.device is not None:
            self._resting[id(item)] = item
        else:
            self._drop(item)  # at once, whatever the room in a step: user code may write what is lifted

    # -- room ------------------------------------------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """Prefetches predicted tensors, as far as there is room or something else can leave without a wait."""
        if self._foresight is None or not self.has_room:
            return
        predicted = [item for key in self._foresight.ahead() if (item := self._known.get(key)) is not None]
        self.fetch(item for item in predicted if not isinstance(item, ParameterItem) or item.key in self.experience.clean)

    def fetch(self, items: Iterable[Item]) -> None:
        """Starts to fetch items in this order, up to the first for which no room can be made without a wait."""
        if self._foresight is None or not self.has_room:
            return
        traffic = self._traffic
        kept: set[int] = set()
        for item in items:
            kept.add(id(item))
            if item.state is not LOWER or item.place is None or item.stays_below:
                continue
            self._make_room(item.size_bytes, kept)
            if traffic.device_bytes + item.size_bytes > self.room_bytes:
                return
            traffic.fetch(item)
            self._keep_last(item)

    def _keep_last(self, item: Item) -> None:
        """Puts an item behind all others that are held."""
        self._kept[id(item)] = item
        self._kept.move_to_end(id(item))

    def _make_room(self, size_bytes: int, kept: Collection[int]) -> None:
        """Frees what costs no wait and is not kept, until `size_bytes` fit or nothing is left."""
        traffic = self._traffic
        for key, item in list(self._kept.items()):
            if traffic.device_bytes + size_bytes <= self.room_bytes:
                return
            if key not in kept and _goes_at_once(item):
                del self._kept[key]
                self._drop(item)

    def _shrink(self) -> None:
        """Frees what exceeds the room, and starts copies out of what leaves next, down to half the room."""
        traffic = self._traffic
        while self._kept and traffic.device_bytes > self.room_bytes:
            # What was fetched and not used yet goes last.
            item = next((i for i in self._kept.values() if i.state is not ARRIVING), next(iter(self._kept.values())))
            self.claim(item)
            self._drop(item)
        excess_bytes = traffic.device_bytes - self.room_bytes // 2
        for item in self._kept.values():
            if excess_bytes <= 0:
                break
            excess_bytes -= item.size_bytes
            self._copy_out(item)

    def _copy_out(self, item: Item) -> None:
        """Begins a copy below, if there is no valid one."""
        traffic = self._traffic
        if self._foresight is None:
            return  # paging on demand alone: what leaves is copied when its room is needed
        if item.device is None or (isinstance(item, HomeItem) and (item.may_be_written or item.is_held)):
            return  # user code may write on, or another parameter on its memory be updated: it is copied when it is dropped
        traffic.store(item)

    def _drop(self, item: Item) -> None:
        if item.device is not None and not self._runner.keeps(item):
            item.leave(self._traffic)


def _goes_at_once(item: Item) -> bool:
    """True for an item whose copy below is valid: its device copy goes without a wait."""
    if isinstance(item, HomeItem) and item.was_written():
        return False
    return item.state is BOTH or (item.state is LEAVING and item.leaving is not None and item.leaving.done())
