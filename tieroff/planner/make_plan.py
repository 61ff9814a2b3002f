"""`make_plan`: from a trace, a machine and a budget to a checked plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.machine import validate as validate_machine
from tieroff.core.plan import IDEAL_EXECUTOR, RUNTIME_EXECUTOR, Capabilities, Plan
from tieroff.core.tensor import Tier
from tieroff.core.timeline import Timeline
from tieroff.core.trace import Trace
from tieroff.core.trace import validate as validate_trace
from tieroff.errors import ConfigError, InfeasiblePlanError
from tieroff.planner.auto.floor import floor_selection
from tieroff.planner.policies import find_policy
from tieroff.planner.problem.problem import Problem, make_problem
from tieroff.planner.simulate.simulator import simulate
from tieroff.units import format_bytes

_EFFORTS = ("fast", "high")
_NAMED_TENSORS = 5


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
    problem = make_problem(trace, machine, budget, capabilities, effort)
    plan = make(problem)
    if plan.peak_bytes[Tier.DEVICE] > problem.device_bytes:
        raise infeasible(problem, policy, plan.peak_bytes[Tier.DEVICE])
    timeline = simulate(plan, trace, machine)
    plan = replace(plan, policy=policy, step_ns=timeline.step_ns)
    check(plan, trace, capabilities)
    return plan, timeline


def default_capabilities(trace: Trace) -> Capabilities:
    """Returns what plans of a trace may ask for when nothing is said: all that a plan can say for traces from files.

    A trace that this project's own runtime recorded, or made without running, is planned for that runtime.
    """
    return IDEAL_EXECUTOR if trace.origin == "file" else RUNTIME_EXECUTOR


def infeasible(problem: Problem, policy: str, peak_bytes: int) -> InfeasiblePlanError:
    """Returns the error that says which op binds, what is on the device there, and which budget would do.

    `peak_bytes` is what the policy's plan has on the device at once: another policy may need less.
    """
    selection = floor_selection(problem)
    index = int(np.argmax(selection.usage))
    if int(selection.usage[index]) <= problem.device_bytes:
        return InfeasiblePlanError(
            f"expected a plan within {format_bytes(problem.device_bytes)} of device memory, but what the rule of policy "
            f"{policy!r} moves leaves {format_bytes(peak_bytes)} there at once; policies that may move more can meet the "
            f"budget ('auto' does). A device budget of {peak_bytes} bytes would do for this one",
            needed_bytes=peak_bytes,
            available_bytes=problem.device_bytes,
        )
    slots = [slot for slot in selection.slots if any(a <= index < b for a, b in slot.pieces(problem.op_count))]
    away = {slot.tensor for slot in slots}
    op = problem.trace.ops[index]
    needed = int(selection.usage[index])
    there = [life.tensor for life in problem.trace.lifetimes if life.birth <= index < life.death and life.tensor not in away]
    there.sort(key=lambda tensor: -problem.size_bytes(tensor))
    tensors = problem.trace.tensors
    named = ", ".join(f"{tensors[t].name} ({format_bytes(tensors[t].size_bytes)})" for t in there[:_NAMED_TENSORS])
    lower = ", ".join(f"{tier.value} {format_bytes(problem.budget[tier])}" for tier in problem.tiers) or "none"
    where = f"op {index} ({op.name})"
    return InfeasiblePlanError(
        f"expected every op to fit in {format_bytes(problem.device_bytes)} of device memory, but {where} needs "
        f"{format_bytes(needed)} with everything away that can be (tiers below: {lower}); the largest there: {named}; "
        f"transient: {format_bytes(op.transient_bytes)}. A device budget of {needed} bytes would do",
        op=where,
        needed_bytes=needed,
        available_bytes=problem.device_bytes,
    )
