"""The executor: follows a step event by event, and does at each tick what the plan says, or what the moment demands."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable

import torch

from tieroff.core.seams import Foresight, Recorder, Subject
from tieroff.core.tensor import TensorClass, Tier
from tieroff.runtime.execution.on_demand import TICKS_OF_ONE_OP, OnDemand
from tieroff.runtime.execution.overdue import Overdue
from tieroff.runtime.hooks.activations import ActivationItem, SavedTensors
from tieroff.runtime.hooks.gradients import Gradients
from tieroff.runtime.hooks.parameters import Gate, current_graph_task
from tieroff.runtime.items.homes import HomeItem, ParameterItem
from tieroff.runtime.items.item import Item, Traffic
from tieroff.runtime.items.residency import Event, State
from tieroff.runtime.step.program import Mode, Phase, Program
from tieroff.runtime.tensors import bytes_of

log = logging.getLogger("tieroff")


class Executor:
    """Runs one step after another.

    Attributes:
        program: the kind of step that runs, or ran last; None before the first, and after one that broke off.
        mode: see `Mode`.
        is_inferring: a forward runs that is no part of a step.
        peak_bytes: largest count of device bytes in this step: copies the engine holds plus the trace's transients.
        starts_ns, stops_ns: per op of a planned or measured step, when compute began and ended.
    """

    def __init__(
        self,
        traffic: Traffic,
        tier_for: Callable[[int], Tier],
        min_bytes: int,
        covers: frozenset[TensorClass],
        foresight: Foresight | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.traffic = traffic
        self.covers = covers
        self.mode = Mode.IDLE
        self.program: Program | None = None
        self.recorder: Recorder | None = None
        self.on_demand, self.gradients = OnDemand(self, foresight), Gradients(self)
        self.overdue = Overdue(traffic)
        told = self.fetch, self.fetch_home, self.gradients.to_home, self.on_demand.dismiss, lambda: self.recorder, compute_dtype
        self.gate = Gate(traffic.backend.lifts_homes, *told)
        self.saved_tensors = SavedTensors(self, self.gate.live, min_bytes)
        self.saved_tensors.is_covered = TensorClass.ACTIVATION in covers
        self.by_index: list[Item | None] = []
        self.cursor = self.peak_bytes = 0
        self.starts_ns: list[int] = []
        self.stops_ns: list[int] = []
        self.tier_for = tier_for
        self.names_by_id: dict[int, str] = {}
        self._keys, self._names = list[Hashable](), list[str]()
        self._written: frozenset[Hashable] = frozenset()
        self._activation_count = 0
        self._live_activations: dict[int, ActivationItem] = {}
        self.recorded: list[Subject] = []
        self.saw_backward = self.is_closed = self.is_inferring = False
        self.unborn_bytes, self._watched_task = 0, -1
        self.lock = threading.RLock()
        self.ends_backward: Callable[[], None] = lambda: None  # told before what moves is brought below

    # -- the clock -----------------------------------------------------------------------------------------------

    def tick(self, key: Hashable, name: Callable[[], str], phase: str = "") -> None:
        """One event of the step: closes the running op, does what is due, and opens the next op."""
        mode = self.mode
        if mode is Mode.IDLE or mode is Mode.PASS:
            return
        with self.lock:
            self.pause()
            if mode is Mode.PLANNED:
                self._measure(self.cursor)  # before what died in the op that ends is let go
            self.saved_tensors.drain(self._end_activation)
            self.on_demand.tick()
            program = self.program
            assert program is not None
            if mode is Mode.PLANNED:
                cursor = self.cursor
                if cursor < len(program.keys) and program.keys[cursor] == key:
                    self.cursor = cursor + 1
                    self.overdue.tick(self.cursor)
                    self._act(program, cursor)
                else:
                    self._diverge(key, name)
            else:
                if program.phase in (Phase.RECORD, Phase.MEASURE):
                    self._keys.append(key)
                    if self.recorder is not None:
                        self._names.append(name())
                        self.recorder.event(self._names[-1], phase)
            self.starts_ns.append(time.monotonic_ns())

    def pause(self) -> None:
        """Compute of the running op ends here: what follows, up to `resume`, is the engine's own work."""
        if len(self.stops_ns) < len(self.starts_ns):
            self.stops_ns.append(time.monotonic_ns())

    def resume(self) -> None:
        """Compute of the running op begins here."""
        if self.starts_ns and len(self.stops_ns) < len(self.starts_ns):
            self.starts_ns[-1] = time.monotonic_ns()

    def _measure(self, cursor: int) -> None:
        """Counts the device bytes of the op that just ended."""
        program = self.program
        assert program is not None and program.trace is not None
        if cursor == 0:
            return
        self.unborn_bytes += program.births[cursor - 1]
        transient = program.trace.ops[cursor - 1].transient_bytes
        count = self.traffic.device_bytes + max(self.unborn_bytes, 0) + transient
        self.peak_bytes = max(self.peak_bytes, self.traffic.note_memory(count))

    def _act(self, program: Program, cursor: int) -> None:
        actions = program.actions[cursor]
        for index in actions.releases:
            item = self.by_index[index]
            if item is not None and item.device is not None:
                self.release(item)
        for index in actions.outs:
            item = self.by_index[index]
            if item is not None and item.device is not None:
                self.traffic.store(item)
        for index in actions.ins:
            item = self.by_index[index]
            if item is not None and item.state is State.LOWER:
                self.traffic.send(item, Event.FETCH)

    def release(self, item: Item) -> None:
        """Has an item leave the device; a home takes its latest value along."""
        if isinstance(item, HomeItem):
            item.leave(self.traffic)
        else:
            self.traffic.leave(item)

    def _diverge(self, key: Hashable, name: Callable[[], str]) -> None:
        program = self.program
        assert program is not None
        expected = program.names[self.cursor] if self.cursor < len(program.names) else "the end of the step"
        self.mode = Mode.DEMAND
        self.overdue.begin(None)
        self.traffic.backend.keep_freed(0)  # nobody knows how much memory the next op takes
        self.traffic.counts.fallbacks += 1
        program.mismatches += 1
        if program.mismatches == 1:
            log.warning(
                "this step left the traced sequence at tick %d: expected %s but got %s; "
                "it goes on with transfers on demand (right, but slower)",
                self.cursor, expected, name(),
            )  # fmt: skip
        self.on_demand.let_leave(*[item for item in self._live_activations.values() if item.state is not State.LOWER])

    # -- steps ---------------------------------------------------------------------------------------------------

    def begin(self, program: Program, recorder: Recorder | None) -> None:
        """A new step of this kind begins."""
        self.program = program
        self.recorder = recorder
        self.cursor = self._activation_count = self.peak_bytes = self.unborn_bytes = 0
        self._keys, self._names, self.starts_ns, self.stops_ns, self.recorded = [], [], [], [], []
        self.saw_backward = False
        self.traffic.begin_step()
        self._written = program.written
        self.saved_tensors.forget()
        self.gate.live.sweep()
        if program.phase is not Phase.PLANNED:
            self.mode = Mode.DEMAND
        else:
            self.mode = Mode.PASS if program.moves_nothing else Mode.PLANNED
        self.overdue.begin(program if self.mode is Mode.PLANNED else None)
        if program.trace is not None:
            self.by_index = [None] * len(program.trace.tensors)
        self.on_demand.begin()

    def end(self) -> tuple[list[Hashable], list[str]]:
        """The step's last op is over; returns the events that were recorded."""
        self.pause()
        program = self.program
        if program is not None and self.mode is Mode.PLANNED:
            self._measure(self.cursor)
            if self.cursor == len(program.keys):
                program.mismatches = 0
            else:
                self._diverge("end", lambda: "the end of the step")
        if self.recorder is not None:
            self.recorder.stop()
        self.on_demand.clear()
        self.overdue.begin(None)
        self.mode = Mode.IDLE
        return self._keys, self._names

    def abandon(self) -> None:
        """The step broke off (an exception): what is left of it is cleared; whatever was moved stays valid."""
        if self.recorder is not None:
            self.recorder.stop()
            self.recorder = None
        self.on_demand.clear()
        self.overdue.begin(None)
        self.traffic.backend.keep_freed(0)
        self.mode = Mode.IDLE
        self.program = None

    # -- parameters ----------------------------------------------------------------------------------------------

    def fetch(self, item: ParameterItem) -> torch.Tensor:
        """Returns the device value of a parameter that is read in forward, or in a recomputation."""
        self.tick(("param", item.position), lambda: f"param:{item.name}", self.phase)
        value = self._value(item)
        item.may_be_written = self._may_write(item)
        self.on_demand.used(item.key)
        return value

    def fetch_home(self, item: ParameterItem) -> torch.Tensor:
        """Has the home itself lie on the device, and returns it."""
        self.tick(("param", item.position), lambda: f"param:{item.name}", self.phase)
        with self.lock, torch.inference_mode(False):
            item.refresh(self.traffic)
            item.lift(self.traffic)
            item.may_be_written = self._may_write(item)
            self.bind(item)
            if self.mode is not Mode.PLANNED and self.mode is not Mode.PASS:
                self.watch_backward()
                self.on_demand.hold(item)
            self.on_demand.used(item.key)
            self.resume()
            home = item.tensor
            assert home is not None
            return home

    def _may_write(self, item: ParameterItem) -> bool:
        """True when the step may write this parameter through `.data`, which no version shows.

        It shows in a trace; while there is none that holds, every parameter counts as written.
        """
        program = self.program
        if program is None or self.mode is Mode.IDLE:
            return item.key in self._written
        if program.phase is Phase.FREE:
            return item.key not in self.on_demand.experience.clean
        if program.phase is Phase.RECORD or (program.phase is Phase.PLANNED and self.mode is Mode.DEMAND):
            return True
        return item.key in program.written

    def fetch_saved(self, item: ParameterItem) -> torch.Tensor:
        """Returns the device bytes of a parameter that backward needs."""
        self.tick(("saved", item.position), lambda: f"saved:{item.name}", "backward")
        value = self._value(item)
        self.on_demand.wanted(item)
        computed = self.gate.as_computed(item, value)
        self.gate.live.add(item, computed)
        return item.device if item.device is not None and computed is value else bytes_of(computed)

    def _value(self, item: ParameterItem) -> torch.Tensor:
        with self.lock, torch.inference_mode(False):
            if item.device is None and item.place is None:  # given back while a graph still wants it
                assert item.tensor is not None
                return item.tensor.detach().to(self.traffic.backend.device)
            item.refresh(self.traffic)
            if item.is_lifted:
                assert item.tensor is not None
                self.resume()
                return item.tensor.detach()
            device = self.traffic.want(item)
            if self.recorder is not None:
                self.recorder.bind(device.untyped_storage(), item.key, is_new=True)
            if self.mode is not Mode.PLANNED:
                self.watch_backward()
                self.on_demand.hold(item)
            value = item.value
            assert value is not None
            self.resume()
            return value

    def watch_backward(self) -> None:
        """Asks to be told when the running backward ends. A reentrant one inside ends first: that does no harm."""
        task = current_graph_task()
        if task != -1 and task != self._watched_task:
            self._watched_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        """User code runs next, and may write gradients and parameters in ways that no version shows.

        So whatever is moved lies below from here on, where writes count, or it stays for the update and counts as written.
        """
        with self.lock:
            self.ends_backward()
            if self.recorder is not None:
                self.recorder.backward_ended()
            self.on_demand.let_go()
            for known in self.gradients.values():
                if known.device is not None and not self.keeps(known) and not self._stays_for_update(known):
                    known.leave(self.traffic)
                    self.bind(known)
            # Before the update a copy that nobody lifted leaves too: what lies below may be written.
            is_last = self.program is not None and self.mode is Mode.PLANNED and self.cursor == self.program.update_at
            for item in self.gate.items.values():
                may_leave = item.device is not None and (item.is_lifted or is_last) and not self.keeps(item)
                if may_leave and not self._stays_for_update(item):
                    item.leave(self.traffic)

    def _stays_for_update(self, item: HomeItem) -> bool:
        """True for an item that the plan has on the device while user code runs; lifted, it counts as written from here."""
        program, traffic = self.program, self.traffic
        if self.mode is not Mode.PLANNED or program is None or item.index not in program.stays_after_backward:
            return False
        item.refresh(traffic)
        if item.state is State.ARRIVING:
            traffic.settle(item)  # brought back for what user code does next
        # User code must not write under a copy that is under way, and has to find a host home on the host.
        if item.state not in (State.DEVICE, State.BOTH) or not (item.is_lifted or traffic.backend.lifts_homes):
            return False
        item.lift(traffic)
        item.touch(traffic)
        return True

    # -- activations ---------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """The phase of training that runs now."""
        return "forward" if current_graph_task() == -1 else "backward"

    def saved(self, storage_bytes: torch.Tensor) -> ActivationItem:
        """Takes a storage that autograd saves for the first time under the engine's care."""
        ordinal = self._activation_count
        self._activation_count += 1
        size_bytes = storage_bytes.numel()
        self.tick(("pack", size_bytes), lambda: f"pack:{ordinal}", self.phase)
        item = ActivationItem(ordinal, size_bytes, self.tier_for(size_bytes))
        if self.mode is Mode.PLANNED:
            self.assign(item)
            if item.index >= 0:
                self.unborn_bytes -= size_bytes
        self.traffic.hold(item, storage_bytes)
        self._live_activations[id(item)] = item
        if self.recorder is not None:
            self.recorder.bind(storage_bytes.untyped_storage(), item.key)
            self.recorded.append(Subject(item.key, f"activation:{ordinal}", size_bytes, item.kind))
        return item

    def packed(self, item: ActivationItem, is_complete: bool) -> None:
        """The item was packed; on demand its bytes leave at once, or as soon as they are complete.

        An op packs its inputs before its kernel runs, and `rrelu` then fills one of them without moving its version. Such
        a tensor needs no gradient itself; it waits until the ticks of its own op are over.
        """
        if self.mode is Mode.PLANNED:
            self.overdue.took(item, self.cursor, 0 if is_complete else TICKS_OF_ONE_OP)
        if self.mode is not Mode.DEMAND or item.state is State.LOWER:
            return
        if is_complete:
            self.on_demand.let_leave(item)
        else:
            self.on_demand.wait_for(item)
        self.resume()

    def unpacked(self, item: ActivationItem) -> torch.Tensor:
        """Returns the item's device bytes for backward."""
        self.saw_backward = True
        self.watch_backward()
        self.tick(("unpack", item.ordinal), lambda: f"unpack:{item.ordinal}", "backward")
        with self.lock:
            device = self.traffic.want(item)
            if self.recorder is not None:
                self.recorder.bind(device.untyped_storage(), item.key, is_new=True)
            if self.mode in (Mode.DEMAND, Mode.IDLE) and not self.is_closed:
                self.on_demand.unpacked(item)
            self.on_demand.wanted(item)
            self.resume()
            return device

    def _end_activation(self, item: ActivationItem) -> None:
        self._live_activations.pop(id(item), None)
        self.on_demand.forget(item)
        if self.recorder is not None:
            self.recorder.died(item.key)
        self.unassign(item)
        self.traffic.end(item)

    def bring_activations_home(self) -> None:
        """Puts what living graphs saved back on the device, for good."""
        self.is_closed = True
        self.saved_tensors.drain(self._end_activation)
        for item in list(self._live_activations.values()):
            self.traffic.want(item)
            self.traffic.settle(item)
            if item.place is not None:
                item.place.free()
                item.place = None

    # -- the plan's view of an item ----------------------------------------------------------------------------------

    def assign(self, item: Item) -> None:
        """Gives an item its tensor and tier in the plan that runs."""
        program = self.program
        item.index = -1
        if program is None or program.phase is not Phase.PLANNED:
            return
        item.index = program.index.get(item.key, -1)
        if item.index >= 0:
            self.by_index[item.index] = item
            item.tier = program.tiers.get(item.index, item.tier)

    def unassign(self, item: Item) -> None:
        """The care for an item ends in mid-step: the plan that runs does not ask for it again."""
        if 0 <= item.index < len(self.by_index) and self.by_index[item.index] is item:
            self.by_index[item.index] = None

    def keeps(self, item: Item) -> bool:
        """True when the plan that runs leaves the item on the device for the whole step."""
        program = self.program
        return (
            self.mode is Mode.PLANNED
            and program is not None
            and item.index >= 0
            and item.index not in program.tiers
        )  # fmt: skip

    def bind(self, item: HomeItem, is_new: bool = True) -> None:
        """Tells the recorder where the item's bytes lie; `is_new`: the engine made the device copy, not the program."""
        if self.recorder is None:
            return
        if item.device is not None:
            self.recorder.bind(item.device.untyped_storage(), item.key, is_new=is_new)
        if item.lower is not None:
            self.recorder.bind(item.lower.untyped_storage(), item.key, is_below=True)

    def is_elsewhere(self, tensor: torch.Tensor) -> bool:
        """True for a tensor that does not lie on the device, nor in memory the engine could have put it."""
        return tensor.device != self.traffic.backend.device
