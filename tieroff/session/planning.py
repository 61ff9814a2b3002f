"""Planning: the planner behind the runtime's `PlanSource`, with the budgets, machine and ranks of this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from tieroff.config import Config
from tieroff.core.buckets import UPDATED_ON_HOST
from tieroff.core.machine import Machine
from tieroff.core.plan import Capabilities, Plan
from tieroff.core.seams import Fit, Made, Pending
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.trace import Trace
from tieroff.device_budget import DeviceBudget
from tieroff.errors import InfeasiblePlanError
from tieroff.planner.beside.work import Order, Question
from tieroff.planner.least import Least, infeasible, least
from tieroff.planner.problem.problem import Problem, make_problem
from tieroff.planner.user_code import bring_back, with_call, with_room
from tieroff.session.budget_messages import BudgetMessages
from tieroff.session.budgets import WORTH_SAVING, Budgets
from tieroff.session.links import Links
from tieroff.session.rank_budget import RankBudget
from tieroff.session.ranks import Need, Ranks
from tieroff.session.workshop import Workshop
from tieroff.storage.limits import host_limit
from tieroff.tracing.recorder import StepRecorder
from tieroff.tracing.recording.apart import Apart
from tieroff.units import format_bytes

log = logging.getLogger("tieroff")

# How often a budget is raised for one plan: a policy may need more than it said, given more.
_RAISES_AT_MOST = 4


_UNKNOWN_UPDATES = (
    "the file of [plan] machine does not say how fast the CPU would, which is often faster; `tieroff probe --out machine.toml` "
    "writes one that does"
)


class Planning:
    """Makes plans with the planner. Implements `core.seams.PlanSource`.

    Args:
        config: policy, effort and what may move.
        device: what the recorder watches.
        budgets: the bytes of each tier.
        links: the machine.
        ranks: which process of a launch this is.
        capabilities: what the runtime can execute.
    """

    def __init__(
        self, config: Config, device: torch.device, budgets: Budgets, links: Links, ranks: Ranks, capabilities: Capabilities
    ) -> None:
        self._config, self._planning, self._device = config, config.plan, device
        self._budgets, self._links, self._ranks, self._capabilities = budgets, links, ranks, capabilities
        self._rank_budget = RankBudget(ranks.rank)
        self._workshop = Workshop(is_beside=_may_plan_beside(config), waits=ranks.world > 1)
        self._needed_bytes = 0  # the largest need of any op of the steps that were asked about
        self._machines: dict[str, Machine] = {}  # digest of a trace -> the machine it was last planned for
        self._recomputed: tuple[str, ...] | None = None  # chosen once, for all kinds of steps
        self._messages = BudgetMessages(
            config.budget.device, ranks.rank, budgets.part.budget if budgets.part is not None else None
        )
        self._leasts: dict[str, Least] = {}  # by digest of a trace

    def recorder(self) -> StepRecorder:
        self._rank_budget.enter()
        self._workshop.waits |= self._rank_budget.is_shared
        self._workshop.open()
        recorder = StepRecorder(self._device, self._publish, Apart(self._device, self._budgets.elsewhere_bytes))
        if self._budgets.part is not None:
            self._budgets.part.begin_recording(recorder)
        return recorder

    def _publish(self, trace: Trace | None) -> None:
        """Says what a traced step needs: the first one's to the other ranks, where there are any.

        Args:
            trace: of the step; None: it cannot be traced.

        Raises:
            InfeasiblePlanError: the budget is strict and below what this step needs, and there are no other ranks.
        """
        if self._rank_budget.is_due:
            if trace is None:
                self._rank_budget.leave()
            else:
                budget = self._budget_of(trace)
                self._rank_budget.publish(trace, budget[Tier.DEVICE], self._least(trace).floor_bytes)
        elif trace is not None and self._rank_budget.is_alone and self._wanted is not None:
            self._check(trace, self._budget_of(trace)[Tier.DEVICE], self._budgets.limit_bytes(trace), is_traced=True)

    @property
    def _wanted(self) -> DeviceBudget | None:
        return self._config.budget.device

    def _budget_of(self, trace: Trace) -> dict[Tier, int]:
        budget = self._budgets.of(trace, lambda: self._least(trace))
        if self._budgets.is_lowered:
            self._messages.lowered(self._budgets.limit_bytes(trace), budget[Tier.DEVICE], host_limit().limiter)
        return budget

    def _least(self, trace: Trace) -> Least:
        """Returns the least of the device that a step runs in."""
        if trace.digest not in self._leasts:
            self._leasts[trace.digest] = least(self._problem(trace, 0))
        return self._leasts[trace.digest]

    def _problem(self, trace: Trace, device_bytes: int) -> Problem:
        budget = {Tier.DEVICE: device_bytes, **self._budgets.lower_of(trace)}
        return make_problem(trace, self._links.unmeasured, budget, self._capabilities)

    def _check(self, trace: Trace, device_bytes: int, limit: int, *, is_traced: bool = False) -> None:
        """Says that a step gets more than was asked for, if it does.

        Args:
            trace: of the step.
            device_bytes, limit: what it gets, and what was asked for.
            is_traced: the step was traced just now, so of several models of a budget others have not shown theirs.

        Raises:
            InfeasiblePlanError: it does not, and needs more.
        """
        if device_bytes <= limit < self._least(trace).floor_bytes:
            raise infeasible(self._problem(trace, limit), self._planning.policy, limit)
        if self._saves_too_little(trace):
            saved_bytes = device_bytes - max(limit, self._least(trace).floor_bytes)
            self._messages.kept_whole(saved_bytes, device_bytes, WORTH_SAVING * self._planning.min_bytes)
            return
        if not is_traced or self._budgets.part is None:
            policy = self._planning.policy
            self._messages.raised(limit, device_bytes, lambda: infeasible(self._problem(trace, limit), policy, limit))

    def plan(self, traces: Sequence[Trace], rates: dict[str, float], *, updates_on_host: bool = False) -> Pending[Made]:
        last = traces[-1]
        budget = self._budget_of(last)
        is_of_kind = self._wanted is not None and self._wanted.size_bytes is None
        agreed = self._rank_budget.settle(last, budget[Tier.DEVICE], is_of_kind=is_of_kind, may_raise=self._budgets.may_raise)
        budget[Tier.DEVICE] = agreed.budget_bytes
        is_first = last.digest not in self._machines
        is_trivial = not self.can_move(last)
        if is_trivial:
            self._workshop.close()  # until there is a question for it
        machine = self._links.unmeasured if is_trivial else self._machine_for(traces, rates)
        policy, effort = self._planning.policy, self._planning.effort
        log.info("planning %d ops and %d tensors (%s, %s)", len(last.ops), len(last.tensors), policy, effort)
        may_rerun = self._planning.recompute and bool(layers_to_recompute(self._config, self._ranks))
        order = Order(
            traces=tuple(traces),
            machine=machine,
            budget=budget,
            policy=policy,
            effort=effort,
            capabilities=replace(self._capabilities, updates_on_host=updates_on_host, updates_cross=updates_on_host),
            recompute=self._recomputed or (),
            chooses_layers=self._recomputed is None and may_rerun,
        )

        asked, part = self._budgets.limit_bytes(last) if self._wanted is not None else 0, self._budgets.part

        def finish(take: Callable[[], Made]) -> Made:
            try:
                made = self._within(order, agreed, asked, take)
            except InfeasiblePlanError as error:
                if part is not None:
                    part.failed(last.digest, asked)
                if agreed.rank == self._ranks.rank:
                    raise
                raise _of_another_rank(error, agreed) from None
            if part is not None:
                part.take(made.plan, asked)
            if order.chooses_layers and self._recomputed is None:
                self._recomputed = made.plan.recompute
                self._budgets.layers_chosen(budget[Tier.DEVICE])
            return made

        return self._workshop.ask(order, finish, is_first=is_first, is_trivial=is_trivial)

    def can_move(self, trace: Trace) -> bool:
        if layers_to_recompute(self._config, self._ranks) or self._ranks.world > 1 or self._rank_budget.is_shared:
            return True
        return bool(self._problem(trace, 0).units) and not self._saves_too_little(trace)

    def lacks_for_updates(self, trace: Trace) -> str | None:
        is_asked = self._capabilities.updates_on_host and UPDATED_ON_HOST in trace.meta and self._planning.policy == "auto"
        least_bytes = max(self._planning.min_bytes, 1)
        has_state = any(one.kind is TensorClass.OPTIMIZER and one.size_bytes >= least_bytes for one in trace.tensors)
        if not (is_asked and has_state) or not self.can_move(trace) or self._budget_of(trace)[Tier.DEVICE] >= trace.peak_bytes:
            return None
        return "" if self._links.knows_updates(self._budgets.host_bytes) else _UNKNOWN_UPDATES

    def _saves_too_little(self, trace: Trace) -> bool:
        return self._budgets.saves_too_little(trace, lambda: self._least(trace))

    def _machine_for(self, traces: Sequence[Trace], rates: dict[str, float]) -> Machine:
        machine = self._links.at(rates)
        self._machines.update((trace.digest, machine) for trace in traces)
        return machine

    def _within(self, order: Order, agreed: Need, asked: int, take: Callable[[], Made]) -> Made:
        """Returns the plan that was ordered; while it needs more of the device than it may have, the budget is raised.

        Args:
            order: for the planner.
            agreed: the budget of all ranks.
            asked: the device bytes that were asked for as it was ordered; a part of a shared budget changes meanwhile.
            take: returns the plan.

        A budget is raised to the least of its step before the order. Only where the lower tiers have no room for all that
        would have to move it is raised here again, and the step waits for the plan.
        """
        trace, budget = order.traces[-1], order.budget
        need: InfeasiblePlanError | None = None
        limit = asked if agreed.rank == self._ranks.rank else agreed.budget_bytes
        for _ in range(_RAISES_AT_MOST):
            try:
                made = take()
                break
            except InfeasiblePlanError as error:
                raised = self._budgets.raised(error.needed_bytes, limit)
                if raised is None or raised <= budget[Tier.DEVICE]:
                    raise
                budget[Tier.DEVICE], need = raised, error
                take = self._workshop.ask(order, lambda again: again()).take
        else:
            made = take()
        if agreed.rank != self._ranks.rank and need is None:
            why = f"rank {agreed.rank} needs {format_bytes(agreed.floor_bytes)}, and all ranks plan with the same budget"
            need = InfeasiblePlanError(why, why=why)
        if self._wanted is not None and need is not None:
            told = need  # the name of an error that was caught ends with its block
            self._messages.raised(asked, budget[Tier.DEVICE], lambda: told)
        elif self._wanted is not None:
            self._check(trace, budget[Tier.DEVICE], asked)
        return made

    def bring_back(self, trace: Trace, op: int, used: Mapping[int, bool]) -> Trace:
        if not may_bring_back(self._config, self._ranks):
            return trace
        budget_bytes = self._budget_of(trace)[Tier.DEVICE]
        return self._with_call(bring_back(trace, op, used, budget_bytes, self._planning.min_bytes), budget_bytes)

    def _with_call(self, trace: Trace, budget_bytes: int) -> Trace:
        """Returns the trace with what its largest call of user code needs; see [Note: the largest call]."""
        needed_bytes = int(self._problem(trace, 0).base.max(initial=0))
        exact = with_call(trace, needed_bytes)
        if exact is trace or int(self._problem(exact, 0).base.max(initial=0)) <= budget_bytes:
            return exact
        return with_room(trace, needed_bytes, self._planning.min_bytes)

    def fit(self, plan: Plan | None) -> Fit:
        return Fit.SUITS if self._budgets.part is None else self._budgets.part.fit(plan)

    def forecast(self, plan: Plan, trace: Trace, rates: dict[str, float]) -> Pending[tuple[int, int]]:
        return self._workshop.ask(Question(plan, trace, self._machine_for((trace,), rates)))

    def close(self) -> None:
        self._workshop.close()

    def leaves_room(self, size_bytes: int) -> bool:
        return self._budgets.leaves_room(size_bytes)

    def spare_bytes(self, trace: Trace) -> int:
        budget = self._budget_of(trace)
        if self._budgets.part is not None:
            return 0  # what is spare of a shared budget is the other models'
        # Nothing uses or holds these. They are below while nothing is planned; a plan moves what is idle, and keeps them up.
        unused = (trace.tensors[life.tensor] for life in trace.lifetimes if not life.required)
        movable = (t for t in unused if t.is_persistent and t.is_movable and t.size_bytes >= self._planning.min_bytes)
        needed_bytes = self._least(trace).floor_bytes - sum(tensor.size_bytes for tensor in movable)
        self._needed_bytes = max(self._needed_bytes, needed_bytes)
        return max(budget[Tier.DEVICE] - self._needed_bytes, 0)

    def machine_at(self, rates: dict[str, float]) -> Machine | None:
        return self._links.at(rates)

    def machine_of(self, trace: Trace) -> Machine | None:
        return self._machines.get(trace.digest)


def layers_to_recompute(config: Config, ranks: Ranks) -> tuple[str, ...]:
    """Returns names or patterns of the layers that may run again in backward.

    Several ranks would choose different ones, and then wait for each other in collectives.
    """
    may_run = config.plan.policy == "auto" and ranks.world == 1
    return config.plan.recompute_layers if may_run else ()


def _may_plan_beside(config: Config) -> bool:
    """True where a process of its own may plan; a policy of the user's runs where the user's other code does."""
    return config.plan.background and ":" not in config.plan.policy


def may_bring_back(config: Config, ranks: Ranks) -> bool:
    """True where what user code reads may be planned on the device: published policies plan the step as it was recorded.

    So does each of several ranks, which cannot say how much of the agreed budget is left.
    """
    return config.plan.policy == "auto" and ranks.world == 1


def _of_another_rank(error: InfeasiblePlanError, agreed: Need) -> InfeasiblePlanError:
    text = f"{error}. All ranks plan with the least budget of any, which is that of rank {agreed.rank}"
    return InfeasiblePlanError(text, op=error.op, needed_bytes=error.needed_bytes, available_bytes=error.available_bytes)
