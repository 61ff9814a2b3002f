"""What a plan means for the choice of a machine: whether the step fits, how fast it is, drive wear, and what would help."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tieroff.core.buckets import bytes_below
from tieroff.core.explain.describe import fit, of_slices, unused
from tieroff.core.explain.wear import wear_of
from tieroff.core.machine import Machine
from tieroff.core.plan import Capabilities
from tieroff.core.tensor import Tier
from tieroff.core.trace import Trace
from tieroff.errors import InfeasiblePlanError
from tieroff.planner.make_plan import make_plan
from tieroff.planner.problem.problem import live_bytes
from tieroff.study.compare.rows import Result, Row
from tieroff.units import format_bytes, format_seconds

TIME_LIMIT_S = 30.0
"""No plan is begun for a further question after this long."""

# A step this near to its ideal needs no advice, and a gain below this share is not worth mentioning.
_NEAR = 1.005
_WORTHWHILE = 0.01
_LINKS = {
    "d2h": "device to host",
    "h2d": "host to device",
    "nvme_write": "written to the NVMe",
    "nvme_read": "read from the NVMe",
}


@dataclass(frozen=True, slots=True)
class Question:
    """The same step with more of one resource.

    Attributes:
        what: the resource and how much more, for people.
    """

    what: str
    trace: Trace
    machine: Machine
    budget: dict[Tier, int]


@dataclass(frozen=True, slots=True)
class Relief:
    """What more of one resource would give: the step's time with it, never above the time without."""

    what: str
    step_s: float


def explain(trace: Trace, machine: Machine, budget: dict[Tier, int], result: Result) -> list[str]:
    """Returns what a result says, a sentence per line: fit, time, bytes per link, room below, wear of the drives."""
    plan, row = result.plan, result.row
    peak_bytes = int(live_bytes(trace).max())
    if plan is None:
        return [
            f"It does not fit. {row.policy} found no plan: {result.reason}",
            f"With nothing moved the step needs {format_bytes(peak_bytes)} of device memory.",
        ]
    step_s, ideal_s, bound_s = row.step_s or 0.0, row.ideal_s or 0.0, row.bound_s or 0.0
    lines = [
        fit(trace, plan),
        f"{row.policy}: a step of {format_seconds(step_s)}; {format_seconds(ideal_s)} without any wait "
        f"({_share(ideal_s, step_s)} of ideal), and no plan is faster than {format_seconds(bound_s)}.",
    ]
    if trace.origin == "dry" or trace.meta.get("durations", "").startswith("estimated"):
        lines.append(_certainty(trace, step_s))
    if machine.device_bytes and budget[Tier.DEVICE] > machine.device_bytes:
        lines.append(f"The budget is above the {format_bytes(machine.device_bytes)} of device memory of this machine.")
    lines += unused(plan, trace)
    lines += _links(row, machine, step_s)
    lines += _room(row, trace)
    wear = wear_of(row.nvme_write_bytes or 0, step_s, machine.nvme_endurance_bytes)
    if wear is not None:
        lines.append(str(wear))
    if plan.recompute:
        lines.append(f"Recomputed: {', '.join(plan.recompute)}.")
    lines += [f"{count} tensors stay on the device: {rule}." for rule, count in sorted(plan.skipped.items())]
    return lines


def interval_s(trace: Trace, step_s: float) -> tuple[float, float] | None:
    """Returns the times between which nine steps in ten lie by the errors of the clock's fit, in seconds.

    None where op times were measured, or estimated by a roofline, whose errors nobody knows.
    """
    factors = [float(factor) for factor in trace.meta.get("interval", "").split()]
    return (step_s * factors[0], step_s * factors[1]) if factors else None


def _certainty(trace: Trace, step_s: float) -> str:
    """Returns how sure the estimated op times are."""
    how = trace.meta.get("durations", "estimated")
    between = interval_s(trace, step_s)
    if between is None:
        return f"Op times are not measured ({how}): real ones are longer, and waits then shorter beside them."
    low, high = (format_seconds(seconds) for seconds in between)
    return (
        f"Op times are not measured ({how}), at the shares of its peaks that measured steps reach: in nine cases of ten the "
        f"step takes {low} to {high}."
    )


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "100.0%"


def _links(row: Row, machine: Machine, step_s: float) -> Iterator[str]:
    for link, words in _LINKS.items():
        moved_bytes: int = getattr(row, f"{link}_bytes") or 0
        if moved_bytes:
            busy_s = moved_bytes / getattr(machine, f"{link}_bytes_per_s")
            yield f"{format_bytes(moved_bytes)} per step {words}: {_share(busy_s, step_s)} of the step at full speed."


def _room(row: Row, trace: Trace) -> Iterator[str]:
    sliced = bytes_below(trace.meta)
    for name, tier, size_bytes in (("host", Tier.HOST, row.peak_host_bytes), ("NVMe", Tier.NVME, row.peak_nvme_bytes)):
        if size_bytes:
            yield f"It needs {format_bytes(size_bytes)} of {name}{of_slices(sliced.get(tier, 0))}."


def questions(trace: Trace, machine: Machine, budget: dict[Tier, int]) -> Iterator[Question]:
    """Yields the step with more of each resource that it has."""
    full = {tier: budget.get(tier, machine.capacity_bytes(tier)) for tier in Tier}
    for tier, what, links in (
        (Tier.HOST, "a link to the host twice as fast", ("d2h", "h2d")),
        (Tier.NVME, "drives twice as fast", ("nvme_write", "nvme_read")),
    ):
        if full[tier] and machine.has_tier(tier):
            yield Question(what, trace, _faster(machine, links), budget)
    for percent in (25, 10):
        more = full[Tier.DEVICE] * (100 + percent) // 100
        yield Question(f"{percent} % more device memory", trace, machine, {**budget, Tier.DEVICE: more})
    if full[Tier.HOST] and machine.has_tier(Tier.HOST):
        yield Question("twice the host memory", trace, machine, {**budget, Tier.HOST: 2 * full[Tier.HOST]})
    halved = trace.with_durations([op.duration_ns // 2 for op in trace.ops])
    yield Question("a device that computes twice as fast", halved, machine, budget)


def _faster(machine: Machine, links: tuple[str, ...]) -> Machine:
    rates = {f"{link}_bytes_per_s": 2 * getattr(machine, f"{link}_bytes_per_s") for link in links}
    return replace(machine, **rates)


def reliefs(
    trace: Trace,
    machine: Machine,
    budget: dict[Tier, int],
    result: Result,
    effort: str = "fast",
    capabilities: Capabilities | None = None,
    time_limit_s: float = TIME_LIMIT_S,
) -> tuple[list[Relief], list[str]]:
    """Returns what more of each resource would give, best first, and the questions for which there was no time.

    Each question is planned with the result's policy and effort "fast". Where the result's own `effort` was higher, gains are
    relative to a fast plan of the same budget. More of a resource never makes the step longer: the given plan stays
    possible.
    """
    assert result.plan is not None
    begun_s = time.monotonic()
    step_s = result.row.step_s or 0.0
    policy = result.row.policy
    base = result.plan if effort == "fast" else make_plan(trace, machine, budget, policy, "fast", capabilities)
    found: list[Relief] = []
    left_out: list[str] = []
    for question in questions(trace, machine, budget):
        if time.monotonic() - begun_s > time_limit_s:
            left_out.append(question.what)
            continue
        try:
            other = make_plan(question.trace, question.machine, question.budget, policy, "fast", capabilities)
        except InfeasiblePlanError:
            continue
        share = min(other.step_ns / base.step_ns, 1.0) if base.step_ns else 1.0
        found.append(Relief(question.what, step_s * share))
    return sorted(found, key=lambda relief: relief.step_s), left_out


def advice(
    trace: Trace,
    machine: Machine,
    budget: dict[Tier, int],
    result: Result,
    effort: str = "fast",
    capabilities: Capabilities | None = None,
    time_limit_s: float = TIME_LIMIT_S,
) -> list[str]:
    """Returns which resource is the tightest and what more of each would give, a sentence per line.

    Empty for a result without a plan, whose reason says which budget would do.
    """
    row = result.row
    if result.plan is None or row.step_s is None or row.ideal_s is None:
        return []
    if row.step_s <= row.ideal_s * _NEAR:
        return ["The tightest resource is the device's speed: the step hardly waits for anything else."]
    found, left_out = reliefs(trace, machine, budget, result, effort, capabilities, time_limit_s)
    lines = []
    if found and found[0].step_s < row.step_s * (1 - _WORTHWHILE):
        lines.append(f"The tightest resource; what would help most: {found[0].what}.")
    else:
        lines.append("None of these shortens the step by 1 % or more:")
    for relief in found:
        gain = 1 - relief.step_s / row.step_s
        lines.append(f"  {relief.what}: a step of {format_seconds(relief.step_s)} ({gain:.1%} less).")
    if left_out:
        lines.append(f"Not tried, for lack of time: {', '.join(left_out)}.")
    return lines
