"""The clock of a step: its events begin ops, and compute is timed apart from the engine's own work."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from tieroff.runtime.backend.stamp import Stamp, Time, ns_of
from tieroff.runtime.execution.activations import LiveActivations
from tieroff.runtime.execution.autograd import current_graph_task, training_phase
from tieroff.runtime.execution.on_demand import OnDemand
from tieroff.runtime.execution.runner import PlanRunner
from tieroff.runtime.execution.state import StepState
from tieroff.runtime.items.traffic import Traffic
from tieroff.runtime.step.mode import DEMAND, IDLE, PASS, PLANNED
from tieroff.runtime.tensors import outside_inference

log = logging.getLogger("tieroff")


class AtBackwardEnd(Protocol):
    """What acts when a backward ends, before user code runs again."""

    def backward_ended(self) -> None:
        """A backward has ended."""


class AtDivergence(Protocol):
    """Takes over what was resident in the plan."""

    def left_plan(self) -> None:
        """The step goes on without its plan."""


class UnderWay(Protocol):
    """A collective that goes on beside compute."""

    def look(self) -> bool:
        """Notes when it is over; True if it is."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A collective that went on beside compute, by the host's clock.

    Attributes:
        op: that began it.
        until: the op before which it was waited for.
        start_ns, stop_ns: it began, and was seen to be over.
        waited_ns: how long compute waited for it.
    """

    op: int
    until: int
    start_ns: int
    stop_ns: int
    waited_ns: int


class StepTimes:
    """When compute of each op of a step began and ended.

    Attributes:
        host_starts_ns, host_stops_ns: by the host's clock: where the device is another one, when its work was issued.
        is_by_host: the device is the host.
        is_stamped: each op is stamped by the clock of another device; not in a quiet step, whose ops nobody reads.
        is_whole: each op of the trace is one here; see [Note: quiet events] in step/quiet.py.
        communicated: collectives that went on beside compute.
    """

    def __init__(self, begun: Stamp | None, *, is_whole: bool = True) -> None:
        self.is_whole = is_whole
        self.host_starts_ns: list[int] = []
        self.host_stops_ns: list[int] = []
        self.is_by_host = begun is None
        self.is_stamped = is_whole and begun is not None
        self.begun: Time = begun if begun is not None else time.monotonic_ns()
        self._starts: list[Stamp] = []
        self._stops: list[Stamp] = []
        self._beside: list[tuple[int, Time, Time]] = []  # (op, start, stop): see `add`
        self.communicated: list[Beside] = []

    def start(self, stamp: Stamp | None) -> None:
        """An op begins."""
        self.host_starts_ns.append(time.monotonic_ns())
        if stamp is not None:
            self._starts.append(stamp)

    def start_again(self, stamp: Stamp | None) -> None:
        """The running op begins here."""
        self.host_starts_ns[-1] = time.monotonic_ns()
        if stamp is not None:
            self._starts[-1] = stamp

    def stop(self, stamp: Stamp | None) -> None:
        """The running op ends."""
        self.host_stops_ns.append(time.monotonic_ns())
        if stamp is not None:
            self._stops.append(stamp)

    def add(self, start: Time, stop: Time) -> None:
        """The engine computed in the place of the program; it counts for the op that began last, of which it may be a part."""
        if self.host_starts_ns:
            self._beside.append((len(self.host_starts_ns) - 1, start, stop))

    @property
    def has_ops(self) -> bool:
        """True where it is known how long each op took: on the host, or by stamps."""
        return self.is_by_host or self.is_stamped

    @property
    def last(self) -> int:
        """The op that began last."""
        return len(self.host_starts_ns) - 1

    @property
    def is_running(self) -> bool:
        """True while an op has begun and not ended."""
        return len(self.host_stops_ns) < len(self.host_starts_ns)

    @property
    def starts_ns(self) -> list[int]:
        """By the device's clock; waits for it."""
        return [stamp.ns() for stamp in self._starts] if self._starts else self.host_starts_ns

    @property
    def stops_ns(self) -> list[int]:
        """By the device's clock; waits for it."""
        return [stamp.ns() for stamp in self._stops] if self._starts else self.host_stops_ns

    def durations_ns(self) -> list[int]:
        """Returns per op of a step that is over how long its compute took.

        A graph that outlives the update has events after it: the last op may run until the next step, and counts as nothing.
        """
        starts_ns, stops_ns = self.starts_ns, self.stops_ns
        if len(stops_ns) == len(starts_ns) - 1:
            stops_ns = [*stops_ns, starts_ns[-1]]
        durations = [max(b - a, 0) for a, b in zip(starts_ns, stops_ns, strict=True)]
        for op, start, stop in self._beside:
            start_ns, stop_ns = ns_of(start), ns_of(stop)
            is_counted = starts_ns[op] <= start_ns and stop_ns <= stops_ns[op]
            durations[op] += 0 if is_counted else max(stop_ns - start_ns, 0)
        for one in self.communicated:
            durations[one.op] = one.stop_ns - one.start_ns
        return durations

    def row_ns(self) -> int:
        """Returns how long a step that is over took in the program: its ops, and waits for collectives beside them."""
        if self.is_by_host and not self._beside and not self.communicated and not self.is_running:
            return sum(self.host_stops_ns) - sum(self.host_starts_ns)
        durations = self.durations_ns()
        for one in self.communicated:
            durations[one.op] = one.waited_ns
        return sum(durations)


class Clock:
    """Turns the events of a step into ticks.

    Attributes:
        times: of the running step's ops.
        at_backward_begin: called at the first event of a backward.
        at_backward_end: called in this order when a backward ends.
        at_divergence: called when a step leaves its plan, and before a model sleeps.
        is_backward_open: one that was watched has not come to its end.
        under_way: collectives beside compute, which each event looks at.
    """

    def __init__(
        self, state: StepState, traffic: Traffic, runner: PlanRunner, on_demand: OnDemand, activations: LiveActivations
    ) -> None:
        self._state, self._traffic, self._runner = state, traffic, runner
        self._on_demand, self._activations = on_demand, activations
        self._stamp = traffic.backend.stamp
        self.times = StepTimes(None)
        self.at_backward_begin: list[Callable[[], None]] = []
        self.at_backward_end: list[AtBackwardEnd] = []
        self.at_divergence: list[AtDivergence] = []
        self._watched_task = -1
        self.is_backward_open = False
        self.under_way: list[UnderWay] = []

    def begin(self, *, is_whole: bool = True) -> None:
        """A step begins; a quiet one has fewer ops than its trace."""
        self._traffic.backend.begin_step(keeps_times=self._traffic.keep_spans)
        self.times = StepTimes(self._stamp(), is_whole=is_whole)
        self.under_way = []

    def tick(self, key: Hashable, name: Callable[[], str], phase: str | None = "") -> None:
        """Ends the running op, does what is due, and begins the next op.

        Args:
            key: identifies the event among those of its step.
            name: returns the event's name for people; called only where it is needed.
            phase: phase of training of the op that begins; None: backward where one runs, else forward.
        """
        state = self._state
        mode = state.mode
        if mode is IDLE or mode is PASS:
            return
        with state.lock:
            times, stamp, is_still, refused = self.times, None, False, self._traffic.refused
            starts_ns, stops_ns, is_stamped = times.host_starts_ns, times.host_stops_ns, times.is_stamped
            if len(stops_ns) < len(starts_ns):
                if is_stamped:
                    stamp = self._stamp()
                    times.stop(stamp)
                else:
                    stops_ns.append(time.monotonic_ns())  # as `stop`
            if self.under_way:
                self._look()
            if mode is PLANNED:
                runner, activations = self._runner, self._activations
                runner.measure()  # before what died in the op that ends is given back
                keeps_read = self._on_demand.keeps_read
                is_still = not activations.dead and not refused and not keeps_read
                if not is_still:
                    activations.drain()
                    if keeps_read:
                        self._on_demand.make_way()
                    if refused:
                        self._on_demand.refusals.ask()
                if not runner.advance(key):
                    self.diverge(name)
                is_still = is_still and runner.is_still
            else:
                self._activations.drain()
                self._on_demand.tick()
                if refused:
                    self._on_demand.refusals.ask()
                state.record.event(key, name, training_phase() if phase is None else phase)
            if self.under_way:  # it may have ended while the event waited for transfers
                self._look()
            if is_stamped:
                # Where the engine did nothing in between, an op begins as the other ends, and the device is asked once.
                times.start(stamp if is_still and stamp is not None else self._stamp())
            else:
                starts_ns.append(time.monotonic_ns())  # as `start`

    def tick_in_inference(self, key: Hashable, name: Callable[[], str]) -> None:
        """Does the same in inference mode: what is moved there outlives it."""
        is_enabled = torch.is_grad_enabled()
        with outside_inference(), torch.set_grad_enabled(is_enabled):
            self.tick(key, name, None)

    def _look(self) -> None:
        self.under_way = [one for one in self.under_way if not one.look()]

    def pause(self) -> None:
        """Compute of the running op ends here: what follows, up to `resume`, is the engine's own work."""
        if self.times.is_running:
            self.times.stop(self._stamp() if self.times.is_stamped else None)

    def resume(self) -> None:
        """Compute of the running op begins here."""
        times = self.times
        if len(times.host_stops_ns) >= len(times.host_starts_ns):
            return
        if times.is_stamped:
            times.start_again(self._stamp())
        else:
            times.host_starts_ns[-1] = time.monotonic_ns()  # as `start_again`

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, the engine computes in the place of the program."""
        if not self.times.has_ops:
            yield
            return
        start = self._traffic.now()
        try:
            yield
        finally:
            self.times.add(start, self._traffic.now())

    def diverge(self, name: Callable[[], str]) -> None:
        """The step is another one than was planned: it goes on without its plan."""
        state, runner = self._state, self._runner
        self._traffic.counts.fallbacks += 1
        if state.kind is not None:
            state.kind.mismatches += 1
            if state.kind.mismatches == 1:
                expected, found = runner.expected, name()
                is_known = state.kind.left == (left := (runner.cursor, expected, found))
                state.kind.left = left
                log.log(
                    logging.DEBUG if is_known else logging.WARNING,  # SAM's first half leaves in each step, in the same place
                    "this step left the traced sequence at tick %d: expected %s but got %s; "
                    "it goes on with transfers on demand (right, but slower)",
                    runner.cursor,
                    expected,
                    found if found != expected else "another size there",
                )
        self.leave_plan()

    def leave_plan(self) -> None:
        """The step goes on without its plan."""
        self._state.mode = DEMAND
        self._state.record.keys = self._runner.events
        self._runner.stop()
        self._traffic.backend.keep_freed(0)  # the memory that the next op needs is unknown
        self.take_over()
        self._on_demand.release(*[item for item in self._activations if item.device is not None])
        self._runner.lower_late()

    def take_over(self) -> None:
        """What was resident is the engine's to move from here on."""
        for follower in self.at_divergence:
            follower.left_plan()

    def watch_backward(self) -> None:
        """Calls `at_backward_end` when the running backward ends; one that runs inside it ends first, which does no harm."""
        task = current_graph_task()
        # FSDP2 reduces its last gradients in a callback of its own, perhaps after ours: then the end comes once more.
        if task != -1 and (task != self._watched_task or not self.is_backward_open):
            self._watched_task, self.is_backward_open = task, True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
            with self._state.lock:
                for begins in self.at_backward_begin:
                    begins()

    def _backward_ended(self) -> None:
        with self._state.lock:
            for follower in self.at_backward_end:
                follower.backward_ended()
            self.is_backward_open = False
