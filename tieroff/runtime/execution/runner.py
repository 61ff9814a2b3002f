"""The plan runner: walks a plan's schedule with the events of a step."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from operator import is_
from typing import TypeGuard

from tieroff.core.tensor import Tier, allocated_bytes
from tieroff.runtime.execution.state import StepState
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.item import Item
from tieroff.runtime.items.residency import ARRIVING, BELOW, BOTH, DEVICE
from tieroff.runtime.items.table import begin_to_leave, is_leaving
from tieroff.runtime.items.traffic import Traffic
from tieroff.runtime.step.executable import Executable
from tieroff.runtime.step.kinds import Planned
from tieroff.runtime.step.likeness import suits
from tieroff.runtime.step.mode import PLANNED
from tieroff.runtime.step.program import Actions, Program
from tieroff.runtime.step.quiet import NOTHING


class PlanRunner:
    """Does at each tick what the program of the plan says, with the items that its tensors are in this step.

    [Note: copies out before their tensor is known]
    A plan may have a tensor copied out from the end of the op that makes it. The engine gets it later: a saved tensor when
    autograd packs it, a gradient when it reaches its parameter. At the tick of the copy there is nothing to copy yet, so the
    copy begins in `copy_if_due`; otherwise it would begin when the memory is needed, and could not overlap with compute. That
    is for copies of what was written last: those of the gradient of an earlier backward are none of the one that comes now.

    [Note: loads of what is updated]
    A load that is due while the CPU updates its tensor would have the host wait, and with it all that the device is given next.
    So it begins at the first tick at which that update is over, after those that were due before it. Whoever uses the tensor
    sooner waits.

    Attributes:
        cursor: ticks that went by in the step.
        is_still: nothing was due at the last tick.
        peak_bytes: largest count of device bytes in the step: copies the engine holds plus the trace's transients.
        resident_activations, resident_gradients: of the plan that runs; see [Note: resident tensors] in step/executable.py.
        quiet: events that do not come in the step that runs; see [Note: quiet events] in step/quiet.py.
        unborn_bytes: of activations and gradients that the trace has by now and the engine has not: transients so far.
    """

    def __init__(self, state: StepState, traffic: Traffic) -> None:
        self._state, self._traffic = state, traffic
        self.planned: Planned | None = None
        self._keys: tuple[Hashable, ...] = ()
        self._program: Program = ()
        self._births: tuple[int, ...] = ()
        self._transients: tuple[int, ...] = ()
        self.resident_activations: frozenset[int] = frozenset()
        self.resident_gradients: frozenset[int] = frozenset()
        self.quiet = NOTHING
        self._items: list[Item | None] = []  # by index in the trace
        self._movers: list[HomeItem] = []  # homes that the plan does not keep on the device for the whole step
        # The homes that the last plan's step began with, and what `_items` and `_movers` were then.
        self._begun: tuple[list[HomeItem], list[Item | None], list[HomeItem]] = [], [], []
        self._late: list[tuple[int, int, Item]] = []  # (tick, thread, item): see [Note: copies out before …]
        self._updating: list[Item] = []  # see [Note: loads of what is updated]
        self.cursor = self.peak_bytes = self.unborn_bytes = 0
        self.is_still = False
        self._seen: Executable | None = None

    def follows(self, planned: Planned | None) -> bool:
        """True when the step that ran last had the same decisions."""
        return self.planned is not None and planned is not None and self.planned.executable is planned.executable

    def has_seen(self, planned: Planned | None) -> bool:
        """True when a step with these decisions has come to its end with all its events: it could be quiet now."""
        return planned is not None and self._seen is planned.executable

    def reached_end(self) -> None:
        """A step has followed its plan to the end."""
        if self.planned is not None and self.quiet is NOTHING:
            self._seen = self.planned.executable

    def begin(self, planned: Planned | None, homes: Iterable[HomeItem] = (), *, is_quiet: bool = False) -> None:
        """A step begins with these homes; it runs as planned, perhaps without quiet events, or has no plan."""
        is_same = self.follows(planned)
        self.cursor = self.peak_bytes = self.unborn_bytes = 0
        self.planned, self._late, self._updating = planned, [], []
        self._keys, self._program, self.quiet = (), (), NOTHING
        self.resident_activations = self.resident_gradients = frozenset()
        if planned is not None:
            self._keys, self._program = planned.recorded.keys, planned.executable.program
            self.quiet = planned.executable.quiet if is_quiet else NOTHING
            self._births, self._transients = planned.executable.births, planned.executable.transients
            self.resident_activations = planned.executable.resident_activations
            self.resident_gradients = planned.executable.resident_gradients
        self._take_homes([*homes], planned, is_same=is_same)

    def _take_homes(self, homes: list[HomeItem], planned: Planned | None, *, is_same: bool) -> None:
        """Gives homes their tensors; most steps have the plan and homes of the one before, which has said all about them."""
        known, items, movers = self._begun
        if not is_same or len(homes) != len(known) or not all(map(is_, homes, known)):
            self._items = items = [None] * len(planned.trace.tensors) if planned is not None else []
            self._movers = movers = []
            for item in homes:
                self.assign(item)
            self._begun = homes, items, movers
        self._items, self._movers = items.copy(), movers.copy()

    def stop(self) -> None:
        """The step goes on without its plan, or ends: no copy is due any more."""
        self._late, self._updating, self.quiet = [], [], NOTHING
        self.resident_activations = self.resident_gradients = frozenset()

    # -- ticks -----------------------------------------------------------------------------------------------------

    def advance(self, key: Hashable) -> bool:
        """Does what is due at the next tick; False, with nothing done, when the plan has another event there."""
        cursor, keys, following = self.cursor, self._keys, self.quiet.following
        self.is_still = False
        if following:
            cursor = following[cursor]
        if cursor >= len(keys) or (keys[cursor] != key and not suits(key, keys[cursor])):
            return False
        self.cursor = cursor + 1
        actions = self._program[cursor]
        if self._late:
            self._copy_late()
        elif self._updating:
            self._load_updated()
        elif actions is None:
            self.is_still = True
        if actions is not None:
            self._act(actions)
        return True

    def _act(self, actions: Actions) -> None:
        """Does what a tick has, in the order of [Note: order of events at a tick] in core/plan.py.

        A tensor that the engine does not have, or that fell behind its plan, is left to whoever uses it next.
        """
        items, traffic = self._items, self._traffic
        outs_first, waits, leaves, issues, arrivals = actions
        for index in outs_first:
            item = items[index]
            if item is not None and item.device is not None:
                self._begin_out(item)
        if waits:
            traffic.settle_all([item for i in waits if (item := items[i]) is not None and item.leaving is not None])
        for index in leaves:
            item = items[index]
            if item is not None and item.device is not None:
                item.leave(traffic)
        for leads_in, index in issues:
            item = items[index]
            if item is None:
                continue
            if not leads_in:
                if item.device is None:
                    continue
                if self.is_late(item):
                    begin_to_leave(item, traffic)
                else:
                    self._begin_out(item)
            elif item.updating is not None and not item.updating.done():
                self._updating.append(item)
            elif item.state in BELOW and not item.stays_below:
                traffic.fetch(item)
        if arrivals:
            traffic.settle_all([item for i in arrivals if (item := items[i]) is not None and item.state is ARRIVING])

    def _begin_out(self, item: Item) -> None:
        """Begins a copy out that is due.

        What something else holds, such as a parameter that was given the same memory, is copied only where it leaves: no
        version shows what is written through that, during the copy or after it.
        """
        if not (isinstance(item, HomeItem) and item.is_held):
            self._traffic.store(item)

    def _load_updated(self) -> None:
        """Begins loads that were due, up to the first whose update is not over; what was used has come, and may be gone."""
        while self._updating and (self._updating[0].updating is None or self._updating[0].updating.done()):
            item = self._updating.pop(0)
            if item.updating is not None and not item.stays_below:
                self._traffic.fetch(item)

    def measure(self) -> None:
        """Counts the device bytes of the op that just ended, and of those after it whose events are quiet."""
        done, traffic, quiet = self.cursor - 1, self._traffic, self.quiet
        if done < 0:  # also where there is no plan
            return
        if quiet.following:
            most, transients = self.unborn_bytes + quiet.peaks[done], quiet.transients[done]
            count = traffic.device_bytes + (most if most > transients else transients)
            self.unborn_bytes += quiet.births[done]
        else:
            self.unborn_bytes = unborn_bytes = self.unborn_bytes + self._births[done]
            count = traffic.device_bytes + self._transients[done]
            if unborn_bytes > 0:
                count += unborn_bytes
            if traffic.keep_spans:
                traffic.held.note(count)
        if count > self.peak_bytes:
            self.peak_bytes = count

    @property
    def beside_bytes(self) -> int:
        """What the running op has on the device besides the engine's copies, while user code has what came up for it."""
        done, quiet = self.cursor - 1, self.quiet
        if self.planned is None or done < 0 or self._state.mode is not PLANNED:
            return 0
        if quiet.following:
            return max(self.unborn_bytes + quiet.peaks[done], quiet.transients[done])
        return max(self.unborn_bytes, 0) + self.planned.executable.beside[done]

    @property
    def has_room(self) -> bool:
        """True where what came up for user code may stay until the running op of a plan ends."""
        done = self.cursor - 1
        if self.planned is None or done < 0 or self._state.mode is not PLANNED:
            return True
        beside_bytes = max(self.unborn_bytes + self._births[done], 0) + self._transients[done]
        return self._traffic.device_bytes + beside_bytes <= self.planned.plan.budget_bytes.get(Tier.DEVICE, 0)

    def note_more(self) -> None:
        """There is more than the plan has: what came up for user code, or state that the running update made."""
        if self.planned is not None and self._state.mode is PLANNED:
            self.peak_bytes = max(self.peak_bytes, self._traffic.device_bytes + self.beside_bytes)

    def latest_first(self) -> list[Item]:
        """Returns what the plan moves and has on the device just now, those first that it uses last."""
        planned, now, count = self.planned, self.cursor, len(self._keys)
        if planned is None or self._state.mode is not PLANNED:
            return []
        incomplete = {id(item) for _, _, item in self._late}
        moved = [i for i in planned.executable.tiers if (item := self._items[i]) is not None and id(item) not in incomplete]

        def next_use(index: int) -> int:
            starts = (start for start, _ in planned.trace.lifetimes[index].required)
            return min((start if start >= now else start + count for start in starts), default=2 * count)

        known = [item for i in sorted(moved, key=next_use, reverse=True) if (item := self._items[i]) is not None]
        strangers = [item for item in self._movers if item.index < 0]
        return [item for item in (*strangers, *known) if item.device is not None]

    @property
    def is_at_end(self) -> bool:
        """True when every event of the plan went by."""
        if self.planned is None:
            return False
        following = self.quiet.following
        cursor = following[self.cursor] if following else self.cursor
        return cursor == len(self.planned.recorded.keys)

    def expects(self, key: Hashable) -> bool:
        """True when the plan has this event next."""
        following = self.quiet.following
        cursor = following[self.cursor] if following else self.cursor
        return cursor < len(self._keys) and self._keys[cursor] == key

    @property
    def events(self) -> list[Hashable]:
        """Those of the plan that went by."""
        return [*self._keys[: self.cursor]]

    @property
    def expected(self) -> str:
        """The event that the plan has next, for people."""
        names = self.planned.recorded.names if self.planned is not None else ()
        return names[self.cursor] if self.cursor < len(names) else "the end of the step"

    # -- copies out before their tensor is known -------------------------------------------------------------------

    def copy_if_due(self, item: Item, wait_ticks: int = 0) -> None:
        """The engine got a tensor of the step, which its own op may still write for `wait_ticks` more."""
        if self.planned is None or self._state.mode is not PLANNED or item.state is not DEVICE:
            return
        copies = self.planned.executable.copied.get(item.index)
        if copies is None or not any(at < self.cursor <= written_at for at, written_at in copies):
            return
        if wait_ticks:
            self._late.append((self.cursor + wait_ticks, threading.get_ident(), item))
        else:
            self._traffic.store(item)

    def _copy_late(self) -> None:
        """Begins copies whose wait is over. Ticks of another thread do not end ops of this one, such as hooks of users."""
        own, now = threading.get_ident(), self.cursor
        ready = [item for at, thread, item in self._late if at <= now and thread == own]
        self._late = [late for late in self._late if late[0] > now or late[1] != own]
        for item in ready:
            if item.device is not None:
                self._traffic.store(item)

    # -- items -----------------------------------------------------------------------------------------------------

    def assign(self, item: Item) -> None:
        """Gives an item its tensor and tier in the plan that runs."""
        item.index, item.stays_resident = -1, False
        planned = self.planned
        if planned is None:
            return
        item.index = index = planned.recorded.index.get(item.key, -1)
        if index >= 0:
            self._items[index] = item
            tier = planned.executable.tiers.get(index)
            if tier is None:
                item.stays_resident = True
                return
            item.tier = tier
        if isinstance(item, HomeItem):
            self._movers.append(item)

    def tier_of(self, key: Hashable) -> Tier | None:
        """Returns the lower tier that the plan which runs gives a tensor; None where it gives it none, or none runs."""
        planned = self.planned
        if planned is None or self._state.mode is not PLANNED:
            return None
        return planned.executable.tiers.get(planned.recorded.index.get(key, -1))

    def born(self, item: Item) -> None:
        """The engine takes a tensor over that the step has just made."""
        self.assign(item)
        if item.index >= 0 and self.planned is not None:  # what `_births` added: a smaller step has smaller tensors
            self.unborn_bytes -= self.planned.trace.tensors[item.index].size_bytes

    def passed(self, key: Hashable) -> None:
        """The step has a tensor in this one's place that is too small to move, of which nothing is counted."""
        index = self.planned.recorded.index.get(key, -1) if self.planned is not None else -1
        if self.planned is not None and index in self.planned.executable.tiers:
            self.unborn_bytes -= self.planned.trace.tensors[index].size_bytes

    def strangers(self, homes: Iterable[HomeItem]) -> list[HomeItem]:
        """Returns the homes that the plan does not know, or knows as smaller ones; the largest first."""
        tensors = self.planned.trace.tensors if self.planned is not None else ()
        device_type = self._traffic.backend.device.type
        found = [
            item
            for item in homes
            if not item.is_sliced
            if item.index < 0 or allocated_bytes(item.size_bytes, device_type) > tensors[item.index].size_bytes
        ]
        return sorted(found, key=lambda item: -item.size_bytes)

    def unassign(self, item: Item) -> None:
        """The care for an item ends in mid-step: the plan that runs does not move it again."""
        if 0 <= item.index < len(self._items) and self._items[item.index] is item:
            self._items[item.index] = None

    def keeps(self, item: Item) -> bool:
        """True when the plan that runs leaves the item on the device for the whole step."""
        return item.stays_resident and self._state.mode is PLANNED

    def is_resident(self, item: HomeItem) -> bool:
        """True for one on the device that the plan has there all the time, so that its use asks nothing of the engine."""
        is_up = item.is_lifted and item.state is DEVICE and item.device is not None  # else the care for it has ended
        return is_up and item.stays_resident and self._state.mode is PLANNED

    def not_resident(self, items: Iterable[HomeItem]) -> list[HomeItem]:
        """Returns those of the items that `is_resident` is False of."""
        if self._state.mode is not PLANNED:
            return list(items)
        return [  # the same, in line: an update asks for all that it uses
            item
            for item in items
            if not (item.stays_resident and item.is_lifted and item.state is DEVICE and item.device is not None)
        ]

    def movable(self, homes: Iterable[HomeItem]) -> list[HomeItem]:
        """Returns those of all homes on the device that may leave in the step that runs: its plan keeps the others there."""
        is_planned = self.planned is not None and self._state.mode is PLANNED
        return [item for item in (self._movers if is_planned else homes) if item.device is not None]

    @property
    def is_before_update(self) -> bool:
        """True between the last event of backward and the first of the update."""
        if self.planned is None or self._state.mode is not PLANNED:
            return False
        following, update_at = self.quiet.following, self.planned.executable.update_at
        return self.cursor <= update_at <= (following[self.cursor] if following else self.cursor)

    def is_late(self, item: Item) -> TypeGuard[HomeItem]:
        """True for an item that is idle until the step ends, and leaves in the next one: see [Note: late evictions]."""
        planned = self.planned
        if planned is None or not planned.executable.late or self._state.mode is not PLANNED:
            return False
        is_idle = planned.executable.late.get(item.index, self.cursor + 1) <= self.cursor
        return is_idle and isinstance(item, HomeItem) and not item.is_shown_below

    def lower(self, item: HomeItem) -> None:
        """User code runs next: an item goes below, or begins to, if the plan has it leave only in the next step."""
        if self.is_late(item):
            begin_to_leave(item, self._traffic)
        else:
            item.leave(self._traffic)

    def lower_late(self) -> None:
        """Sends below what the plan has leave in the course of this step, or of the next one: others need the room."""
        for index in self.planned.executable.late if self.planned is not None else ():
            item = self._items[index]
            if isinstance(item, HomeItem) and is_leaving(item):
                item.leave(self._traffic)

    def stays_for_update(self, item: HomeItem) -> bool:
        """True for an item that the plan has on the device while user code runs; lifted, it counts as written from here."""
        if self._state.mode is not PLANNED or self.planned is None:
            return False
        if item.index not in self.planned.executable.stays_after_backward:
            return False
        if item.state is ARRIVING:
            self._traffic.settle(item)  # brought back for what user code does next
        if item.state not in (DEVICE, BOTH):  # user code must not write under a copy that is under way
            return False
        item.lift(self._traffic)
        item.touch(self._traffic)
        return True
