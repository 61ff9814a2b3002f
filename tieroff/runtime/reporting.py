"""What an engine tells of its steps: an explanation, and a run for reports."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tieroff.core.buckets import bytes_apart
from tieroff.core.explain.describe import Explained, explain
from tieroff.core.io.run_folder import Run
from tieroff.core.plan import Plan
from tieroff.core.seams import PlanSource
from tieroff.core.tensor import Tier
from tieroff.core.timeline import Timeline
from tieroff.core.trace import Trace
from tieroff.errors import StateError
from tieroff.runtime.collectives import collectives_here
from tieroff.runtime.lifecycle.steps import Steps
from tieroff.runtime.lifecycle.unmanaged import unmanaged
from tieroff.runtime.managed.model import ManagedModel
from tieroff.runtime.step.kinds import StepKind


class Reporting:
    """Words and documents on the steps of one engine."""

    def __init__(self, managed: ManagedModel, steps: Steps, plans: PlanSource) -> None:
        self._managed, self._steps, self._plans = managed, steps, plans

    def explain(self, *, detail: bool) -> str:
        """Returns the text of `Engine.explain`."""
        if self._steps.last is None:
            return "No training step has run yet: nothing is known of this model's tensors."
        for kind in self.kinds():
            if kind.planned is not None:
                return self._explain(kind, kind.planned.trace, kind.planned.plan, detail=detail)
        text = "The first two steps are traced and measured, with everything moved out; the plan is made beside the next ones."
        if self._managed.stepper is not None and not self._managed.stepper.has_stepped:
            name = type(self._managed.stepper.optimizer).__name__
            text += f" No step has ended yet: one ends with step() of the {name} that was given to tieroff.wrap."
        return text

    def kinds(self) -> Iterator[StepKind]:
        """Yields the kinds of steps, the one that ran last first."""
        if self._steps.last is not None:
            yield self._steps.last
        yield from reversed(self._steps.kinds.values())

    def _explain(self, kind: StepKind, trace: Trace, plan: Plan, *, detail: bool) -> str:
        stats = self._steps.readings.last
        measured = stats.figures() if stats is not None else None
        is_cpu, dtype = self._managed.backend.device.type == "cpu", self._managed.settings.compute_dtype
        compute_type = "bf16" if dtype is torch.bfloat16 else ""
        stepper = self._managed.stepper
        leaves_gradients = kind.recorded is not None and kind.recorded.leaves_gradients
        may_update = leaves_gradients and stepper is not None and stepper.could_update_in_backward
        allocator = self._managed.backend.allocated_most()
        unmoved = self._managed.unmoved_by_reason()
        planned = kind.feedback.plan_count, kind.feedback.replanned_since
        updates = stepper.host.evidence.words() if stepper is not None else ""
        asked, got_bytes = self._managed.settings.device_budget, plan.budget_bytes.get(Tier.DEVICE, 0)
        step = Explained(
            trace,
            plan,
            measured=measured,
            unmoved=unmoved,
            is_cpu=is_cpu,
            compute_type=compute_type,
            may_update_in_backward=may_update,
            allocator=allocator,
            unmanaged=self._unmanaged(kind),
            planned=planned,
            updates=updates,
            raised_from=asked.raised_from(trace.peak_bytes, got_bytes) if asked is not None else "",
        )
        return "\n".join(explain(step, detail=detail))

    def _unmanaged(self, kind: StepKind) -> dict[str, int]:
        """Returns the bytes that stay on the device whatever a plan says, by why."""
        found: dict[str, int] = {}
        if kind.recorded is not None and kind.recorded.foreign_bytes:
            found["parameters of a model that is not wrapped: wrap it under the same budget"] = kind.recorded.foreign_bytes
        if kind.recorded is not None and (apart := bytes_apart(kind.recorded.trace.meta)):
            found["what the program has there apart from the step; a budget in bytes pays for it"] = apart
        for one in unmanaged(self._managed):
            found[one.why] = found.get(one.why, 0) + one.tensor.untyped_storage().nbytes()
        if grown_bytes := self._steps.growth.of(kind):
            found["state of the optimizer that has come since its step was traced"] = grown_bytes
        return found

    def run(self) -> Run:
        """Returns what the last planned step was and did.

        Raises:
            StateError: no step has run under a plan yet.
        """
        for kind in self.kinds():
            if kind.planned is not None and kind.planned.plan.moves_nothing:
                trace, plan, timeline = kind.planned.trace, kind.planned.plan, Timeline((), (), ())
            elif kind.ran is not None:
                trace, plan, timeline = kind.ran.trace, kind.ran.plan, kind.ran.timeline
            else:
                continue
            explanation = self._explain(kind, trace, plan, detail=True)
            machine = self._plans.machine_of(trace)
            return Run(
                trace,
                plan,
                timeline,
                self._managed.settings.config_toml,
                tuple(self._steps.readings.history),
                machine,
                explanation,
                collectives=collectives_here(),
            )
        raise StateError("no step has run under a plan yet; the first planned step is the third: run more steps")
