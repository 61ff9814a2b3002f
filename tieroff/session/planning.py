"""Planning: the planner behind the runtime's `PlanSource`, with the budgets, machine and ranks of this process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch

from tieroff.config import Config
from tieroff.core.machine import Machine
from tieroff.core.plan import Capabilities, Plan
from tieroff.core.tensor import Tier
from tieroff.core.trace import Trace
from tieroff.errors import InfeasiblePlanError
from tieroff.planner.compare.predict import forecast
from tieroff.planner.layers import choose_modules
from tieroff.planner.make_plan import make_plan
from tieroff.planner.problem.problem import make_problem
from tieroff.planner.user_code import bring_back
from tieroff.session.budgets import Budgets
from tieroff.session.links import Links
from tieroff.session.rank_budget import RankBudget
from tieroff.session.ranks import Need, Ranks
from tieroff.tracing.recorder import StepRecorder

log = logging.getLogger("tieroff")


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
        self._needed_bytes = 0  # the largest need of any op of the steps that were asked about
        self._machines: dict[str, Machine] = {}  # digest of a trace -> the machine it was last planned for
        self._recomputed: tuple[str, ...] | None = None  # chosen once, for all kinds of steps

    def recorder(self) -> StepRecorder:
        self._rank_budget.enter()
        return StepRecorder(self._device, self._publish)

    def _publish(self, trace: Trace | None) -> None:
        """Publishes the needs of the first traced step to the other ranks; None: the step cannot be traced."""
        if not self._rank_budget.is_due:
            return
        if trace is None:
            self._rank_budget.leave()
            return
        budget = self._budgets.of(trace)
        self._rank_budget.publish(trace, budget[Tier.DEVICE], self._floor_bytes(trace, budget))

    def plan(self, trace: Trace, rates: dict[str, float]) -> Plan:
        budget, wanted = self._budgets.of(trace), self._config.budget.device
        is_share = wanted is not None and wanted.share is not None
        agreed = self._rank_budget.settle(trace, budget[Tier.DEVICE], is_share=is_share)
        budget[Tier.DEVICE] = agreed.budget_bytes
        machine = self._machines[trace.digest] = self._links.at(rates)
        policy, effort = self._planning.policy, self._planning.effort
        log.info("planning %d ops and %d tensors (%s, %s)", len(trace.ops), len(trace.tensors), policy, effort)

        def make(trace: Trace, effort: str = "fast") -> Plan:
            return make_plan(trace, machine, budget, policy, effort, self._capabilities)

        try:
            plan = make(trace, effort)
            if self._recomputed is None and self._planning.recompute and layers_to_recompute(self._config, self._ranks):
                self._recomputed = choose_modules(trace, plan, make)
                self._budgets.layers_chosen(budget[Tier.DEVICE])
            return replace(plan, recompute=self._recomputed or ())
        except InfeasiblePlanError as error:
            if agreed.rank == self._ranks.rank:
                raise
            raise _of_another_rank(error, agreed) from None

    def bring_back(self, trace: Trace, op: int, used: Mapping[int, bool]) -> Trace:
        if not may_bring_back(self._config, self._ranks):
            return trace
        return bring_back(trace, op, used, self._budgets.of(trace)[Tier.DEVICE], self._planning.min_bytes)

    def forecast(self, plan: Plan, trace: Trace, rates: dict[str, float]) -> tuple[int, int] | None:
        machine = self._machines[trace.digest] = self._links.at(rates)
        return forecast(plan, trace, machine)

    def spare_bytes(self, trace: Trace) -> int:
        budget = self._budgets.of(trace)
        used = {tensor for op in trace.ops for tensor in (*op.reads, *op.writes)}
        # No op uses these. They are below while nothing is planned; a plan, which moves only what is idle, keeps them up.
        unused = (tensor for i, tensor in enumerate(trace.tensors) if i not in used)
        movable = (t for t in unused if t.is_persistent and t.is_movable and t.size_bytes >= self._planning.min_bytes)
        needed_bytes = self._floor_bytes(trace, budget) - sum(tensor.size_bytes for tensor in movable)
        self._needed_bytes = max(self._needed_bytes, needed_bytes)
        return max(budget[Tier.DEVICE] - self._needed_bytes, 0)

    def machine_at(self, rates: dict[str, float]) -> Machine | None:
        return self._links.at(rates)

    def machine_of(self, trace: Trace) -> Machine | None:
        return self._machines.get(trace.digest)

    def _floor_bytes(self, trace: Trace, budget: dict[Tier, int]) -> int:
        """Returns the device bytes of the op that needs most, with everything else moved out that can be."""
        return int(make_problem(trace, self._links.machine, budget, self._capabilities).base.max())


def layers_to_recompute(config: Config, ranks: Ranks) -> tuple[str, ...]:
    """Returns names or patterns of the layers that may run again in backward.

    Several ranks would choose different ones, and then wait for each other in collectives.
    """
    may_run = config.plan.policy == "auto" and ranks.world == 1
    return config.plan.recompute_layers if may_run else ()


def may_bring_back(config: Config, ranks: Ranks) -> bool:
    """True where what user code reads may be planned on the device: published policies plan the step as it was recorded.

    So does each of several ranks, which cannot say how much of the agreed budget is left.
    """
    return config.plan.policy == "auto" and ranks.world == 1


def _of_another_rank(error: InfeasiblePlanError, agreed: Need) -> InfeasiblePlanError:
    text = f"{error}. All ranks plan with the least budget of any, which is that of rank {agreed.rank}"
    return InfeasiblePlanError(text, op=error.op, needed_bytes=error.needed_bytes, available_bytes=error.available_bytes)
