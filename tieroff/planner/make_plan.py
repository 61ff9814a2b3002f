"""`make_plan`: from a trace, a machine and a budget to a checked plan."""

from __future__ import annotations

from dataclasses import replace

from tieroff.core.buckets import UPDATED_ON_HOST
from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.machine import validate as validate_machine
from tieroff.core.plan import IDEAL_EXECUTOR, RUNTIME_EXECUTOR, Capabilities, Plan
from tieroff.core.tensor import Tier
from tieroff.core.timeline import Timeline
from tieroff.core.trace import Trace
from tieroff.core.trace import validate as validate_trace
from tieroff.errors import ConfigError
from tieroff.planner.least import infeasible
from tieroff.planner.policies import find_policy
from tieroff.planner.problem.problem import make_problem
from tieroff.planner.simulate.simulator import simulate

_EFFORTS = ("fast", "high")


def make_plan(
    trace: Trace,
    machine: Machine,
    budget: dict[Tier, int],
    policy: str = "auto",
    effort: str = "fast",
    capabilities: Capabilities | None = None,
) -> Plan:
    """Returns a plan of one policy, checked, with its predicted step time and peaks.

    Args:
        trace: the step to plan.
        machine: its links, and the bytes of tiers that `budget` does not name.
        budget: bytes per tier. 0 for a lower tier means: do not use it.
        policy: the name of one, or "module:function" for one of another package; see `find_policy`.
        effort: "fast" or "high".
        capabilities: what the executor can do; `default_capabilities` if None.

    Raises:
        CaptureError: the trace is not sound in itself.
        ConfigError: an unknown policy or effort, a machine that cannot be, or a budget for a tier that it has no links to.
        InfeasiblePlanError: an op needs more than the device's budget with everything away that can be.
    """
    return plan_with_timeline(trace, machine, budget, policy, effort, capabilities)[0]


def plan_with_timeline(
    trace: Trace,
    machine: Machine,
    budget: dict[Tier, int],
    policy: str = "auto",
    effort: str = "fast",
    capabilities: Capabilities | None = None,
) -> tuple[Plan, Timeline]:
    """Returns what `make_plan` does, and the predicted timeline."""
    if effort not in _EFFORTS:
        raise ConfigError(f'expected effort "fast" or "high", got {effort!r}')
    validate_trace(trace)
    validate_machine(machine)
    capabilities = capabilities or default_capabilities(trace)
    make = find_policy(policy)
    problem = make_problem(trace, machine.counting_moves(), budget, capabilities, effort)
    plan = make(problem)
    if plan.peak_bytes[Tier.DEVICE] > problem.device_bytes:
        raise infeasible(problem, policy, plan.peak_bytes[Tier.DEVICE])
    timeline = simulate(plan, trace, machine)
    plan = replace(plan, policy=policy, step_ns=timeline.step_ns)
    check(plan, trace, capabilities)
    return plan, timeline


def default_capabilities(trace: Trace) -> Capabilities:
    """Returns what plans of a trace may ask for when nothing is said: all that a plan can say for traces from files.

    A trace that this project's own runtime recorded, or made without running, is planned for that runtime. It has the CPU run
    ops of optimizers that it has kernels for, where that proves to be the same.
    """
    if trace.origin == "file":
        return IDEAL_EXECUTOR
    updates = UPDATED_ON_HOST in trace.meta
    return replace(RUNTIME_EXECUTOR, updates_on_host=updates, updates_cross=updates)
