"""The activations that living graphs saved, from the first pack to the death of the last."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tieroff.runtime.execution.on_demand import OnDemand
from tieroff.runtime.execution.runner import PlanRunner
from tieroff.runtime.execution.state import StepState
from tieroff.runtime.items.activation import ActivationItem
from tieroff.runtime.items.traffic import Traffic


class LiveActivations:
    """The activations under the engine's care.

    Attributes:
        dead: items one `Packed` object of which died. Objects die in any thread, also where an item is moved just now, so
            their items end at the next tick. Appending to a deque needs no lock.
    """

    def __init__(self, state: StepState, traffic: Traffic, runner: PlanRunner, on_demand: OnDemand) -> None:
        self._state, self._traffic, self._runner, self._on_demand = state, traffic, runner, on_demand
        self._items: dict[int, ActivationItem] = {}
        self.dead: deque[ActivationItem] = deque()

    def __iter__(self) -> Iterator[ActivationItem]:
        return iter(list(self._items.values()))

    def add(self, item: ActivationItem) -> None:
        """Takes an item under care."""
        self._items[id(item)] = item

    def drain(self) -> None:
        """Ends the items that no graph can ask for any more."""
        while self.dead:
            item = self.dead.popleft()
            item.packs -= 1
            if item.packs == 0:
                self._end(item)

    def _end(self, item: ActivationItem) -> None:
        self._items.pop(id(item), None)
        self._on_demand.forget(item)
        self._state.record.died(item.key)
        self._runner.unassign(item)
        self._traffic.end(item)

    def end_unused(self) -> None:
        """Ends items that no graph got, since an exception came first."""
        self.drain()
        for item in self:
            if item.packs <= 0:
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
