"""Parameters to which user code gives other memory (`p.data = t`) while it runs between backward and update, or steps.

[Note: assigned parameters]
Nobody is told that a plain parameter was assigned, and what it lay on stays until it is used or moved next: of a loop that
assigns all before their update, every old value or every new one would be on the device at once. So while user code runs,
parameters have the class that tells (`WatchedParameter`): all of them in a recorded step, and from then on those that user code
was seen to assign. What they lay on goes at once, and they leave as anything that came up for a call does. In the trace, new
memory counts from when it was made until it was assigned.
"""

from __future__ import annotations

import weakref

from tieroff.runtime.execution.autograd import as_the_engine, current_graph_task
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.hooks.parameters.reads import ParameterReads
from tieroff.runtime.items.offloaded import unwatch, watch
from tieroff.runtime.items.parameter import ParameterItem
from tieroff.runtime.step.mode import DEMAND, PLANNED


class AssignedParameters:
    """Those of one engine."""

    def __init__(self, context: StepContext, reads: ParameterReads) -> None:
        self._context, self._reads = context, reads
        self._known: weakref.WeakSet[ParameterItem] = weakref.WeakSet()
        self._looks = False

    def user_code_begins(self) -> None:
        """User code runs next."""
        if self._context.state.mode not in (DEMAND, PLANNED):
            return
        recorder = self._context.state.record.recorder
        is_recorded = recorder is not None and recorder.is_on
        self._looks = True
        for item in list(self._context.homes.parameters.values()) if is_recorded else list(self._known):
            self.look(item)

    def forward_ended(self) -> None:
        """A forward is over: what it gave other memory and the plan keeps on the device is not seen by its use."""
        assigned = [item for item in self._context.homes.parameters.values() if item.times_assigned and item.was_assigned()]
        if not assigned or self._context.state.mode is not PLANNED:
            return
        with self._context.state.lock, as_the_engine():
            for item in assigned:
                if item.may_take(item.living):
                    item.refresh(self._context.traffic)
                    self._reads.live.follow(item)

    def look(self, item: ParameterItem) -> None:
        """User code that runs may assign this one."""
        is_recorded = self._context.state.record.recorder is not None
        if self._looks and (is_recorded or item in self._known) and type(item) is ParameterItem:
            watch(item.tensor)

    def engine_begins(self) -> None:
        """The model, or the optimizer, uses parameters next."""
        is_recorded = self._context.state.record.recorder is not None
        self._looks = False
        for item in list(self._context.homes.parameters.values()) if is_recorded else list(self._known):
            unwatch(item.tensor)

    def assigned(self, item: ParameterItem) -> None:
        """User code gave a watched parameter other memory; elsewhere that is seen by its address, before it is used."""
        context, recorder = self._context, self._context.state.record.recorder
        is_elsewhere = self._reads.depth > 0 or current_graph_task() != -1 or self._reads.is_interrupting()
        if is_elsewhere or context.state.mode not in (DEMAND, PLANNED):
            return
        with context.state.lock, as_the_engine():
            context.on_demand.refusals.ask()  # the memory of the one before may be let go by now
            times = item.times_assigned
            if item.may_take(item.living):
                item.refresh(context.traffic)
            if item.times_assigned == times or item.is_unmanaged or item.device is None:
                return
            self._reads.live.follow(item)
            self.taken(item)
            if recorder is not None:
                context.on_demand.make_way()
            self.look(item)

    def taken(self, item: ParameterItem) -> None:
        """A parameter lies on memory that user code has made: it leaves like what came up for a call."""
        context, recorder = self._context, self._context.state.record.recorder
        self._known.add(item)
        if recorder is not None and item.device is not None:
            recorder.bind(item.device.untyped_storage(), item.key, is_below=True, is_set=True)
        if not (context.runner.is_before_update and context.runner.stays_for_update(item)):
            context.on_demand.keep_read(item)
