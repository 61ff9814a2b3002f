"""What is ordered of a planner, and how an order is carried out, wherever that is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tieroff.core.machine import Machine
from tieroff.core.plan import Capabilities, Plan
from tieroff.core.seams import Made
from tieroff.core.tensor import Tier
from tieroff.core.trace import Trace
from tieroff.errors import InfeasiblePlanError
from tieroff.planner.layers import choose_modules
from tieroff.planner.make_plan import make_plan
from tieroff.planner.predict import forecast


@dataclass(frozen=True, slots=True)
class Order:
    """One step to plan.

    Attributes:
        traces: of the step, the one that is wanted most first; the first that fits is planned.
        machine, budget, policy, effort, capabilities: as for `make_plan`.
        recompute: layers that run again, as they were chosen before.
        chooses_layers: they are chosen now.
    """

    traces: tuple[Trace, ...]
    machine: Machine
    budget: dict[Tier, int]
    policy: str
    effort: str
    capabilities: Capabilities
    recompute: tuple[str, ...] = ()
    chooses_layers: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """How long a plan takes now, and how long any plan takes at least."""

    plan: Plan
    trace: Trace
    machine: Machine


def carry_out(order: Order) -> Made:
    """Returns the plan of the first trace that fits, and its forecast.

    Raises:
        InfeasiblePlanError: none fits; it is of the last one.
        ConfigError, CaptureError, InvalidPlanError: as `make_plan` does.
    """
    *preferred, last = range(len(order.traces))
    for index in preferred:
        try:
            return _plan(order, index)
        except InfeasiblePlanError:
            continue  # less than the whole budget was left, or the policy has other uses for it
    return _plan(order, last)


def _plan(order: Order, index: int) -> Made:
    trace, recompute = order.traces[index], order.recompute

    def make(trace: Trace, effort: str = "fast") -> Plan:
        return make_plan(trace, order.machine, order.budget, order.policy, effort, order.capabilities)

    plan = make(trace, order.effort)
    if order.chooses_layers:
        recompute = choose_modules(trace, plan, make)
    plan = replace(plan, recompute=recompute)
    return Made(index, plan, forecast(plan, trace, order.machine))


def answer(question: Question) -> tuple[int, int]:
    """Returns the step time under the plan and the lower bound, in ns; see `forecast`."""
    return forecast(question.plan, question.trace, question.machine)
