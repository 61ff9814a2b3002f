"""Words for people: what a plan does with a step's tensors, and why."""

from __future__ import annotations

from collections import Counter, defaultdict

from tieroff.core.plan import Plan
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.trace import Trace
from tieroff.units import NS_PER_S, format_bytes, format_seconds

_BIGGEST = 5

Away = dict[int, dict[Tier, int]]
"""Per tensor that is ever below the device, the bytes of it that are, per tier."""


def describe(trace: Trace, plan: Plan) -> list[str]:
    """Returns what lives where and why, a sentence per line, the most important first."""
    ring = trace.repeated(plan.period)
    away = _away(ring, plan)
    device_bytes = plan.budget_bytes.get(Tier.DEVICE, 0)
    lines = []
    if plan.moves_nothing:
        lines.append(
            f"Nothing is moved: everything fits. The step needs {format_bytes(plan.peak_bytes[Tier.DEVICE])} of the "
            f"{format_bytes(device_bytes)} of device memory that it may use."
        )
    else:
        lines.append(
            f"Policy {plan.policy}: {len(away)} of {len(ring.tensors)} tensors leave the device for a part of the step, "
            f"which peaks at {format_bytes(plan.peak_bytes[Tier.DEVICE])} of {format_bytes(device_bytes)}."
        )
        lines += _by_class(ring, away)
        lines += _by_link(ring, plan)
    if plan.period > 1:
        lines.append(f"The plan covers {plan.period} steps in a row; tensors are counted in each.")
    lines.append(
        f"Predicted step {format_seconds(plan.step_ns / NS_PER_S)}, of which compute "
        f"{format_seconds(trace.ideal_ns / NS_PER_S)}."
    )
    for tier in (Tier.HOST, Tier.NVME):
        if plan.budget_bytes.get(tier, 0) and not plan.peak_bytes.get(tier, 0):
            reason = "everything fits without it" if plan.moves_nothing else "the tiers above it were enough"
            lines.append(f"{tier.value} was asked for and is not used: {reason}.")
    lines += _compute(ring, plan)
    if plan.skipped:
        kept = ", ".join(f"{count} by rule '{rule}'" for rule, count in sorted(plan.skipped.items()))
        lines.append(f"Kept on the device: {kept}.")
    if away:
        biggest = sorted(away, key=lambda i: -ring.tensors[i].size_bytes)[:_BIGGEST]
        lines.append("Biggest that move: " + "; ".join(_one(ring, i, away[i]) for i in biggest) + ".")
    return lines


def _away(ring: Trace, plan: Plan) -> Away:
    """Counts every byte once per tier, however often it goes there."""
    ranges: dict[tuple[int, Tier], list[tuple[int, int]]] = defaultdict(list)
    for r in plan.residencies:
        if r.tier is not Tier.DEVICE:
            ranges[r.tensor, r.tier].append((r.first_byte, r.stop_byte or ring.tensors[r.tensor].size_bytes))
    away: Away = {}
    for (tensor, tier), own in ranges.items():
        total = end = 0
        for first, stop in sorted(own):
            total += max(0, stop - max(first, end))
            end = max(end, stop)
        away.setdefault(tensor, {})[tier] = total
    return away


def _one(ring: Trace, index: int, away: dict[Tier, int]) -> str:
    tensor = ring.tensors[index]
    places = " and ".join(
        tier.value if size == tensor.size_bytes else f"{tier.value} (part of it, {format_bytes(size)})"
        for tier, size in away.items()
    )
    return f"{tensor.name} ({format_bytes(tensor.size_bytes)}) to {places}"


def _by_class(ring: Trace, away: Away) -> list[str]:
    lines = []
    for kind in (TensorClass.ACTIVATION, TensorClass.PARAMETER, TensorClass.GRADIENT, TensorClass.OPTIMIZER):
        per_tier: Counter[Tier] = Counter()
        for index, sizes in away.items():
            if ring.tensors[index].kind is kind:
                per_tier.update(sizes)
        total = sum(t.size_bytes for t in ring.tensors if t.kind is kind)
        if total:
            moved = ", ".join(f"{format_bytes(size)} to {tier.value}" for tier, size in per_tier.items()) or "none moves"
            lines.append(f"  {kind.value}: {format_bytes(total)} in all; {moved}.")
    return lines


def _by_link(ring: Trace, plan: Plan) -> list[str]:
    per_link: Counter[str] = Counter()
    for t in plan.transfers:
        size = ring.tensors[t.tensor].part_bytes(t.first_byte, t.stop_byte)
        per_link[f"{t.source.value} to {t.target.value}"] += size
    moved = ", ".join(f"{link} {format_bytes(size / plan.period)}" for link, size in sorted(per_link.items()))
    return [f"Bytes per step: {moved}."] if moved else []


def _compute(ring: Trace, plan: Plan) -> list[str]:
    """Returns what is computed otherwise than in the plain step."""
    lines = []
    if plan.recompute:
        lines.append(f"Recomputed in backward: {', '.join(plan.recompute)}.")
    if plan.repeats:
        spent_ns = sum(ring.ops[repeat.op].duration_ns for repeat in plan.repeats) // plan.period
        made = {tensor for repeat in plan.repeats for tensor in ring.ops[repeat.op].writes}
        size = sum(ring.tensors[tensor].size_bytes for tensor in made)
        lines.append(
            f"Ops that run again: {len(plan.repeats)}, {format_seconds(spent_ns / NS_PER_S)} per step; they make "
            f"{format_bytes(size)} anew instead of moving it."
        )
    if plan.host_updates:
        updated = {tensor for update in plan.host_updates for tensor in ring.ops[update.op].writes}
        size = sum(ring.tensors[tensor].size_bytes for tensor in updated)
        spent_ns = sum(update.duration_ns for update in plan.host_updates) // plan.period
        lines.append(
            f"Updates of the optimizer that the CPU runs: {len(plan.host_updates)}, on {format_bytes(size)} in host memory, "
            f"{format_seconds(spent_ns / NS_PER_S)} per step."
        )
    return lines
