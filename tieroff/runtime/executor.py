"""The executor: the parts that run one model's steps, put together, and where a step begins and ends.

[Note: passes without gradients]
A forward without gradients between a step's first forward and its update (of a reference model, for a divergence) is a part of
the step if it comes in each: its reads are events, so that it needs a layer at a time and plans fetch ahead for it. A step that
follows its plan has one where the plan has one next, and a measured step where the recorded one had one next; any other that
comes, as an evaluation now and then, is none, and the plan goes on behind it: what it reads is fetched as it reads it. Where a
recorded step had some that the next one lacks, and is like otherwise, passes in steps of that kind make none from then on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tieroff.core.seams import Foresight, Recorder
from tieroff.errors import StateError
from tieroff.runtime.collectives import is_one_of_several
from tieroff.runtime.execution.activations import LiveActivations
from tieroff.runtime.execution.after_backward import AfterBackward
from tieroff.runtime.execution.autograd import current_graph_task
from tieroff.runtime.execution.clock import Clock
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.execution.on_demand import OnDemand
from tieroff.runtime.execution.runner import PlanRunner
from tieroff.runtime.execution.state import StepState
from tieroff.runtime.hooks.forward.own_hooks import OwnHooks
from tieroff.runtime.hooks.gradients import Gradients
from tieroff.runtime.hooks.parameters.communication import Communication
from tieroff.runtime.hooks.parameters.reads import ParameterReads
from tieroff.runtime.hooks.parameters.sharded import Shards
from tieroff.runtime.hooks.recompute.in_backward import ModulesInBackward
from tieroff.runtime.hooks.saved import SavedTensors
from tieroff.runtime.hooks.scaled import ScaledGradients
from tieroff.runtime.hooks.user_access import UserAccess
from tieroff.runtime.items.table import HomeTable
from tieroff.runtime.items.traffic import Traffic
from tieroff.runtime.settings import Settings
from tieroff.runtime.step.kinds import Measuring, Planned, StepKind
from tieroff.runtime.step.likeness import PASS_BEGINS, PASS_ENDS
from tieroff.runtime.step.mode import DEMAND, IDLE, PASS, PLANNED
from tieroff.runtime.tensors import outside_inference

# Passes of one step that have events: more of them, as where a step generates text, are of a number of their own each time.
_PASSES_MAX = 8


class Executor:
    """Runs one step after another.

    Attributes:
        state: mode, kind and record of the step that runs.
        traffic: moves bytes.
        homes: the items that user code can reach.
        activations: the items that living graphs saved.
        context: what hooks and the optimizer's stand-in use of all these.
        runner, on_demand, clock: see there.
        reads, shards, communication, saved_tensors, gradients: the hooks.
        hooks: the pair of saved-tensor hooks, to be put in force.
        scaled: answers user code that clips gradients which lie below.
        guard: serves user code that uses what lies below a device.
    """

    def __init__(self, traffic: Traffic, settings: Settings, foresight: Foresight | None = None) -> None:
        self.traffic = traffic
        self.homes = HomeTable()
        self.state = state = StepState()
        self.runner = PlanRunner(state, traffic)
        self.on_demand = OnDemand(state, traffic, self.runner, foresight)
        self.activations = LiveActivations(state, traffic, self.runner, self.on_demand)
        self.clock = Clock(state, traffic, self.runner, self.on_demand, self.activations)
        self.guard = UserAccess()
        self.context = StepContext(state, self.clock, self.runner, self.on_demand, traffic, self.homes, self.guard)
        self._after_backward = AfterBackward(self.context)
        self.clock.at_backward_end.append(self._after_backward)
        self.reads = ParameterReads(self.context, settings.compute_dtype)
        self.shards = Shards(self.context, self.reads)
        self.communication = Communication(self.context, self.shards.is_in_step)
        self.scaled = ScaledGradients(self.context)
        self.gradients = Gradients(self.context, settings, self.shards)
        self.saved_tensors = SavedTensors(self.context, self.reads, self.activations, settings)
        self.saved_tensors.gathered = self.shards.gathered
        self.reads.rebound.packs = self.saved_tensors
        self.hooks = OwnHooks(state, self.reads, self.saved_tensors)
        self.reads.in_backward = ModulesInBackward(self.hooks, self.on_demand)
        self.guard.serve(self.context, self.reads, self.saved_tensors, self.scaled)

    def begin(self, kind: StepKind, recorder: Recorder | None, *, may_be_quiet: bool = False) -> None:
        """A new step of this kind begins.

        Args:
            kind: the step's.
            recorder: watches it.
            may_be_quiet: nobody asks for what each event of it would tell; see [Note: quiet events] in step/quiet.py.
        """
        state = self.state
        state.kind, state.saw_backward, state.saw_gradient = kind, False, False
        state.record.begin(recorder)
        planned = kind.stage if isinstance(kind.stage, Planned) else None
        if planned is None:
            state.mode = DEMAND
        else:
            state.mode = PASS if planned.plan.moves_nothing else PLANNED
        self.guard.begin()
        self.scaled.begin(kind.recorded)
        is_quiet = may_be_quiet and state.mode is PLANNED and self.runner.has_seen(planned)
        is_quiet = is_quiet and not self.shards and self.reads.casts.dtype is None
        # What ranks waited for in their last step is read from what each of them did in it.
        is_quiet = is_quiet and not is_one_of_several()
        self.traffic.begin_step(is_planned=state.mode is PLANNED, is_quiet=is_quiet, recorder=recorder)
        if not self.runner.follows(planned):
            self.traffic.forget_spares()  # another plan may have their tensors elsewhere
        self.clock.begin(is_whole=not is_quiet)
        self.runner.begin(planned, self.homes, is_quiet=is_quiet)
        self.saved_tensors.begin()
        if state.mode is PLANNED:
            self.activations.lower()
        self.gradients.begin_planned()
        self.reads.begin()
        self.reads.fetch.begin(kind)
        self.reads.live.sweep()
        self.on_demand.begin(self.homes.parameters.values())

    def resident(self) -> list[torch.Tensor]:
        """Returns what is resident and the program still holds; see [Note: resident tensors] in step/executable.py."""
        return self.saved_tensors.resident() + self.gradients.resident()

    @property
    def device_bytes(self) -> int:
        """What the engine has on the device now."""
        return self.traffic.device_bytes + sum(tensor.untyped_storage().nbytes() for tensor in self.resident())

    def forward_is_left(self, broke: Callable[[], None]) -> None:
        """A forward has ended, perhaps by an exception: user code runs next, in the midst of the step.

        `broke` repairs at once what an exception leaves here, since the program may read a parameter next. Where it does not
        come to that, `inside`, which the caller has counted up, has the next step repair.
        """
        try:
            self._let_go_of_forward()
        except BaseException:
            broke()
            raise
        self.state.inside -= 1

    def _let_go_of_forward(self) -> None:
        self.reads.forget_casts()
        self.on_demand.release_reachable()
        self.guard.assignments.forward_ended()
        self.guard.user_code_begins(self.runner.movable(self.homes.parameters.values()))

    def begin_bypassed(self) -> None:
        """A new step begins of the kind that ran last, in which nothing moves, and nothing has moved since."""
        state = self.state
        state.mode, state.saw_backward = PASS, False
        self.guard.begin()
        self.traffic.begin_step()
        self.clock.begin()

    def end(self) -> None:
        """The step's last op is over."""
        state = self.state
        self.clock.pause()
        if state.kind is not None and state.mode is PLANNED:
            self.runner.measure()
            if self.runner.is_at_end:
                self.runner.reached_end()
                state.kind.mismatches = 0
            else:
                self.clock.diverge(lambda: "the end of the step")
        self._stop()

    def abandon(self) -> None:
        """The step broke off with an exception: what is left of it is cleared; whatever was moved stays valid."""
        self._stop()
        self.on_demand.abandon()
        self.runner.begin(None)  # items that come before the next step are in no plan
        self.traffic.forget_spares()
        self.traffic.backend.keep_freed(0)
        self.traffic.spill.fills_in_order = True
        self.state.kind = None

    def _stop(self) -> None:
        recorder, self.state.record.recorder = self.state.record.recorder, None
        if recorder is not None:
            recorder.stop()
        self.on_demand.release_all()
        self.runner.stop()
        self.reads.end()
        self.gradients.end()
        self.guard.user_code_begins()
        self.state.mode = IDLE

    def claim(self) -> None:
        """The calling thread runs the steps from here on.

        Raises:
            StateError: another thread is in the middle of one.
        """
        state, own = self.state, threading.get_ident()
        if state.thread == own:
            return
        with state.lock:
            is_busy = self.reads.depth > 0 or self.clock.is_backward_open
            if is_busy and any(thread.ident == state.thread for thread in threading.enumerate()):
                raise StateError(
                    "expected one thread to train this model at a time, got a forward with gradients while another is in "
                    "a forward or backward of it: let them take turns, or wrap a copy for each thread (forwards under "
                    "torch.no_grad() may run beside a step)"
                )
            state.thread = own

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """A forward without gradients runs in another thread than the steps, beside whatever that does.

        It reads parameters where they lie; see [Note: threads beside the step] in hooks/parameters/reads.py.
        """
        with self.state.lock:
            read = [item for item in self.homes.parameters.values() if item.is_shown_below]
            for item in read:
                item.readers += 1
        self.reads.beside.count += 1
        try:
            yield
        finally:
            self.reads.beside.count -= 1
            with self.state.lock:
                for item in read:
                    item.readers -= 1

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """A forward without gradients runs in a signal handler that interrupted the engine: see [Note: handlers]."""
        is_recorded = self.state.record.recorder is not None
        self.reads.beside.count += 1
        try:
            with _disable_current_modes() if is_recorded else contextlib.nullcontext():
                yield
        finally:
            self.reads.beside.count -= 1

    def inferring(self, elements: int) -> contextlib.AbstractContextManager[None]:
        """A forward runs without gradients, or for others: as a part of the step that runs, or of none.

        Args:
            elements: of all its inputs.
        """
        return self._passing() if self._is_of_the_step() else self._inferring(elements)

    def _is_of_the_step(self) -> bool:
        """True for a pass with events of its own; see [Note: passes without gradients]."""
        state, record = self.state, self.state.record
        if state.kind is None or torch.is_grad_enabled() or self.shards or current_graph_task() != -1:
            return False
        if state.mode is PLANNED:
            return self.runner.expects(PASS_BEGINS)
        if state.mode is not DEMAND or state.kind.passes_vary or self._is_between_steps():
            return False
        if isinstance(state.kind.stage, Measuring):
            known, at = state.kind.stage.recorded.keys, len(record.keys)
            return known[at : at + 1] == (PASS_BEGINS,)
        return record.passes < _PASSES_MAX

    def _is_between_steps(self) -> bool:
        """True while no step runs, or user code runs after the update of one."""
        state = self.state
        if state.mode is PLANNED:
            return self.runner.is_at_end
        return state.mode is IDLE or state.record.keys[-1:] == [("end",)]

    @contextlib.contextmanager
    def _passing(self) -> Iterator[None]:
        """A pass without gradients runs whose reads are events of the step."""
        state = self.state
        state.record.passes += 1
        self.clock.tick_in_inference(PASS_BEGINS, lambda: "pass")
        self.reads.depth += 1
        try:
            yield
            self.reads.check_casts()
        finally:
            self.reads.depth -= 1
            self.reads.forget_casts()
            self.on_demand.release_reachable()
        self.clock.tick_in_inference(PASS_ENDS, lambda: "passed")
        if state.saw_backward:  # the update may be next, and user code before it
            with state.lock, outside_inference(), torch.no_grad():
                self._after_backward.backward_ended()

    @contextlib.contextmanager
    def _inferring(self, elements: int) -> Iterator[None]:
        """A forward runs that is no part of a step, perhaps in the middle of one."""
        state, spill = self.state, self.traffic.spill
        mode, fills_in_order = state.mode, spill.fills_in_order
        room_bytes = self.on_demand.experience.room_of_pass(elements) if self._is_between_steps() else 0
        # What the plan keeps on the device for the whole step may leave too, so tiers fill as while nothing is planned.
        state.mode, spill.fills_in_order = IDLE, True
        with state.lock:
            self.runner.lower_late()
            self.on_demand.begin_pass(room_bytes)
        self.reads.depth += 1
        try:
            yield
            self.reads.check_casts()
        finally:
            self.reads.depth -= 1
            self.reads.forget_casts()
            self.on_demand.release_reachable()
            self.on_demand.pass_room_bytes = 0
            state.mode, spill.fills_in_order = mode, fills_in_order
            if self._is_between_steps():
                self.guard.assignments.user_code_begins()
