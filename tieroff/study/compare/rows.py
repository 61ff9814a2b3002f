"""The row of `tieroff plan` and `tieroff compare`: what one policy reaches on one trace, beside the lower bound."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from tieroff.core.buckets import bytes_below
from tieroff.core.machine import Machine
from tieroff.core.plan import Capabilities, Plan
from tieroff.core.tensor import Tier
from tieroff.core.timeline import Timeline
from tieroff.core.trace import Trace
from tieroff.errors import InfeasiblePlanError
from tieroff.planner.bounds.bounds import Scope, best_bound_ns, scope_of
from tieroff.planner.make_plan import default_capabilities, plan_with_timeline
from tieroff.planner.policies import find_policy
from tieroff.planner.policy import Decides
from tieroff.planner.problem.problem import make_problem
from tieroff.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class Row:
    """One policy's result; what depends on a plan is None where none was found.

    Attributes:
        policy, status: name; "ok" or "infeasible".
        step_s, ideal_s, bound_s, stall_s: predicted step; sum of the op durations; best bound proven; step less ideal
            less recompute.
        peak_*_bytes: predicted peak of each tier, with state below that is updated in slices.
        d2h_bytes, h2d_bytes, nvme_write_bytes, nvme_read_bytes: moved per step.
        recompute_s: time of recomputed ops.
        plan_s: time that planning and bounding took.
        kind: "static" or "on-line": when the policy decides.
        options: under what of its own, with commas, the policy's faithful time is simulated; empty where it has none.
        faithful_step_s: predicted step under those options, see [Note: two times] in planner/policy.py.
            It is not to be compared with other rows where there are options.
        reason: why there is no plan.
    """

    policy: str
    status: str
    step_s: float | None = None
    ideal_s: float | None = None
    bound_s: float | None = None
    stall_s: float | None = None
    peak_device_bytes: int | None = None
    peak_host_bytes: int | None = None
    peak_nvme_bytes: int | None = None
    d2h_bytes: int | None = None
    h2d_bytes: int | None = None
    nvme_write_bytes: int | None = None
    nvme_read_bytes: int | None = None
    recompute_s: float | None = None
    plan_s: float | None = None
    kind: str = Decides.STATIC.value
    options: str = ""
    faithful_step_s: float | None = None
    reason: str = ""

    def as_dict(self) -> dict[str, str | float | int | None]:
        """Returns the row as a mapping, in the order of its columns."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Result:
    """A row and what it was made from."""

    row: Row
    plan: Plan | None = None
    timeline: Timeline | None = None

    @property
    def reason(self) -> str:
        """Why there is no plan; empty where there is one."""
        return self.row.reason


def plan_row(
    trace: Trace,
    machine: Machine,
    budget: dict[Tier, int],
    policy: str = "auto",
    effort: str = "fast",
    capabilities: Capabilities | None = None,
    bounds_ns: dict[Scope, int] | None = None,
) -> Result:
    """Returns the row of one policy; one that finds no plan gets a row with status "infeasible" and times of None.

    Args:
        trace, machine, budget, policy, effort, capabilities: as `make_plan` takes them.
        bounds_ns: bounds of the same problem that are known already, by what they hold for; a new one is added.

    Raises:
        ConfigError: an unknown policy or effort, or a tier without links.
    """
    begin = time.perf_counter()
    declared = find_policy(policy)
    kind, options = declared.decides.value, ", ".join(declared.options.words())
    try:
        plan, timeline = plan_with_timeline(trace, machine, budget, policy, effort, capabilities)
    except InfeasiblePlanError as error:
        return Result(Row(policy, "infeasible", kind=kind, options=options, reason=str(error)))
    problem = make_problem(trace, machine, budget, capabilities or default_capabilities(trace), effort)
    bounds_ns = {} if bounds_ns is None else bounds_ns
    scope = scope_of(plan)
    if scope not in bounds_ns:
        bounds_ns[scope] = best_bound_ns(problem, effort, scope)
    moved = timeline.moved_bytes
    recompute_ns = timeline.recompute_ns
    plan_s = time.perf_counter() - begin
    sliced = bytes_below(trace.meta)
    faithful = timeline if declared.is_common else declared.faithful(plan, trace, machine)
    row = Row(
        policy=policy,
        status="ok",
        step_s=timeline.step_ns / NS_PER_S,
        ideal_s=trace.ideal_ns / NS_PER_S,
        bound_s=bounds_ns[scope] / NS_PER_S,
        stall_s=(timeline.step_ns - trace.ideal_ns + trace.recompute_ns - recompute_ns - timeline.engine_ns) / NS_PER_S,
        peak_device_bytes=plan.peak_bytes[Tier.DEVICE],
        peak_host_bytes=plan.peak_bytes[Tier.HOST] + sliced.get(Tier.HOST, 0),
        peak_nvme_bytes=plan.peak_bytes[Tier.NVME] + sliced.get(Tier.NVME, 0),
        d2h_bytes=moved["d2h"],
        h2d_bytes=moved["h2d"],
        nvme_write_bytes=moved["nvme_write"],
        nvme_read_bytes=moved["nvme_read"],
        recompute_s=recompute_ns / NS_PER_S,
        plan_s=plan_s,
        kind=kind,
        options=options,
        faithful_step_s=faithful.step_ns / NS_PER_S,
    )
    return Result(row, plan, timeline)


def compare_rows(
    trace: Trace,
    machine: Machine,
    budget: dict[Tier, int],
    policies: Sequence[str],
    effort: str = "fast",
    on_progress: Callable[[str, float], None] = lambda what, share: None,
) -> list[Result]:
    """Returns one result per policy, in the order asked for. `auto` runs last and takes every plan as a candidate.

    `on_progress` receives what is being planned and the share of policies that are done.

    Raises:
        ConfigError: an unknown policy or effort, or a tier without links.
    """
    for policy in policies:
        find_policy(policy)
    results: dict[str, Result] = {}
    bounds_ns: dict[Scope, int] = {}
    ordered = sorted(set(policies), key=lambda name: (name == "auto", name))
    for position, policy in enumerate(ordered):
        on_progress(f"planning with {policy}", position / len(ordered))
        results[policy] = plan_row(trace, machine, budget, policy, effort, bounds_ns=bounds_ns)
    if "auto" in results:
        results["auto"] = _best_as_auto(results)
    return [results[policy] for policy in policies]


def _best_as_auto(results: dict[str, Result]) -> Result:
    """Returns the fastest result under the name `auto`; its planning time is then that of all rows."""
    own = results["auto"]
    found = [own, *(r for r in results.values() if r is not own)]
    planned = [r for r in found if r.plan is not None]
    if not planned:
        return own
    best = min(planned, key=lambda r: r.row.step_s or 0.0)
    if best is own or best.plan is None:
        return own
    plan_s = sum(r.row.plan_s or 0.0 for r in results.values())
    row = replace(best.row, policy="auto", plan_s=plan_s, kind=own.row.kind, options="", faithful_step_s=best.row.step_s)
    return Result(row, replace(best.plan, policy="auto"), best.timeline)
