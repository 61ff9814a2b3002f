"""Steps: when one begins and ends, what kind it is, and how a kind gets from its first recording to a plan."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from tieroff.core.history import StepFigures
from tieroff.core.plan import Plan
from tieroff.core.seams import PlanSource, Recorder, Subject
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.trace import Trace
from tieroff.errors import CaptureError, InfeasiblePlanError, StoreError
from tieroff.runtime.custody import Custody
from tieroff.runtime.execution.on_demand import Experience, Shapes
from tieroff.runtime.hooks.compiled import compiled_count, find_compiled
from tieroff.runtime.hooks.forward import shapes_of, signature_of, storages_of
from tieroff.runtime.hooks.parameters import install
from tieroff.runtime.hooks.recompute import ModuleSpans, Recomputation, layers_of, mark_recomputed
from tieroff.runtime.step.feedback import Feedback
from tieroff.runtime.step.measured import measured_timeline
from tieroff.runtime.step.program import Mode, Phase, Program, sums_no_gradients, update_of
from tieroff.runtime.step.stats import Stats
from tieroff.units import NS_PER_S, format_seconds

log = logging.getLogger("tieroff")

# Kinds of steps (signatures) whose traces and plans are kept.
_PROGRAMS_KEPT = 16
# Steps whose figures are kept.
_HISTORY_STEPS = 4096
# Steps in a row that must leave a plan before the kind is traced again; doubled each time.
_MISMATCHES_BEFORE_RETRACE = 2
_RECORDINGS_AT_MOST = 6
# Steps after which checksums end that were asked for the warm-up.
_WARMUP_STEPS = 8

# Phases of ops in which user code runs that no update is.
_PASSES = ("forward", "backward", "recompute")
_PHASES = {Phase.RECORD: "traced", Phase.MEASURE: "measured", Phase.PLANNED: "planned", Phase.FREE: "on demand"}


class Steps:
    """One step after another.

    Attributes:
        programs: signature of a step's first input -> what is known of that kind of step.
        last: the kind that ran last.
        recomputed: dotted path of a module -> its forward's stand-in.
        stats: of the last step.
        history: figures of the last steps, oldest first.
    """

    def __init__(self, custody: Custody, plans: PlanSource) -> None:
        self._custody, self._plans = custody, plans
        self.programs: OrderedDict[Hashable, Program] = OrderedDict()
        self.last: Program | None = None
        self._recomputation = Recomputation(custody.model, custody.executor)
        self.recomputed = self._recomputation.slots
        self.stats: Stats | None = None
        self.watchers: list[Callable[[Stats, Plan | None], None]] = []
        self.history: deque[StepFigures] = deque(maxlen=_HISTORY_STEPS)
        self._shapes: list[Shapes] = []  # of the inputs of the forwards in the step that is recorded
        self._spans: ModuleSpans | None = None  # of the step that is recorded
        self._program: Program | None = None
        self._step_is_over = True
        self._begun_ns = self._steps_done = self._compiled_before = 0

    def begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        signature = signature_of(self._custody.model, args, kwargs)
        executor = self._custody.executor
        executor.gradients.sweep()
        if not self._step_is_over and self._was_skipped():
            self._finish_step()
        if self._step_is_over or self._program is None:
            self._end_ring()
            self.check_model()
            self._start_step(signature)
        if executor.mode is not Mode.PASS:
            self._note_input(shapes_of((args, kwargs)))
            executor.saved_tensors.fixed = (
                storages_of((args, kwargs)) | storages_of(list(self._custody.model.buffers())) | self._custody.device_storages()
            )
            executor.tick(("forward", signature), lambda: "forward", "forward")

    def _note_input(self, shapes: Shapes) -> None:
        """Before a forward on inputs of these shapes, in whatever mode."""
        executor = self._custody.executor
        executor.on_demand.let_go()  # an exception in backward may have left something
        if executor.recorder is not None:
            self._shapes.append(shapes)
        elif not executor.on_demand.experience.covers(shapes):
            executor.on_demand.room_bytes = 0  # nobody knows what ops on these need
            self._custody.backend.keep_freed(0)
            executor.on_demand.clear()

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
        if self._custody.stepper is None:
            return self._custody.executor.saw_backward
        return self._custody.executor.saw_backward and all(
            p.grad is None for group in self._custody.stepper.optimizer.param_groups for p in group["params"]
        )

    def _start_step(self, signature: Hashable) -> None:
        program = self.programs.get(signature)
        if program is not None and program.phase is Phase.FREE and not program.retraces:
            program.phase = Phase.RECORD
        if program is None:
            program = self.programs[signature] = Program(signature)
            if len(self.programs) > _PROGRAMS_KEPT:
                program.phase = Phase.FREE  # of so many kinds, only one that comes again soon is worth a trace
            while len(self.programs) > _PROGRAMS_KEPT:
                self.programs.popitem(last=False)
        self.programs.move_to_end(signature)
        self._settle_phase(program)
        if self._custody.stepper is not None:
            self._custody.stepper.take_over_state()
        self._custody.place_for(program)
        recorder = None
        if program.phase is Phase.RECORD:
            recorder, self._shapes = self._plans.recorder(), []
        self._program = self.last = program
        on_demand = self._custody.executor.on_demand
        on_demand.room_bytes = on_demand.experience.room_bytes
        self._custody.executor.begin(program, recorder)
        for item in self._custody.home_items():
            self._custody.executor.assign(item)
        self._custody.keep_freed(program)
        if self._custody.stepper is not None:
            self._custody.stepper.begin()
        self._step_is_over = False
        self._begun_ns, self._recomputation.spent_ns = time.monotonic_ns(), 0
        if recorder is not None:
            self._compiled_before = compiled_count()
            self._start_recorder(recorder)

    def _start_recorder(self, recorder: Recorder) -> None:
        try:
            recorder.start()
        except CaptureError as error:
            log.warning("%s; this step runs on demand", error)
            self._custody.executor.recorder = None
            return
        for item in self._custody.home_items():
            self._custody.executor.bind(item)
        layers = self._custody.settings.recompute_layers
        if layers and not self.recomputed and next(find_compiled(self._custody.model), None) is None:
            starts_ns = self._custody.executor.starts_ns
            self._spans = ModuleSpans(layers_of(self._custody.model, layers), lambda: len(starts_ns))

    def end_spans(self) -> ModuleSpans | None:
        """The recorded step is over: its layers have no hooks any more; returns what they noted."""
        spans, self._spans = self._spans, None
        if spans is not None:
            spans.remove()
        return spans

    def _settle_phase(self, program: Program) -> None:
        """Decides whether a kind of step whose last runs left its plan is traced again."""
        if program.phase is Phase.PLANNED and program.mismatches >= _MISMATCHES_BEFORE_RETRACE << program.retraces:
            log.info("the step has left its plan %d times in a row: it is traced again", program.mismatches)
            program.phase = Phase.RECORD
            program.retraces += 1
            program.mismatches = 0

    def before_update(self) -> None:
        """`optimizer.step` was called."""
        if self._program is None or self._step_is_over:
            # Gradients that came from elsewhere: an update outside any step of ours, on demand.
            self._end_ring()
            self._custody.backend.keep_freed(0)
            self._custody.executor.mode = Mode.IDLE

    def after_update(self) -> None:
        """`optimizer.step` is about to return."""
        if self._program is not None and not self._step_is_over:
            self._finish_step()
        else:
            assert self._custody.stepper is not None
            self._custody.stepper.lower_all()

    def _finish_step(self) -> None:
        self._step_is_over = True
        if self._spans is not None:
            self._spans.remove()
        self._note_stats()
        self._steps_done += 1
        assert self.stats is not None and self._program is not None
        for seen in self.watchers:
            seen(self.stats, self._program.plan)
        assert self.stats is not None
        self.history.append(self.stats.figures(self._steps_done))
        if self._steps_done == _WARMUP_STEPS:
            for store in self._custody.stores.values():
                store.end_warmup()

    def _end_ring(self) -> None:
        """The ring closes: what user code did between the steps belonged to the last op."""
        program = self._program
        if program is None:
            return
        executor = self._custody.executor
        mode = executor.mode
        keys, names = executor.end()
        recorder, executor.recorder = executor.recorder, None
        spans = self.end_spans()
        self._program = None
        if mode is Mode.PLANNED:
            self._compare(program)
        if mode is not Mode.DEMAND or program.phase not in (Phase.RECORD, Phase.MEASURE):
            return
        if self._custody.stepper is not None and ("end",) not in keys:
            return  # skipped by a GradScaler, or broken off: the next step is as good
        if program.phase is Phase.RECORD:
            self._keep_recording(program, recorder, spans, keys, names)
        elif keys == program.keys:
            self._plan(program)
        else:
            log.info("two steps in a row differed: the step is traced again")
            program.phase = Phase.RECORD

    def _compare(self, program: Program) -> None:
        """Plans once more when steps show that the plan was made for other durations, or faster or slower links.

        The measured step runs with everything moved out, its caches cold; planned ones are nearer to the truth. Later the
        machine itself may change.
        """
        executor, feedback = self._custody.executor, program.feedback
        if executor.cursor != len(program.keys):
            return
        durations_ns = [max(b - a, 0) for a, b in zip(executor.starts_ns, executor.stops_ns, strict=True)]
        if not feedback.take(durations_ns, self._custody.traffic.spans):
            return
        assert program.trace is not None and program.made_for is not None
        assert program.plan is not None and self.stats is not None
        reason = feedback.look(program.made_for, self._plans.machine_at)
        trace = program.trace.with_durations(feedback.typical_ns)
        foretold = self._plans.forecast(program.plan, trace, feedback.rates_now())
        if reason and not (foretold and feedback.holds(*foretold)):
            self._plan_again(program, trace, reason)
            return
        if foretold:  # the same plan, with what is known by now
            program.trace, program.plan = trace, replace(program.plan, step_ns=foretold[0])
        if feedback.settle():
            predicted, took = format_seconds(program.plan.step_ns / NS_PER_S), format_seconds(self.stats.step_s)
            log.info("the plan holds after %d planned steps: %s a step, %s predicted", feedback.settled_after, took, predicted)

    def _adopt(self, program: Program, plan: Plan) -> None:
        """Has the next step of this kind run a plan that was made for the program's trace and rates."""
        assert program.trace is not None
        foretold = self._plans.forecast(plan, program.trace, program.feedback.rates)
        program.feedback.slack = foretold[0] / foretold[1] if foretold and foretold[1] else 0.0
        program.adopt(plan)

    def _plan_again(self, program: Program, trace: Trace, reason: str) -> None:
        self._custody.backend.keep_freed(0)  # planning takes memory too
        try:
            plan = self._plans.plan(trace, program.feedback.plan_again())
            self._reserve(plan)
        except (InfeasiblePlanError, StoreError) as error:
            # The process, or the drive, has less room than when the plan was made, which still runs.
            log.warning("%s, but the step could not be planned again, and keeps its plan: %s", reason, error)
            return
        if plan is program.plan:
            return  # it was given, and stays
        if self._recomputation.begin(plan.recompute):
            program.phase = Phase.RECORD
            return
        log.info("%s: the step was planned again", reason)
        program.trace = trace
        self._adopt(program, plan)

    def _keep_recording(
        self, program: Program, recorder: Recorder | None, spans: ModuleSpans | None, keys: list[Hashable], names: list[str]
    ) -> None:
        program.retraces += 1
        if recorder is None:
            return
        if program.retraces > _RECORDINGS_AT_MOST:
            log.warning("steps of this model do not repeat: they run with transfers on demand (right, but slower)")
            program.phase = Phase.FREE
            return
        if compiled_count() > self._compiled_before:
            log.info("this step compiled code, which takes memory of its own: the next one is traced")
            return
        program.feedback = Feedback(program.feedback.rates)
        program.keys, program.names = keys, names
        subjects = self._subjects()
        trace = recorder.finish(subjects, [0] * len(keys), type(self._custody.model).__name__)
        program.trace = mark_recomputed(spans.name(trace) if spans is not None else trace, keys)
        program.index = {subject.key: i for i, subject in enumerate(subjects)}
        in_passes = {t for op in program.trace.ops if op.phase in _PASSES for t in op.writes}
        parameters = {s.key: i for i, s in enumerate(subjects) if s.kind is TensorClass.PARAMETER}
        written = {key for key, i in parameters.items() if i in in_passes}
        below = recorder.written_below & parameters.keys()
        hooked = recorder.written_in_backward & program.index.keys() - parameters.keys()
        program.written_by_hooks = frozenset(program.index[key] for key in hooked)
        # A home that lies below now may be lifted when it is written next; another one never is.
        program.written = frozenset(written | below if self._custody.backend.lifts_homes else written)
        used = self._used_below(program, recorder)
        # A home on the host stays there for user code.
        program.used_below = used if self._custody.backend.lifts_homes else {}
        program.leaves_gradients = not used and sums_no_gradients(program.trace, keys)
        program.scratch_bytes = recorder.scratch_bytes
        program.phase = Phase.MEASURE
        self._learn(program, written | below)

    def _used_below(self, program: Program, recorder: Recorder) -> dict[int, bool]:
        """Returns the gradients that user code used after backward where they lay, and whether it wrote them."""
        assert program.trace is not None
        tensors, used = program.trace.tensors, recorder.used_below(update_of(program.keys) - 1)
        indices = {program.index[key]: is_written for key, is_written in used.items() if key in program.index}
        return {i: is_written for i, is_written in indices.items() if tensors[i].kind is TensorClass.GRADIENT}

    def _learn(self, program: Program, written: set[Hashable]) -> None:
        """Keeps what a recorded step says about steps that run without a plan."""
        assert program.trace is not None
        keys = list(program.index)
        in_passes = (t for op in program.trace.ops if op.phase in _PASSES for t in op.reads)
        experience = self._custody.executor.on_demand.experience
        experience.add({keys[t] for t in in_passes}, written, self._shapes, self._plans.spare_bytes(program.trace))

    def forget(self) -> None:
        """The model or its optimizer is another one now: what is known of its steps is void."""
        self.programs.clear()
        self._custody.executor.on_demand.experience = Experience()

    def _subjects(self) -> list[Subject]:
        subjects = [
            Subject(item.key, item.name, item.size_bytes, item.kind, is_persistent=True) for item in self._custody.home_items()
            if item.kind is not TensorClass.GRADIENT
        ]  # fmt: skip
        subjects += self._custody.executor.gradients.recorded_subjects()
        return subjects

    def _plan(self, program: Program) -> None:
        assert program.trace is not None
        executor = self._custody.executor
        durations = [max(b - a, 0) for a, b in zip(executor.starts_ns, executor.stops_ns, strict=True)]
        trace = program.trace = program.trace.with_durations(durations)
        self._custody.backend.keep_freed(0)  # planning takes memory too
        try:
            program.trace = self._plans.bring_back(trace, update_of(program.keys) - 1, program.used_below)
            plan = self._plans.plan(program.trace, program.feedback.rates)
        except InfeasiblePlanError:
            if program.trace is trace:
                raise
            program.trace = trace  # less than the whole budget was left, or the policy has other uses for it
            plan = self._plans.plan(trace, program.feedback.rates)
        if self._recomputation.begin(plan.recompute):
            program.phase = Phase.RECORD
            return
        self._reserve(plan)
        self._adopt(program, plan)

    def _reserve(self, plan: Plan) -> None:
        for store in self._custody.stores.values():
            store.reserve(plan.peak_bytes.get(store.tier, 0))  # a full drive is known now, not in mid-run

    def broke(self) -> None:
        """An exception left the forward: what the step had begun is cleared; the next forward begins a new one."""
        self._custody.executor.abandon()
        self.end_spans()
        self._program = None
        self._step_is_over = True

    def _note_stats(self) -> None:
        executor, program = self._custody.executor, self._program
        assert program is not None
        executor.pause()
        now_ns = time.monotonic_ns()
        compute_ns = sum(b - a for a, b in zip(executor.starts_ns, executor.stops_ns, strict=False))
        host, nvme = self._custody.stores.get(Tier.HOST), self._custody.stores.get(Tier.NVME)
        is_pass = executor.mode is Mode.PASS
        phase = _PHASES[program.phase]
        if is_pass:
            phase = "nothing moved"
        elif program.phase is Phase.PLANNED and executor.mode is not Mode.PLANNED:
            phase = "on demand"
        counts = self._custody.traffic.counts
        self.stats = Stats(
            step_s=(now_ns - self._begun_ns) / 1e9,
            compute_s=(now_ns - self._begun_ns if is_pass else compute_ns) / 1e9,
            stall_s=counts.stall_ns / 1e9,
            recompute_s=self._recomputation.spent_ns / 1e9,
            peak_device_bytes=executor.peak_bytes,
            peak_host_bytes=host.peak_bytes if host is not None else 0,
            nvme_bytes=nvme.used_bytes if nvme is not None else 0,
            moved_bytes=dict(counts.moved_bytes),
            moved_bytes_by_class=dict(counts.by_class),
            fallbacks=counts.fallbacks,
            faults=counts.faults,
            phase=phase,
            plans=program.feedback.plan_count,
            settled_after=program.feedback.settled_after,
            settings={"backend": self._custody.backend.name, **self._custody.settings.chosen},
        )
        if executor.mode is Mode.PLANNED and self._custody.traffic.keep_spans:
            assert program.trace is not None and program.plan is not None
            did = measured_timeline(program, self._custody, self._begun_ns, self._recomputation.spent_ns)
            program.ran = program.trace, program.plan, did
