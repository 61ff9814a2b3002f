"""The step context: what hooks and the optimizer's stand-in use of a running step."""

from __future__ import annotations

from dataclasses import dataclass

from tieroff.runtime.execution.clock import Clock
from tieroff.runtime.execution.on_demand import OnDemand
from tieroff.runtime.execution.runner import PlanRunner
from tieroff.runtime.execution.state import StepState
from tieroff.runtime.items.offloaded import Guard
from tieroff.runtime.items.table import HomeTable
from tieroff.runtime.items.traffic import Traffic


@dataclass(frozen=True, slots=True)
class StepContext:
    """What hooks and the optimizer's stand-in use of a running step.

    Attributes:
        state: mode, kind and record of the step, and the lock.
        clock: turns its events into ticks.
        runner: what the plan says of an item.
        on_demand: what stays on the device while no plan says so.
        traffic: moves bytes.
        homes: the items that user code can reach.
        guard: serves user code that uses what lies below.
    """

    state: StepState
    clock: Clock
    runner: PlanRunner
    on_demand: OnDemand
    traffic: Traffic
    homes: HomeTable
    guard: Guard

    def lower_all(self) -> None:
        """Moves every home to its lower tier, with its latest value, except those that the plan keeps on the device."""
        with self.state.lock:  # other threads may read
            self.on_demand.release_reachable()
            for item in self.runner.movable(self.homes):
                self.runner.lower(item)
