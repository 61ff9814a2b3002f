"""Rest: a model that is trained without a forward of its own has all of itself on the device, until one is called.

Of such a model no step begins, so nothing is traced and nothing is planned: what its parts save, and their gradients, are above
any budget already. To fetch each parameter as it is read would only cost time, where there is room for all of them.
"""

from __future__ import annotations

from tieroff.core.seams import PlanSource
from tieroff.runtime.hooks.unattached import WithoutForward
from tieroff.runtime.items.table import leave_place
from tieroff.runtime.managed.model import ManagedModel
from tieroff.runtime.step.mode import IDLE, PASS


class Rest:
    """Looks for updates without a forward, and lets the model be from the third on.

    Attributes:
        is_on: everything is on the device, and the engine takes no part.
    """

    def __init__(self, managed: ManagedModel, plans: PlanSource) -> None:
        self._managed, self._plans = managed, plans
        self._updates = WithoutForward(managed.model)
        self.is_on = False

    def takes_update(self) -> bool:
        """The attached optimizer begins an update, and no step was ever begun; True where that needs nothing of the engine."""
        if not self.is_on and self._updates.is_due():
            size_bytes = sum(item.size_bytes for item in self._managed.executor.homes)
            if self._managed.may_be_bypassed() and self._plans.leaves_room(size_bytes):
                self._begin(2 * size_bytes)
            self._updates.say(rests=self.is_on)
        return self.is_on

    def _begin(self, room_bytes: int) -> None:
        executor, backend = self._managed.executor, self._managed.backend
        self.is_on = True  # first: an exception may come between any two lines, and `end` undoes any part of what follows
        executor.gradients.sweep()
        for item in executor.homes:
            if item.tensor is not None:
                item.refresh(executor.traffic)
                item.lift(executor.traffic)
                leave_place(item, executor.traffic)
        executor.reads.intercept(False)
        self._managed.bypass(None)
        backend.tune_allocator(None)
        backend.keep_freed(room_bytes)
        executor.state.mode = PASS

    def end(self) -> None:
        """The engine manages everything again; what lies up leaves as the next step has it."""
        if self.is_on:
            self._managed.come_back()
            self._managed.executor.reads.intercept(bool(self._managed.executor.homes.parameters))
            self._managed.executor.state.mode = IDLE
            self._managed.backend.keep_freed(0)
            self.is_on = False  # last, for the same reason
