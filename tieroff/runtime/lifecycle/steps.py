"""Steps: when one begins and ends, and what kind it is."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from tieroff.core.seams import PlanSource
from tieroff.runtime.custody import Custody
from tieroff.runtime.execution.experience import Experience, Shapes
from tieroff.runtime.hooks.forward.inputs import shapes_of, signature_of, storages_of
from tieroff.runtime.hooks.parameters.access import install
from tieroff.runtime.hooks.recompute.recomputation import Recomputation
from tieroff.runtime.lifecycle.planning import StepPlanning
from tieroff.runtime.lifecycle.readings import Readings
from tieroff.runtime.lifecycle.repair import is_torn, repair
from tieroff.runtime.lifecycle.traced import TracedStep
from tieroff.runtime.step.feedback import Feedback
from tieroff.runtime.step.kinds import Measuring, Planned, Recording, StepKind, Unplanned
from tieroff.runtime.step.mode import Mode

log = logging.getLogger("tieroff")

# Kinds of steps (signatures) whose traces and plans are kept.
_KINDS_KEPT = 16
# Steps in a row that must leave a plan before the kind is traced again; doubled each time.
_MISMATCHES_BEFORE_RETRACE = 2
_RECORDINGS_AT_MOST = 6
# Steps after which checksums end that were asked for the warm-up.
_WARMUP_STEPS = 8


class KnownKinds(OrderedDict[Hashable, StepKind]):
    """The kinds of steps that ran, by signature; the one that ran last is at the end."""

    def enter(self, signature: Hashable) -> StepKind:
        """Returns the kind of a step that begins, in the stage that this step is for."""
        kind = self.get(signature)
        if kind is None:
            kind = self[signature] = StepKind()
            if len(self) > _KINDS_KEPT:
                kind.advance(Unplanned())  # of so many kinds, only one that comes again soon is worth a trace
                self.popitem(last=False)
        elif isinstance(kind.stage, Unplanned) and not kind.retraces:
            kind.advance(Recording())
        self.move_to_end(signature)
        if isinstance(kind.stage, Planned) and kind.mismatches >= _MISMATCHES_BEFORE_RETRACE << kind.retraces:
            log.info("the step has left its plan %d times in a row: it is traced again", kind.mismatches)
            kind.advance(Recording())
            kind.retraces += 1
            kind.mismatches = 0
        return kind


class Steps:
    """One step after another. A step lasts from its first forward to the next step's: what user code does is in the last op.

    Attributes:
        kinds: of the steps that ran.
        last: the kind that ran last.
        recomputation: modules that run again in backward.
        readings: figures of the steps that ended.
    """

    def __init__(self, custody: Custody, plans: PlanSource) -> None:
        self._custody, self._plans = custody, plans
        self.kinds = KnownKinds()
        self.last: StepKind | None = None
        self.recomputation = Recomputation(custody.model, custody.executor.gate, custody.executor.clock)
        self._planning = StepPlanning(custody, plans, self.recomputation)
        self.readings = Readings(custody, self._planning)
        self._traced: TracedStep | None = None
        self._kind: StepKind | None = None  # of the step that runs, until its last op ends
        self._is_updated = True  # the step that runs was updated, or there is none
        self._steps_done = 0

    # -- a step begins ---------------------------------------------------------------------------------------------

    def begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward begins: of a new step, or one more of the step that runs."""
        custody, executor = self._custody, self._custody.executor
        self._mend()
        signature = signature_of(custody.model, args, kwargs)
        with executor.state.lock:  # other threads may read parameters
            self._begin_forward(signature, args, kwargs)

    def _begin_forward(self, signature: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        custody, executor = self._custody, self._custody.executor
        executor.gradients.sweep()
        if self._kind is not None and not self._is_updated and self._was_skipped():
            self._finish_step(self._kind)
        if self._is_updated or self._kind is None:
            self._end_last_op()
            self.check_model()
            self._start_step(signature)
        if executor.state.mode is not Mode.PASS:
            self._note_input(shapes_of((args, kwargs)))
            executor.saved_tensors.fixed = (
                storages_of((args, kwargs)) | storages_of(list(custody.model.buffers())) | custody.device_storages()
            )
            executor.clock.tick(("forward", signature), lambda: "forward", "forward")

    def _note_input(self, shapes: Shapes) -> None:
        """Before a forward on inputs of these shapes, in whatever mode."""
        on_demand = self._custody.executor.on_demand
        on_demand.release_reachable()  # an exception in backward may have left something
        if self._traced is not None and self._traced.is_watched:
            self._traced.shapes.append(shapes)
        elif not on_demand.experience.covers(shapes):
            on_demand.room_bytes = 0  # what ops on these need is unknown
            self._custody.backend.keep_freed(0)
            on_demand.release_all()

    def check_model(self) -> None:
        """Adopts what somebody changed from outside: parameters replaced, converted, frozen, assigned."""
        if not self._custody.has_changed() or self._custody.has_substitutes():
            return
        log.info("the model's parameters were changed from outside: they are taken over as they are now")
        install(self._custody.model, self._custody.executor.gate)
        self._custody.register()
        self.forget()

    def _was_skipped(self) -> bool:
        """True when the step's backward is over and its gradients were cleared without an update (GradScaler, or none)."""
        saw_backward, stepper = self._custody.executor.state.saw_backward, self._custody.stepper
        if stepper is None or not saw_backward:
            return saw_backward
        return all(p.grad is None for group in stepper.optimizer.param_groups for p in group["params"])

    def _start_step(self, signature: Hashable) -> None:
        custody = self._custody
        kind = self.kinds.enter(signature)
        if custody.stepper is not None:
            custody.stepper.state.take_over()
        custody.place_for(kind)
        recorder = None
        if isinstance(kind.stage, Recording):
            recorder = self._plans.recorder()
            self._traced = TracedStep(custody, self._plans, recorder)
        self._kind = self.last = kind
        custody.executor.begin(kind, recorder)
        custody.keep_freed(kind)
        if custody.stepper is not None:
            custody.stepper.begin()
        self._is_updated = False
        self.recomputation.spent_ns = 0
        if self._traced is not None:
            self._traced.start(is_recomputing=bool(self.recomputation.slots))

    # -- a step ends -----------------------------------------------------------------------------------------------

    def before_update(self) -> None:
        """`optimizer.step` was called.

        Raises:
            StateError: in a forked child, or after the engine was closed.
        """
        self._custody.check_alive()
        self._mend()
        if self._kind is None or self._is_updated:
            # Gradients that came from elsewhere: an update outside any step of ours, on demand.
            self._end_last_op()
            self._custody.backend.keep_freed(0)
            self._custody.executor.state.mode = Mode.IDLE

    def before_closure(self) -> None:
        """The optimizer runs its closure by itself: a step that was updated in part has no plan."""
        kind = self._kind
        if kind is None or self._is_updated or isinstance(kind.stage, Unplanned):
            return
        log.info("the optimizer runs forwards in the middle of its update: these steps run with transfers on demand")
        if self._custody.executor.state.mode is Mode.PLANNED:
            self._custody.executor.clock.diverge(lambda: "another forward in the update")
        kind.advance(Unplanned())
        kind.retraces = max(kind.retraces, 1)  # such a kind is not tried again when it comes back

    def after_update(self) -> None:
        """`optimizer.step` is about to return."""
        if self._kind is not None and not self._is_updated:
            self._finish_step(self._kind)
        else:
            self._custody.executor.context.lower_all()

    def _mend(self) -> None:
        """Repairs what an exception left since the engine last ran, as one in backward does."""
        if is_torn(self._custody):
            self.broke()

    def broke(self) -> None:
        """An exception left a forward, a backward or an update: what the step had begun is cleared; the next begins anew."""
        self._is_updated, self._kind = True, None
        repair(self._custody)
        self._custody.executor.abandon()
        self._custody.executor.context.lower_all()  # user code runs next
        self.close()

    def close(self) -> None:
        """Takes the hooks off layers of a step that was traced."""
        if self._traced is not None:
            self._traced.end_spans()
            self._traced = None

    def _finish_step(self, kind: StepKind) -> None:
        self._is_updated = True
        if self._traced is not None:
            self._traced.end_spans()
        self._steps_done += 1
        self.readings.note(kind, self._steps_done, self.recomputation.spent_ns)
        if self._steps_done == _WARMUP_STEPS:
            for store in self._custody.stores.values():
                store.end_warmup()

    def _end_last_op(self) -> None:
        """The step's last op ends as the next step begins: what user code did between them belonged to it."""
        kind, traced = self._kind, self._traced
        if kind is None:
            return
        executor = self._custody.executor
        mode = executor.state.mode
        executor.end()
        self.close()
        self._kind = None
        if mode is Mode.PLANNED and isinstance(kind.stage, Planned) and self._is_updated:
            self.readings.observe(kind, kind.stage)
        keys = tuple(executor.state.record.keys)
        is_whole = self._custody.stepper is None or ("end",) in keys  # or skipped by a GradScaler, or broken off
        if mode is not Mode.DEMAND or not is_whole or self._custody.has_changed():
            return
        if isinstance(kind.stage, Recording) and traced is not None:
            self._keep_recording(kind, traced)
        elif isinstance(kind.stage, Measuring) and keys == kind.stage.recorded.keys:
            self._planning.plan(kind, kind.stage.recorded)
        elif isinstance(kind.stage, Measuring):
            log.info("two steps in a row differed: the step is traced again")
            kind.advance(Recording())

    def _keep_recording(self, kind: StepKind, traced: TracedStep) -> None:
        kind.retraces += 1
        if not traced.is_watched:
            return
        if kind.retraces > _RECORDINGS_AT_MOST:
            log.warning("steps of this model do not repeat: they run with transfers on demand (right, but slower)")
            kind.advance(Unplanned())
            return
        if traced.has_compiled:
            log.info("this step compiled code, which takes memory of its own: the next one is traced")
            return
        kind.feedback = Feedback(kind.feedback.rates)
        kind.advance(Measuring(traced.finish()))

    def forget(self) -> None:
        """The model or its optimizer is another one now: what is known of its steps is void."""
        self.kinds.clear()
        self._custody.executor.on_demand.experience = Experience()
