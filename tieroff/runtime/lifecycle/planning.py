"""When a kind of step is planned, and when it is planned again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from tieroff.core.plan import Plan
from tieroff.core.seams import PlanSource
from tieroff.core.trace import Trace
from tieroff.errors import InfeasiblePlanError, StoreError
from tieroff.runtime.custody import Custody
from tieroff.runtime.execution.clock import StepTimes
from tieroff.runtime.hooks.recompute.recomputation import Recomputation
from tieroff.runtime.step.feedback import Span
from tieroff.runtime.step.kinds import Planned, Recording, StepKind
from tieroff.runtime.step.recorded import Recorded
from tieroff.units import NS_PER_S, format_seconds

log = logging.getLogger("tieroff")


@dataclass(frozen=True, slots=True)
class Observed:
    """A step that followed its plan to the end; what it took is read when it is looked at.

    Attributes:
        step_s: gives how long it took.
    """

    kind: StepKind
    stage: Planned
    times: StepTimes
    spans: list[Span]
    step_s: Callable[[], float]


class StepPlanning:
    """Plans kinds of steps after their measured step, and again when planned steps show that a plan no longer fits."""

    def __init__(self, custody: Custody, plans: PlanSource, recomputation: Recomputation) -> None:
        self._custody, self._plans, self._recomputation = custody, plans, recomputation

    def plan(self, kind: StepKind, recorded: Recorded) -> None:
        """Plans a kind whose measured step has just ended.

        Raises:
            InfeasiblePlanError: some op does not fit.
            StoreError: a drive is full.
        """
        trace = recorded.trace.with_durations(self._custody.executor.clock.times.durations_ns())
        self._custody.backend.keep_freed(0)  # planning takes memory too
        wanted = self._plans.bring_back(trace, recorded.update_at - 1, recorded.used_below)
        try:
            plan = self._plans.plan(wanted, kind.feedback.rates)
        except InfeasiblePlanError:
            if wanted is trace:
                raise
            wanted = trace  # less than the whole budget was left, or the policy has other uses for it
            plan = self._plans.plan(wanted, kind.feedback.rates)
        if self._recomputation.begin(plan.recompute):
            kind.advance(Recording())
            return
        self._reserve(plan)
        self._adopt(kind, recorded, wanted, plan)

    def compare(self, observed: Observed) -> None:
        """Plans again when a step that followed its plan shows that the plan was made for other durations or links.

        The measured step runs with everything moved out, its caches cold; planned ones are nearer to the truth. Later the
        machine itself may change.
        """
        kind, stage, feedback = observed.kind, observed.stage, observed.kind.feedback
        if stage is not kind.stage or not feedback.take(observed.times.durations_ns(), observed.spans):
            return
        reason = feedback.look(stage.made_for, self._plans.machine_at)
        trace = stage.trace.with_durations(feedback.typical_ns)
        forecast = self._plans.forecast(stage.plan, trace, feedback.rates_now())
        if reason and not (forecast and feedback.holds(*forecast)):
            self._plan_again(kind, stage, trace, reason)
            return
        if forecast:  # the same plan, with what is known by now
            stage = stage.predicted(trace, forecast[0])
            kind.advance(stage)
        if feedback.settle():
            predicted, took = format_seconds(stage.plan.step_ns / NS_PER_S), format_seconds(observed.step_s())
            log.info("the plan holds after %d planned steps: %s a step, %s predicted", feedback.settled_after, took, predicted)

    def _plan_again(self, kind: StepKind, stage: Planned, trace: Trace, reason: str) -> None:
        self._custody.backend.keep_freed(0)  # planning takes memory too
        try:
            plan = self._plans.plan(trace, kind.feedback.plan_again())
            self._reserve(plan)
        except (InfeasiblePlanError, StoreError) as error:
            # The process, or the drive, has less room than when the plan was made, which still runs.
            log.warning("%s, but the step could not be planned again, and keeps its plan: %s", reason, error)
            return
        if plan is stage.plan:
            return  # it was given, and stays
        if self._recomputation.begin(plan.recompute):
            kind.advance(Recording())
            return
        log.info("%s: the step was planned again", reason)
        self._adopt(kind, stage.recorded, trace, plan)

    def _adopt(self, kind: StepKind, recorded: Recorded, trace: Trace, plan: Plan) -> None:
        forecast = self._plans.forecast(plan, trace, kind.feedback.rates)
        kind.feedback.slack = forecast[0] / forecast[1] if forecast and forecast[1] else 0.0
        kind.adopt(recorded, trace, plan)

    def _reserve(self, plan: Plan) -> None:
        for store in self._custody.stores.values():
            store.reserve(plan.peak_bytes.get(store.tier, 0))  # a full drive is known now, not in mid-run
