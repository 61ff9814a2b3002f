"""A step that is traced: recorder and layer hooks around it, and what they saw when it is over."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable
from typing import Any

from tieroff.core.buckets import BYTES_BELOW, UPDATED_ON_DEVICE, UPDATED_ON_HOST, as_bytes_below, fills_vectors
from tieroff.core.seams import PlanSource, Recorder, Subject
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.trace import Trace
from tieroff.errors import CaptureError, RecorderBusyError
from tieroff.runtime.execution.experience import Shapes
from tieroff.runtime.hooks.forward.compiled import advice_of, compiled_count, find_compiled
from tieroff.runtime.hooks.forward.inputs import leaves_behind, storages_in
from tieroff.runtime.hooks.recompute.layers import ModuleSpans, layers_of, mark_recomputed
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.lifecycle.unmanaged import unmanaged
from tieroff.runtime.managed.model import ManagedModel
from tieroff.runtime.step.communication import with_communication
from tieroff.runtime.step.executable import sums_no_gradients
from tieroff.runtime.step.recorded import Recorded, is_updated, update_of

log = logging.getLogger("tieroff")

# Phases of ops in which user code runs that is not the update.
_PASSES = ("forward", "backward", "recompute")


class TracedStep:
    """One step that is traced.

    Attributes:
        shapes: of the inputs of its forwards.
    """

    def __init__(self, managed: ManagedModel, plans: PlanSource, recorder: Recorder) -> None:
        self._managed, self._plans, self._recorder = managed, plans, recorder
        self.shapes: list[Shapes] = []
        self._spans: ModuleSpans | None = None
        self._has_started = True
        self._compiled_before = compiled_count()

    @property
    def is_watched(self) -> bool:
        """False when the recorder could not start, or made room for another model's."""
        return self._has_started and not self._recorder.is_cut

    def start(self, *, is_recomputing: bool) -> None:
        """Begins to watch; `is_recomputing`: some layers run again already, so none is looked for."""
        managed, record = self._managed, self._managed.executor.state.record
        try:
            self._recorder.start()
        except CaptureError as error:
            level = logging.INFO if isinstance(error, RecorderBusyError) else logging.WARNING
            log.log(level, "%s; this step runs on demand", error)
            record.recorder, self._has_started = None, False
            return
        self._recorder.watch_gradients(lambda: [p.grad for p in managed.model.parameters() if p.grad is not None])
        for item in managed.executor.homes:
            record.bind(item)
        managed.executor.gradients.begin_recording()
        layers = managed.settings.recompute_layers
        if layers and not is_recomputing and next(find_compiled(managed.model), None) is None:
            starts_ns = managed.executor.clock.times.host_starts_ns
            self._spans = ModuleSpans(layers_of(managed.model, layers), lambda: len(starts_ns))

    def end_spans(self) -> None:
        """The step's forwards are over: its layers have no hooks any more."""
        if self._spans is not None:
            self._spans.remove()

    def end_update(self) -> None:
        """The update is over: what user code does before the next step (loading data, say) is not traced."""
        self.end_spans()
        if self.is_watched:
            self._recorder.stop()

    def next_inputs(self, values: Any) -> None:
        """The next step begins with these inputs, which user code has made beside what was left of this one."""
        if self.is_watched:
            self._recorder.made(storages_in(values))

    def returned(self, values: Any) -> None:
        """A forward returns these."""
        if self.is_watched:
            self._recorder.returned(storages_in(values), storages_in(leaves_behind(values)))

    @property
    def has_compiled(self) -> bool:
        """True when code was compiled since the step began, which takes memory of its own."""
        return compiled_count() > self._compiled_before

    def finish(self) -> Recorded:
        """Returns what the step showed, once it is over; it was watched."""
        managed, record = self._managed, self._managed.executor.state.record
        keys, recorder = tuple(record.keys), self._recorder
        subjects = self._subjects(is_updated=is_updated(keys))
        recorder.stands(one.tensor.untyped_storage() for one in unmanaged(managed))
        if advice := "; ".join(filter(None, (advice_of(managed.model), managed.executor.shards.advice))):
            recorder.meta["advice"] = advice
        if managed.stepper is not None and managed.stepper.host.evidence.is_possible:
            recorder.meta[UPDATED_ON_HOST] = type(managed.stepper.optimizer).__name__
            homes = managed.executor.homes.parameters.values()
            odd = [item.name for item in homes if not fills_vectors(item.size_bytes // item.dtype.itemsize)]
            recorder.meta[UPDATED_ON_DEVICE] = "\n".join(odd)
        if sliced := [item for item in managed.executor.homes.states.values() if item.is_sliced]:
            recorder.meta[BYTES_BELOW] = _bytes_below(sliced)
        trace = recorder.finish(subjects, [0] * len(keys), type(managed.model).__name__)
        trace = mark_recomputed(self._spans.name(trace) if self._spans is not None else trace, keys)
        trace, buffers = with_communication(trace, keys)
        index = {subject.key: i for i, subject in enumerate(subjects)}
        parameters = {s.key: i for i, s in enumerate(subjects) if s.kind is TensorClass.PARAMETER}
        in_passes = {t for op in trace.ops if op.phase in _PASSES for t in op.writes}
        written = {key for key, i in parameters.items() if i in in_passes}
        below = recorder.written_below & parameters.keys()
        hooked = recorder.written_in_backward & index.keys() - parameters.keys()
        used = _used_below(trace, recorder, index, keys)
        asked = managed.executor.scaled.asked
        norms = {key: frozenset() if key in hooked else frozenset(norms) for key, norms in asked.items() if key in index}
        self._learn(trace, list(index), written | below)
        return Recorded(
            keys=keys,
            names=tuple(record.names),
            trace=trace,
            index=index | buffers,
            written=frozenset(written | below),  # what lies below now may be lifted when it is written next
            written_by_hooks=frozenset(index[key] for key in hooked),
            used_below=used,
            leaves_gradients=not (used or norms or recorder.used_gradients) and sums_no_gradients(trace, keys),
            scratch_bytes=recorder.scratch_bytes,
            norms=norms,
            places=tuple(record.places),
            beside=recorder.beside,
            foreign_bytes=recorder.foreign_bytes,
        )

    def _subjects(self, *, is_updated: bool) -> list[Subject]:
        homes, gradients = self._managed.executor.homes, self._managed.executor.gradients
        persistent = (*homes.parameters.values(), *(homes.states.values() if is_updated else ()))
        persistent = tuple(item for item in persistent if not item.is_sliced)
        subjects = [Subject(item.key, item.name, item.size_bytes, item.kind, is_persistent=True) for item in persistent]
        return subjects + gradients.recorded_subjects()

    def _learn(self, trace: Trace, keys: list[Hashable], written: set[Hashable]) -> None:
        """Keeps what the step says about steps that run without a plan."""
        read = {keys[t] for op in trace.ops if op.phase in _PASSES for t in op.reads}
        room_bytes = self._plans.spare_bytes(trace)
        self._managed.executor.on_demand.experience.add(read, written, self.shapes, room_bytes)
        stepper = self._managed.stepper
        lacking = self._plans.lacks_for_updates(trace)
        if stepper is not None and lacking is not None:
            stepper.host.evidence.lacking = lacking


def _bytes_below(items: Iterable[HomeItem]) -> str:
    """Returns what items take of the lower tiers, as the trace's `meta` has it; "" for nothing."""
    taken: dict[Tier, int] = {}
    for item in items:
        taken[item.tier] = taken.get(item.tier, 0) + item.size_bytes
    return as_bytes_below(taken)


def _used_below(trace: Trace, recorder: Recorder, index: dict[Hashable, int], keys: tuple[Hashable, ...]) -> dict[int, bool]:
    """Returns the gradients that user code used after backward where they lay, and whether it wrote them."""
    used = recorder.used_below(update_of(keys) - 1)
    indices = {index[key]: is_written for key, is_written in used.items() if key in index}
    return {i: is_written for i, is_written in indices.items() if trace.tensors[i].kind is TensorClass.GRADIENT}
