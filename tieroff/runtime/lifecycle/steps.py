"""Steps: when one begins and ends, and what kind it is.

[Note: bypass]
In a kind of step whose plan moves nothing, the first step puts everything on the device, and those after it need nothing of the
engine. So hooks are bypassed: accesses of parameters give the homes without a line of Python, gradients have no hooks but
one (of the last to arrive, which says that there was a backward), and no walk looks after modules, homes or state. A forward
that begins compares its signature and what a `Watch` sees of the model with what they were, and asks whether the plan still is
within its part of a shared budget; `optimizer.step` ends the step. All else comes back before a step of another kind, before a
changed model is looked at, before a model sleeps, after an exception, and before an update that belongs to no step, or to one
of a kind that was never updated.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any

from tieroff.core.seams import PlanSource
from tieroff.errors import StateError
from tieroff.runtime.execution.autograd import current_graph_task, refuse_compiled_autograd
from tieroff.runtime.execution.experience import Experience, Shapes
from tieroff.runtime.hooks.forward.inputs import Signature, is_given_gradients, shapes_of, signature_of
from tieroff.runtime.hooks.forward.walk import Walk
from tieroff.runtime.hooks.forward.watch import Watch, WatchedInputs
from tieroff.runtime.hooks.parameters.access import install
from tieroff.runtime.hooks.recompute.recomputation import Recomputation
from tieroff.runtime.lifecycle.contents import Contents, contents_of, held_by
from tieroff.runtime.lifecycle.planning import StepPlanning
from tieroff.runtime.lifecycle.readings import Readings
from tieroff.runtime.lifecycle.repair import interrupted, is_torn, repair
from tieroff.runtime.lifecycle.resting import Rest
from tieroff.runtime.lifecycle.traced import TracedStep
from tieroff.runtime.lifecycle.unmanaged import StateGrowth
from tieroff.runtime.managed.model import ManagedModel
from tieroff.runtime.step.feedback import Feedback
from tieroff.runtime.step.kinds import Measuring, Planned, Recording, StepKind
from tieroff.runtime.step.known_kinds import KnownKinds
from tieroff.runtime.step.likeness import is_like, likeness_of
from tieroff.runtime.step.mode import DEMAND, IDLE, PASS, PLANNED
from tieroff.runtime.step.recorded import Recorded
from tieroff.runtime.tensors import outside_inference

log = logging.getLogger("tieroff")

# Steps of a kind that are traced before it counts as one that does not repeat.
_RECORDINGS_AT_MOST = 6
# Steps after which checksums end that were asked for the warm-up.
_WARMUP_STEPS = 8


class Steps:
    """One step after another. A step lasts from its first forward to the next step's: what user code does is in the last op.

    Attributes:
        kinds: of the steps that ran.
        last: the kind that ran last.
        recomputation: modules that run again in backward.
        readings: figures of the steps that ended.
        growth: of the optimizer's state while nothing moves.
    """

    def __init__(self, managed: ManagedModel, plans: PlanSource) -> None:
        self._managed, self._plans = managed, plans
        self.kinds = KnownKinds()
        self.last: StepKind | None = None
        self.recomputation = Recomputation(managed.model, managed.executor.reads, managed.executor.clock)
        self._planning = StepPlanning(managed, plans, self.recomputation, lambda: self._steps_done)
        self.readings = Readings(managed, self._planning)
        self.growth = StateGrowth(managed)
        managed.executor.guard.at_interrupt = lambda: interrupted(managed, self.broke)
        self._traced: TracedStep | None = None
        self._kind: StepKind | None = None  # of the step that runs, until its last op ends
        self._is_stranger = False  # the step that runs has smaller inputs than its kind's
        self._larger: list[Shapes] = []  # inputs of this step, than any of a recorded one
        self._is_void = False  # the model changed since the step began: it says nothing of later ones
        self._mismatches = self._steps_done = 0  # of its kind before it; of all
        self._is_updated = True  # the step that runs was updated, or there is none
        self._bypassed: StepKind | None = None  # see [Note: bypass]
        self._watch: Watch | None = None
        self._rest = Rest(managed, plans)
        self._signature: Signature = ()  # of the step that runs, without its contents
        self._contents = Contents()  # with which it began; see [Note: contents] in lifecycle/contents.py
        self._watched = WatchedInputs(managed.executor.state)

    # -- a step begins ---------------------------------------------------------------------------------------------

    def stays_bypassed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True when a forward on these inputs is of the kind that nothing moves in, the model as it was, and the budget too."""
        kind, watch = self._bypassed, self._watch
        if kind is None or watch is None or is_torn(self._managed) or not watch.is_same:
            return False
        signature, contents = signature_of(self._managed.model, args, kwargs, watch.trained), self._contents
        if self._begins_step():
            contents = contents_of(watch.used, self._managed)
        if self.kinds.serving((*signature, contents)) is not kind or not self._planning.may_follow(kind):
            return False
        self._contents = contents
        return True

    def _begins_step(self) -> bool:
        """True when the next forward begins a step; else it is one more of the step that runs."""
        return self._is_updated or self._kind is None or self._was_skipped()

    def begin_forward(self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], walk: Walk) -> None:
        """A forward begins: of a new step, or one more of the one that runs; `walk`: over the model as it is now."""
        refuse_compiled_autograd()
        self.come_back()
        self.mend()
        with self._managed.executor.state.lock:  # other threads may read parameters
            self._begin_forward(signature, args, kwargs, walk)

    def begin_bypassed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward of which `stays_bypassed` is true begins."""
        kind = self._bypassed
        assert kind is not None
        self._end_skipped()
        if self._is_updated or self._kind is None:
            self._end_last_op()
            self._kind = self.last = kind
            self._managed.executor.begin_bypassed()
            self._begin_update()
            if kind.is_passed_through:
                self._watched.watch((args, kwargs))

    def come_back(self) -> None:
        """The engine manages everything again; see [Note: bypass]."""
        self._rest.end()
        if self._bypassed is not None:
            self._watch = None
            self._managed.come_back()
            self._bypassed = None  # last: an exception may come between any two lines

    def _end_skipped(self) -> None:
        if self._kind is not None and not self._is_updated and self._was_skipped():
            self._finish_step(self._kind)

    def _begin_forward(self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], walk: Walk) -> None:
        managed, executor, shapes = self._managed, self._managed.executor, shapes_of((args, kwargs))
        executor.gradients.sweep()
        managed.is_asleep = False
        self._end_skipped()
        if self._is_updated or self._kind is None:
            if self._traced is not None:
                self._traced.next_inputs((args, kwargs))
            self._end_last_op()
            walk = self.check_model(walk)
            self._contents = contents_of(walk.used, managed)
            self._signature = signature
            self._start_step((*signature, self._contents), shapes, is_passed_through=is_given_gradients((args, kwargs)))
            self._watched.watch((args, kwargs))
        if executor.state.mode is not PASS:
            self._note_input(shapes)
            executor.saved_tensors.fixed = walk.fixed((args, kwargs))
            executor.clock.tick(("forward", signature), lambda: "forward", "forward")

    def returned(self, out: Any) -> None:
        """A forward is about to return this."""
        if self._traced is not None:
            self._traced.returned(out)

    def _note_input(self, shapes: Shapes) -> None:
        """Before a forward on inputs of these shapes, in whatever mode."""
        on_demand = self._managed.executor.on_demand
        on_demand.release_reachable()  # an exception in backward may have left something
        if self._traced is not None and self._traced.is_watched:
            self._traced.shapes.append(shapes)
        elif not on_demand.experience.covers(shapes):
            self._larger.append(shapes)
            on_demand.room_bytes = 0  # what ops on these need is unknown
            self._managed.backend.keep_freed(0)
            on_demand.release_all()

    def check_model(self, walk: Walk | None = None) -> Walk:
        """Adopts what somebody changed from outside: parameters replaced, converted, assigned, frozen or not.

        Returns:
            What the model holds: `walk`, where that is still so.
        """
        walk = walk or self._managed.walk()
        self._managed.executor.guard.assignments.engine_begins()
        self._managed.hook_gradients(walk)
        if walk.has_substitutes or self._is_as_it_was(walk):
            return walk
        log.info("the model's parameters were changed from outside: they are taken over as they are now")
        with outside_inference():  # a forward that infers may be the first to see it
            install(self._managed.model, self._managed.executor.reads)
            self._managed.move_to_device()  # `state_dict` gives tensors of the host, which may have been assigned
            self._managed.register()
        self.forget()
        return self._managed.walk()

    def _is_as_it_was(self, walk: Walk) -> bool:
        """True for the model that it was, perhaps with other memory under its parameters (`p.data = t`), which is followed."""
        return not self._managed.has_changed(walk) or self._managed.take_assigned(walk)

    def _was_skipped(self) -> bool:
        """True when the step's backward is over and its gradients were cleared without an update (GradScaler, or none)."""
        executor, stepper = self._managed.executor, self._managed.stepper
        saw_backward = executor.state.saw_backward
        if stepper is None or not saw_backward:
            return saw_backward
        if executor.shards and not executor.state.saw_gradient:
            return False  # FSDP2 sums whole gradients over several backwards before it reduces them (no gradient sync)
        return all(p.grad is None for group in stepper.optimizer.param_groups for p in group["params"])

    def _start_step(self, signature: Signature, shapes: Shapes, *, is_passed_through: bool) -> None:
        managed = self._managed
        managed.executor.gradients.begin()
        is_covered = managed.executor.on_demand.experience.covers(shapes)
        kind = self.kinds.enter(signature, is_covered=is_covered, is_passed_through=is_passed_through)
        self._is_stranger, self._mismatches = signature not in self.kinds, kind.mismatches
        self._planning.look(kind)
        if managed.stepper is not None:
            managed.stepper.state.take_over()
        self._planning.fit(kind)
        managed.place_for(kind, is_looked_at=True)
        recorder = None
        if isinstance(kind.stage, Recording):
            recorder = self._plans.recorder()
            self._traced = TracedStep(managed, self._plans, recorder)
        self._kind = self.last = kind
        self._planning.apart.begins(kind)
        self._is_void = False
        self._larger.clear()
        managed.executor.begin(kind, recorder, may_be_quiet=self._may_be_quiet(kind))
        managed.keep_freed(kind)
        self._begin_update()
        if self._traced is not None:
            self._traced.start(is_recomputing=bool(self.recomputation.slots))
        elif kind.moves_nothing and managed.may_be_bypassed() and kind.turns.next() is None:
            self._bypassed = kind
            self._watch = managed.bypass(kind)

    def _may_be_quiet(self, kind: StepKind) -> bool:
        """True for a planned step that the feedback does not look at, and in which nothing follows every event."""
        is_unseen = kind.asked is not None or kind.feedback.passes_next
        return is_unseen and not self.recomputation.slots and not self._managed.settings.update_in_backward

    def _begin_update(self) -> None:
        if self._managed.stepper is not None:
            self._managed.stepper.begin()
        self._is_updated = False
        self.recomputation.spent_ns = 0

    # -- between steps ---------------------------------------------------------------------------------------------

    def end_updated(self) -> bool:
        """Ends the step that ran last, if it was updated; returns whether none runs now, in this process."""
        if self._managed.is_closed or not self._managed.is_own_process:
            return False
        self.come_back()
        if self._is_updated:
            self._end_last_op()
        return self._kind is None

    def sleep(self) -> None:
        """Sends everything below that can move. The step that ran last ends, if it was updated.

        Raises:
            StateError: a forward or a backward runs.
        """
        if self._managed.executor.reads.depth or current_graph_task() != -1:
            raise StateError("tieroff.sleep was called in the middle of a forward or backward; call it between steps")
        self.mend()
        self.end_updated()
        self._managed.executor.gradients.note_unseen()
        self._managed.sleep()

    def wake(self) -> None:
        """Brings back what the plan of the step that ran last keeps on the device; without a plan nothing stays there."""
        self._managed.check_alive()
        if not self._managed.is_asleep:
            return
        self._managed.is_asleep = False
        if self.last is not None and isinstance(self.last.stage, Planned) and self._kind is None:
            self._planning.look(self.last)
            self._planning.fit(self.last)
            self._managed.place_for(self.last)

    # -- a step ends -----------------------------------------------------------------------------------------------

    def before_update(self, *, has_closure: bool = False) -> None:
        """`optimizer.step` was called.

        Raises:
            StateError: in a forked child, or after the engine was closed.
        """
        self._managed.check_alive()
        self.mend()
        self._managed.executor.guard.update_begins()
        if self._kind is not None and isinstance(self._kind.stage, Planned) and not self._is_of_plan(self._kind.stage):
            self._diverge_in_update()
        if self._kind is None or self._is_updated:
            if self.last is None and self._rest.takes_update():
                return
            # Gradients that came from elsewhere: an update outside any step of ours, on demand.
            self.come_back()
            self._end_last_op()
            if not has_closure:  # else a step begins, which has pages of the one before
                self._managed.backend.keep_freed(0)
            self._managed.executor.state.mode = IDLE

    def _is_of_plan(self, stage: Planned) -> bool:
        """True for an update that the plan of the step which runs has room for."""
        return stage.recorded.is_updated and (self._is_updated or held_by(self._managed.optimizer) == self._contents.held)

    def _diverge_in_update(self) -> None:
        """A step is updated whose kind never was, with its state below, or the optimizer is another one than it was."""
        self.come_back()
        executor = self._managed.executor
        if executor.state.mode in (PLANNED, PASS):
            executor.clock.diverge(lambda: "an update")
            executor.reads.intercept(True)
            executor.context.lower_all()  # what the plan has brought, or kept, for an update of its own

    def before_first_update(self) -> None:
        """An optimizer that is not attached is about to make its state, which the plan of this step has no room for."""
        if self._kind is not None and isinstance(self._kind.stage, Planned):
            self._diverge_in_update()

    def before_closure(self) -> None:
        """The optimizer runs its closure by itself: each evaluation in an update is a step, and ends the one before."""
        if self._kind is not None and not self._is_updated:
            self._managed.executor.clock.tick(("end",), lambda: "end", "")
            self._finish_step(self._kind)

    def after_update(self) -> None:
        """`optimizer.step` is about to return."""
        if self._kind is not None and not self._is_updated:
            self._finish_step(self._kind)
            self._managed.executor.guard.pass_ended()  # a penalty may come before the next forward: [Note: saved outside]
        elif not self._rest.is_on:
            self._managed.executor.context.lower_all()

    def mend(self) -> None:
        """Repairs what an exception left since the engine last ran, as one in backward does."""
        if is_torn(self._managed):
            self.broke()

    def broke(self) -> None:
        """An exception left a forward, a backward or an update: what the step had begun is cleared; the next begins anew."""
        self._is_updated, self._kind = True, None
        self.come_back()
        repair(self._managed)
        self._managed.executor.abandon()
        self._managed.executor.context.lower_all()  # user code runs next
        self.close()

    def close(self) -> None:
        """Takes the hooks off inputs, and off layers of a step that was traced."""
        self._watched.watch(())
        if self._traced is not None:
            self._traced.end_spans()
            self._traced = None

    def _finish_step(self, kind: StepKind) -> None:
        self._is_updated = True
        if self._traced is not None and not self._contents.unattached:  # another optimizer's update is the step's, too
            self._traced.end_update()
        self._steps_done += 1
        self.readings.note(kind, self._steps_done, self.recomputation.spent_ns)
        self.growth.look(kind)
        self._planning.apart.updated(kind)
        if self._steps_done == _WARMUP_STEPS:
            for store in self._managed.stores.values():
                store.end_warmup()

    def _end_last_op(self) -> None:
        """The step's last op ends as the next step begins: what user code did between them belonged to it."""
        kind, traced = self._kind, self._traced
        if kind is None:
            return
        executor = self._managed.executor
        mode = executor.state.mode
        executor.end()
        self.close()
        self._kind = None
        if self._is_stranger and kind.mismatches > self._mismatches:
            kind.mismatches = self._mismatches  # which says nothing of the kind's own steps
            kind.strangers += 1
        stage = kind.stage
        if isinstance(stage, Planned) and self._is_updated:
            self._planning.check_peak(kind, stage, is_followed=mode is PLANNED)
            if mode is PASS or (mode is PLANNED and not kind.mismatches):
                kind.turns.note(stage.recorded.likeness)
            if mode is PLANNED:
                executor.on_demand.experience.cover(self._larger)  # all that they saved was as large as planned
                self.readings.observe(kind, stage)
        keys = tuple(executor.state.record.keys)
        # Without an update it was skipped by a GradScaler, or broken off, or another model's step went through it.
        is_whole = self._managed.stepper is None or ("end",) in keys or kind.is_passed_through
        if mode is not DEMAND or not is_whole or self._is_void or not self._is_as_it_was(self._managed.walk()):
            return
        is_in_turn = kind.came(likeness_of(keys))
        if isinstance(kind.stage, Recording) and traced is not None:
            self._keep_recording(kind, traced, is_in_turn=is_in_turn)
        elif isinstance(kind.stage, Measuring) and kind.asked is not None:
            return  # it was measured, and its plan is under way
        elif isinstance(kind.stage, Measuring) and self._may_plan(kind.stage.recorded, keys):
            self._planning.plan(kind, kind.stage.recorded)
        elif isinstance(kind.stage, Measuring) and self._is_stranger:
            kind.strangers += 1
        elif isinstance(kind.stage, Measuring):
            kind.trace_again(keys, kind.stage.recorded)

    def _may_plan(self, recorded: Recorded, keys: tuple[Hashable, ...]) -> bool:
        """True after a step like the recorded one; a plan that moves nothing suits others too."""
        return is_like(keys, recorded.keys) or not self._plans.can_move(recorded.trace)

    def _keep_recording(self, kind: StepKind, traced: TracedStep, *, is_in_turn: bool) -> None:
        if not traced.is_watched or kind.awaits_larger(self._managed.executor.state.record.keys):
            return
        kind.retraces += 1
        if kind.retraces > _RECORDINGS_AT_MOST:
            kind.give_up()
            return
        if not is_in_turn:
            log.info("another step was foreseen, by the turns in which such steps came before: that is traced when it comes")
            return
        if traced.has_compiled:
            log.info("this step compiled code, which takes memory of its own: the next one is traced")
            return
        contents = contents_of(self._managed.walk().used, self._managed)
        if self._managed.stepper is not None and contents.unattached != self._contents.unattached:
            log.info("an optimizer that is not attached has made its state, perhaps unseen: the next step is traced")
            return
        if self._was_first_update(contents):
            log.info("the optimizer's first update has made its state: a later one may take more, so the next step is traced")
            return
        kind.feedback = Feedback(kind.feedback.rates)
        self._planning.apart.traced(kind)
        kind.advance(Measuring(traced.finish()))
        self.kinds.rename(kind, (*self._signature, contents))

    def _was_first_update(self, contents: Contents) -> bool:
        """True after the update that made the first state, of an optimizer whose code nobody has read.

        Some make preconditioners or a moment of squares then, and return: what all later updates take is not in that trace.
        """
        stepper = self._managed.stepper
        made_state = bool(contents.held.with_state and not self._contents.held.with_state)
        return stepper is not None and made_state and not stepper.buckets.is_read

    def forget(self) -> None:
        """The model or its optimizer is another one now: what is known of its steps is void."""
        self.come_back()
        self._is_void = True
        self.kinds.clear()
        self._managed.executor.on_demand.experience = Experience()
