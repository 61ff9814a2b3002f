"""Words for people: what a plan does with a step's tensors, and why."""

from __future__ import annotations

from collections import Counter

from tieroff.core.plan import Plan
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Trace
from tieroff.units import NS_PER_S, format_bytes, format_seconds

_BIGGEST = 5


def describe(trace: Trace, plan: Plan) -> list[str]:
    """Returns what lives where and why, a sentence per line, the most important first."""
    lower: dict[int, Tier] = {r.tensor: r.tier for r in plan.residencies if r.tier is not Tier.DEVICE}
    device_bytes = plan.budget_bytes.get(Tier.DEVICE, 0)
    lines = []
    if plan.moves_nothing:
        lines.append(
            f"Nothing is moved: everything fits. The step needs {format_bytes(plan.peak_bytes[Tier.DEVICE])} of the "
            f"{format_bytes(device_bytes)} of device memory that it may use."
        )
    else:
        lines.append(
            f"Policy {plan.policy}: {len(lower)} of {len(trace.tensors)} tensors leave the device for a part of the step, "
            f"which peaks at {format_bytes(plan.peak_bytes[Tier.DEVICE])} of {format_bytes(device_bytes)}."
        )
        lines += _by_class(trace, lower)
        lines += _by_link(trace, plan)
    lines.append(
        f"Predicted step {format_seconds(plan.step_ns / NS_PER_S)}, of which compute "
        f"{format_seconds(trace.ideal_ns / NS_PER_S)}."
    )
    for tier in (Tier.HOST, Tier.NVME):
        if plan.budget_bytes.get(tier, 0) and not plan.peak_bytes.get(tier, 0):
            reason = "everything fits without it" if plan.moves_nothing else "the tiers above it were enough"
            lines.append(f"{tier.value} was asked for and is not used: {reason}.")
    if plan.recompute:
        lines.append(f"Recomputed in backward: {', '.join(plan.recompute)}.")
    if plan.skipped:
        kept = ", ".join(f"{count} by rule '{rule}'" for rule, count in sorted(plan.skipped.items()))
        lines.append(f"Kept on the device: {kept}.")
    if not plan.moves_nothing:
        biggest = sorted(lower, key=lambda i: -trace.tensors[i].size_bytes)[:_BIGGEST]
        lines.append("Biggest that move: " + "; ".join(_one(trace.tensors[i], lower[i]) for i in biggest) + ".")
    return lines


def _one(tensor: Tensor, tier: Tier) -> str:
    return f"{tensor.name} ({format_bytes(tensor.size_bytes)}) to {tier.value}"


def _by_class(trace: Trace, lower: dict[int, Tier]) -> list[str]:
    lines = []
    for kind in (TensorClass.ACTIVATION, TensorClass.PARAMETER, TensorClass.GRADIENT, TensorClass.OPTIMIZER):
        per_tier: Counter[Tier] = Counter()
        for index, tier in lower.items():
            if trace.tensors[index].kind is kind:
                per_tier[tier] += trace.tensors[index].size_bytes
        total = sum(t.size_bytes for t in trace.tensors if t.kind is kind)
        if total:
            moved = ", ".join(f"{format_bytes(size)} to {tier.value}" for tier, size in per_tier.items()) or "none moves"
            lines.append(f"  {kind.value}: {format_bytes(total)} in all; {moved}.")
    return lines


def _by_link(trace: Trace, plan: Plan) -> list[str]:
    per_link: Counter[str] = Counter()
    for transfer in plan.transfers:
        per_link[f"{transfer.source.value} to {transfer.target.value}"] += trace.tensors[transfer.tensor].size_bytes
    moved = ", ".join(f"{link} {format_bytes(size)}" for link, size in sorted(per_link.items()))
    return [f"Bytes per step: {moved}."]
