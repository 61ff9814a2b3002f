"""When a kind of step is planned, and when it is planned again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from tieroff.core.buckets import bytes_below
from tieroff.core.explain.describe import ready
from tieroff.core.plan import Plan
from tieroff.core.seams import Fit, Made, PlanSource
from tieroff.core.tensor import Tier
from tieroff.core.trace import Trace
from tieroff.errors import InfeasiblePlanError, StoreError
from tieroff.runtime.execution.clock import StepTimes
from tieroff.runtime.hooks.recompute.recomputation import Recomputation
from tieroff.runtime.lifecycle.unmanaged import MemoryApart
from tieroff.runtime.managed.model import ManagedModel
from tieroff.runtime.step.feedback import Span
from tieroff.runtime.step.kinds import Asked, Planned, Recording, StepKind, Unplanned
from tieroff.runtime.step.likeness import is_like
from tieroff.runtime.step.recorded import Recorded
from tieroff.units import NS_PER_S, format_bytes, format_seconds

log = logging.getLogger("tieroff")
news = logging.getLogger("tieroff.news")  # the little that a terminal shows

# Steps in a row above the budget, of tensors that the plan knows, after which it is left; how many others are named.
_OVERS_AT_MOST, _NAMED = 3, 3
_DIVIDED = "the device budget is divided otherwise among the models now"


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
    """Plans kinds of steps after their measured step, and again when planned steps show that a plan no longer fits.

    Args:
        steps_done: gives the number of the last step that is over.
    """

    def __init__(
        self, managed: ManagedModel, plans: PlanSource, recomputation: Recomputation, steps_done: Callable[[], int]
    ) -> None:
        self._managed, self._plans, self._recomputation = managed, plans, recomputation
        self._steps_done = steps_done
        self._has_told_over = False
        self.apart = MemoryApart(managed)

    def plan(self, kind: StepKind, recorded: Recorded) -> None:
        """Asks for a plan of a kind whose measured step has just ended; `look` adopts it.

        Raises:
            InfeasiblePlanError: some op does not fit.
            StoreError: a drive is full.
        """
        if kind.asked is not None or (recorded.is_updated and self._awaits_updates()):
            return
        trace = recorded.trace.with_durations(self._measured_ns(recorded))
        self._managed.backend.keep_freed(0)  # planning takes memory too
        wanted = self._plans.bring_back(trace, recorded.update_at - 1, recorded.used_below)
        traces = (wanted,) if wanted is trace else (wanted, trace)
        pending = self._plans.plan(traces, kind.feedback.rates, updates_on_host=self._may_update_on_host)

        def take() -> None:
            made = pending.take()
            if self._recomputation.begin(made.plan.recompute):
                kind.advance(Recording())
                return
            self._reserve(made.plan, recorded.trace)
            self._adopt(kind, recorded, traces[made.index], made)
            self._tell(traces[made.index], made.plan)

        kind.asked = Asked(pending, take)
        self.look(kind)

    def _awaits_updates(self) -> bool:
        """True while the next updates tell whether a plan may have the CPU make them: the measured step runs once more."""
        stepper = self._managed.stepper
        return stepper is not None and stepper.host.evidence.is_awaited

    @property
    def _may_update_on_host(self) -> bool:
        stepper = self._managed.stepper
        return stepper is not None and stepper.host.evidence.is_proven

    def _measured_ns(self, recorded: Recorded) -> list[int]:
        """Returns the durations of the ops in the step that has just ended; of one with other ops, equal parts of it."""
        executor, count = self._managed.executor, len(recorded.keys)
        durations = executor.clock.times.durations_ns()
        return durations if is_like(executor.state.record.keys, recorded.keys) else [sum(durations) // count] * count

    def _tell(self, trace: Trace, plan: Plan) -> None:
        asked = self._managed.settings.device_budget
        written = asked.written() if asked is not None else ""
        got_bytes = plan.budget_bytes.get(Tier.DEVICE, 0)
        raised_from = asked.raised_from(trace.peak_bytes, got_bytes) if asked is not None else ""
        news.info("%s", ready(trace, plan, self._steps_done(), written if isinstance(written, str) else "", raised_from))

    def look(self, kind: StepKind) -> None:
        """Does what follows from what was asked about a kind, once the answer is due.

        Raises:
            InfeasiblePlanError, StoreError: as `plan` does.
        """
        asked = kind.asked
        if asked is not None and asked.pending.is_due:
            kind.asked = None
            asked.take()

    def compare(self, observed: Observed) -> None:
        """Asks for another plan when a step that followed its plan shows that it was made for other durations or links.

        The measured step runs with everything moved out, its caches cold; planned ones are nearer to the truth. Later the
        machine itself may change.
        """
        kind, stage, feedback = observed.kind, observed.stage, observed.kind.feedback
        if stage is not kind.stage or kind.asked is not None or feedback.passes(is_whole=observed.times.is_whole):
            return
        if not feedback.take(_durations_ns(observed), observed.spans):
            return
        reason = feedback.look(stage.made_for, self._plans.machine_at)
        if not reason and feedback.settled_after:
            feedback.settle()  # nothing drifted: no forecast, for which the whole trace is written to another process
            return
        trace = stage.trace.with_durations(feedback.typical_for(stage.trace))
        pending = self._plans.forecast(stage.plan, trace, feedback.rates_now())

        def take() -> None:
            self._judge(observed, reason, trace, pending.take())

        kind.asked = Asked(pending, take)
        self.look(kind)

    def _judge(self, observed: Observed, reason: str, trace: Trace, forecast: tuple[int, int] | None) -> None:
        kind, stage, feedback = observed.kind, observed.stage, observed.kind.feedback
        if reason and not (forecast and feedback.holds(*forecast)):
            self._plan_again(kind, stage, trace, reason)
            return
        if forecast:  # the same plan, with what is known by now
            stage = stage.predicted(trace, forecast[0])
            kind.advance(stage)
        if feedback.settle():
            predicted, took = format_seconds(stage.plan.step_ns / NS_PER_S), format_seconds(observed.step_s())
            log.info("the plan holds after %d planned steps: %s a step, %s predicted", feedback.settled_after, took, predicted)

    def check_peak(self, kind: StepKind, stage: Planned, *, is_followed: bool) -> None:
        """A step has followed its plan, to the end or not: of one that took more than the budget, it is said once.

        Steps of its kind leave the plan, as they do where the program has more of the device than its plan knows.
        """
        peak_bytes, budget_bytes = self._managed.executor.runner.peak_bytes, stage.plan.budget_bytes.get(Tier.DEVICE, 0)
        if peak_bytes <= budget_bytes or stage.plan.moves_nothing:
            kind.overs = 0
            if stage.plan.moves_nothing or self._is_given or kind.stage is not stage:
                return
            if (is_followed and self.apart.had_more(kind, stage)) or self.apart.has_grown(kind, stage):
                kind.advance(Recording())
            return
        kind.overs += 1
        strangers = self._managed.executor.runner.strangers(self._managed.executor.homes)
        # Where the plan knows all that there is, a copy was late, which says nothing of the next step.
        if kind.stage is not stage or (not strangers and (kind.overs < _OVERS_AT_MOST or kind.was_over)):
            return
        named = ", ".join(f"{item.name} ({format_bytes(item.size_bytes)})" for item in strangers[:_NAMED])
        if not self._has_told_over:
            self._has_told_over = True
            log.warning(
                "a planned step took %s of the device, %s above its budget of %s%s; steps of this kind are traced and planned "
                "again. A budget that has so much left for them would hold it",
                format_bytes(peak_bytes),
                format_bytes(peak_bytes - budget_bytes),
                format_bytes(budget_bytes),
                f": its plan does not know {named}, or of another size" if named else "",
            )
        kind.overs, kind.was_over = 0, not strangers
        if not self._is_given:  # else it stays
            kind.advance(Recording())

    def fit(self, kind: StepKind) -> None:
        """Plans again when a step is about to begin whose plan does not suit the device budget any more.

        A step waits for its plan where the one that it has needs more than there is now; where no plan needs less, it runs on
        demand, as all of its kind after it do. A plan that could use more room is followed until there is another.
        """
        stage = kind.stage
        fit = self._plans.fit(stage.plan if isinstance(stage, Planned) else None)
        if isinstance(stage, Planned) and fit is Fit.SUITS and self._is_refused(kind, stage.plan):
            self._plan_again(kind, stage, stage.trace, "the CPU updates no parameters any more")
        if not isinstance(stage, Planned) or fit is Fit.SUITS:
            return
        if fit is Fit.ABOVE:
            self._bring_within(kind)
        elif kind.asked is None:
            self._plan_again(kind, stage, stage.trace, _DIVIDED)
        if kind.stage is not stage:
            self._plans.fit(kind.stage.plan if isinstance(kind.stage, Planned) else None)

    def _is_refused(self, kind: StepKind, plan: Plan) -> bool:
        """True for a plan of ours, with no other asked for yet, that has the CPU update what it may update no more."""
        return bool(plan.host_updates) and kind.asked is None and not (self._may_update_on_host or self._is_given)

    @property
    def _is_given(self) -> bool:
        return self._plans.machine_at({}) is None

    def may_follow(self, kind: StepKind) -> bool:
        """Returns whether a step may follow the plan of a kind, which needs no more than there is now."""
        return isinstance(kind.stage, Planned) and self._plans.fit(kind.stage.plan) is not Fit.ABOVE

    def _bring_within(self, kind: StepKind) -> None:
        self._wait(kind)  # for a forecast, or for a plan that was asked for when the part was another
        stage = kind.stage
        if not isinstance(stage, Planned) or self._plans.fit(stage.plan) is not Fit.ABOVE:
            return
        self._plan_again(kind, stage, stage.trace, _DIVIDED)
        self._wait(kind)
        now = kind.stage
        if now is stage or (isinstance(now, Planned) and self._plans.fit(now.plan) is Fit.ABOVE):
            log.warning("no plan of this step fits in its part of the budget now: these steps run with transfers on demand")
            kind.advance(Unplanned())
            kind.retraces = max(kind.retraces, 1)  # such a kind is not tried again when it comes back

    def _wait(self, kind: StepKind) -> None:
        while kind.asked is not None:
            asked, kind.asked = kind.asked, None
            asked.take()

    def _plan_again(self, kind: StepKind, stage: Planned, trace: Trace, reason: str) -> None:
        self._managed.backend.keep_freed(0)  # planning takes memory too
        feedback = kind.feedback
        pending = self._plans.plan((trace,), feedback.plan_again(), updates_on_host=self._may_update_on_host)

        def take() -> None:
            try:
                made = pending.take()
                self._reserve(made.plan, stage.recorded.trace)
            except (InfeasiblePlanError, StoreError) as error:
                # The process, or the drive, has less room than when the plan was made, which still runs.
                log.warning("%s, but the step could not be planned again, and keeps its plan: %s", reason, error)
                return
            if made.plan is stage.plan:
                return  # it was given, and stays
            if self._recomputation.begin(made.plan.recompute):
                kind.advance(Recording())
                return
            feedback.replanned_since = reason
            log.info("%s: the step was planned again", reason)
            self._adopt(kind, stage.recorded, trace, made)

        kind.asked = Asked(pending, take)
        self.look(kind)

    def _adopt(self, kind: StepKind, recorded: Recorded, trace: Trace, made: Made) -> None:
        kind.feedback.slack = made.forecast[0] / made.forecast[1] if made.forecast and made.forecast[1] else 0.0
        kind.adopt(recorded, trace, made.plan)
        self._managed.backend.return_freed()  # holes that steps without a plan left in the heap, or planning

    def _reserve(self, plan: Plan, trace: Trace) -> None:
        sliced = bytes_below(trace.meta)
        for store in self._managed.stores.values():
            # A full drive is known now, not in mid-run.
            store.reserve(plan.peak_bytes.get(store.tier, 0) + sliced.get(store.tier, 0))


def _durations_ns(observed: Observed) -> list[int]:
    """Returns what each op took; of what the CPU updated, what the device takes where it does, as far as that is known."""
    durations = observed.times.durations_ns()
    for update in observed.stage.plan.host_updates:
        durations[update.op] = observed.stage.trace.ops[update.op].duration_ns
    return durations
