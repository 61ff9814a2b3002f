"""Words for people: what a plan does with a step's tensors, what that costs, and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tieroff.core.history import StepFigures
from tieroff.core.plan import Plan
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.trace import Trace
from tieroff.units import NS_PER_S, format_bytes, format_seconds

_BIGGEST = 5
_TIERS = tuple(Tier)
_NAMED = 3
_WAITING = 0.05  # of a step, from which on it is worth saying what would help
_MOVING = (TensorClass.ACTIVATION, TensorClass.PARAMETER, TensorClass.GRADIENT, TensorClass.OPTIMIZER)

Away = dict[int, dict[Tier, int]]
"""Per tensor that is ever below the device, the bytes of it that are, per tier."""


@dataclass(frozen=True)
class Told:
    """What an explanation is made from.

    Attributes:
        trace, plan: the step and what is done with it.
        measured: the figures of the last step; None before one ended.
        unmoved: why tensors are left alone by the engine itself -> their names.
        is_cpu: the device's memory and the host's are one, so what user code computes of tensors below is the same.
        compute_type: what parameters and inputs are cast to for computing, or "" when they are not.
        may_update_in_backward: the optimizer could be stepped in backward, it is not, and user code left gradients alone.
    """

    trace: Trace
    plan: Plan
    measured: StepFigures | None = None
    unmoved: Mapping[str, Sequence[str]] = field(default_factory=dict)
    is_cpu: bool = True
    compute_type: str = ""
    may_update_in_backward: bool = False


def explain(told: Told, *, detail: bool = False) -> list[str]:
    """Returns five lines: what fits, what moved and where, what it costs, exactness, and what was left alone.

    Args:
        told: the step.
        detail: adds what `describe` says.
    """
    lines = [fit(told.trace, told.plan), _moved(told.trace, told.plan), _cost(told), exactness(told), _left_alone(told)]
    if detail:
        lines += describe(told.trace, told.plan)
        lines.append("Tensors saved outside the model's forward (by a loss, say) are counted, not moved; tieroff.scope does.")
    return lines


def fit(trace: Trace, plan: Plan) -> str:
    """Returns the sentence that says whether anything had to move."""
    peak, budget = (format_bytes(of.get(Tier.DEVICE, 0)) for of in (plan.peak_bytes, plan.budget_bytes))
    if plan.moves_nothing:
        return f"Nothing moved, because everything fits: the device holds at most {peak} of {budget}."
    plain = format_bytes(trace.peak_bytes)
    return f"It fits: the device holds at most {peak} of {budget}; with nothing moved it would be {plain}."


def exactness(told: Told) -> str:
    """Returns the sentence that says whether numbers are those of the plain run."""
    if told.plan.host_updates:
        return "Numbers can differ from the plain run's in rounding: the CPU runs updates of the optimizer."
    text = "Numbers are those of the plain run, bit for bit: nothing is rounded or reordered."
    if told.compute_type:
        text = (
            f"Parameters and inputs are computed with in {told.compute_type} (compute_dtype), as FSDP2's mixed precision does; "
            "what is kept, and sums over micro-batches, have the parameters' own type. Moving rounds and reorders nothing."
        )
    ring = told.trace
    kinds = {ring.tensors[index].kind for index in away_bytes(ring, told.plan)}
    if told.is_cpu or TensorClass.GRADIENT not in kinds:
        return text
    own = "Sums by your own code over gradients on the host can differ in the last bit; tieroff.clip_grad_norm_ does not."
    return f"{text} {own}"


def _moved(trace: Trace, plan: Plan) -> str:
    ring = trace
    away = away_bytes(ring, plan)
    words = []
    for kind in _MOVING:
        per_tier = _of_class(ring, away, kind)
        if per_tier:
            words.append(f"{kind.value} " + " and ".join(f"{format_bytes(size)} to {t.value}" for t, size in per_tier.items()))
    if words:
        text = f"Moved: {len(away)} of {len(ring.tensors)} tensors, for a part of the step: {', '.join(words)}."
    elif plan.moves_nothing:
        text = f"Moved: none of {len(ring.tensors)} tensors."
    else:
        text = f"Moved: none of {len(ring.tensors)} tensors; ops run again instead."
    return " ".join([text, *unused(plan)])


def unused(plan: Plan) -> list[str]:
    """Returns a sentence per tier that was asked for and is not used, with the reason."""
    used = [tier.value for tier in (Tier.HOST, Tier.NVME) if plan.peak_bytes.get(tier, 0)]
    if plan.moves_nothing:
        reason = "everything fits without it"
    else:
        reason = f"{used[0]} was enough" if used else "nothing has to be held there"
    return [
        f"{tier.value.upper() if tier is Tier.NVME else 'Host memory'} asked for, unused, because {reason}."
        for tier in (Tier.HOST, Tier.NVME)
        if plan.budget_bytes.get(tier, 0) and tier.value not in used
    ]


def _cost(told: Told) -> str:
    predicted = told.plan.step_ns
    text = f"Predicted step {_time(predicted)}, of which compute {_time(told.trace.ideal_ns)}"
    measured = told.measured
    if measured is None:
        return f"{text}; none was measured yet."
    ticks = max(len(told.trace.ops), 1)
    hint = ""
    if told.may_update_in_backward and measured.stall_ns > _WAITING * measured.step_ns:
        hint = (
            " Nothing used gradients between backward and optimizer.step(): with [plan] update_in_backward = true they would "
            "not be kept, and updates would run beside backward; docs/what-works.md says which loops may have it."
        )
    return (
        f"{text}; the last one ({measured.phase}) took {_time(measured.step_ns)}: compute {_time(measured.compute_ns)}, "
        f"waiting for transfers {_time(measured.stall_ns)}, the engine's own work {_time(measured.rest_ns)} "
        f"({_time(measured.rest_ns // ticks)} for each of {ticks} ticks).{hint}"
    )


def _left_alone(told: Told) -> str:
    reasons = [f"{count} by rule '{rule}'" for rule, count in sorted(told.plan.skipped.items())]
    for reason, names in told.unmoved.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        reasons.append(f"{reason}: {', '.join(names[:_NAMED])}{more}")
    return f"Left alone: {'; '.join(reasons) or 'nothing that could move'}."


def _time(ns: int) -> str:
    return format_seconds(ns / NS_PER_S)


def describe(trace: Trace, plan: Plan) -> list[str]:
    """Returns the details: bytes per class and link, what is computed otherwise, the biggest that move; a line each."""
    ring = trace
    away = away_bytes(ring, plan)
    lines = [f"Policy {plan.policy}: {len(away)} of {len(ring.tensors)} tensors leave the device for a part of the step."]
    if not plan.moves_nothing:
        lines += _by_class(ring, away)
        lines += _by_link(ring, plan)
    for tier in (Tier.HOST, Tier.NVME):
        if plan.peak_bytes.get(tier, 0):
            sizes = (format_bytes(of.get(tier, 0)) for of in (plan.peak_bytes, plan.budget_bytes))
            lines.append(f"{tier.value} holds at most {' of '.join(sizes)}.")
    lines += _compute(ring, plan)
    if away:
        biggest = sorted(away, key=lambda i: -ring.tensors[i].size_bytes)[:_BIGGEST]
        lines.append("Biggest that move: " + "; ".join(_one(ring, i, away[i]) for i in biggest) + ".")
    return lines


def away_bytes(ring: Trace, plan: Plan) -> Away:
    """Returns what of each tensor is ever below the device; every byte counts once per tier, however often it goes there."""
    ranges: dict[tuple[int, Tier], list[tuple[int, int]]] = defaultdict(list)
    for r in plan.residencies:
        if r.tier is not Tier.DEVICE:
            ranges[r.tensor, r.tier].append((r.first_byte, r.stop_byte or ring.tensors[r.tensor].size_bytes))
    away: Away = {}
    for (tensor, tier), own in sorted(ranges.items(), key=lambda item: (item[0][0], _TIERS.index(item[0][1]))):
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


def _of_class(ring: Trace, away: Away, kind: TensorClass) -> dict[Tier, int]:
    per_tier: Counter[Tier] = Counter()
    for index, sizes in away.items():
        if ring.tensors[index].kind is kind:
            per_tier.update(sizes)
    return {tier: per_tier[tier] for tier in Tier if per_tier[tier]}


def _by_class(ring: Trace, away: Away) -> list[str]:
    lines = []
    for kind in _MOVING:
        total = sum(t.size_bytes for t in ring.tensors if t.kind is kind)
        if total:
            per_tier = _of_class(ring, away, kind)
            moved = ", ".join(f"{format_bytes(size)} to {tier.value}" for tier, size in per_tier.items()) or "none moves"
            lines.append(f"  {kind.value}: {format_bytes(total)} in all; {moved}.")
    return lines


def _by_link(ring: Trace, plan: Plan) -> list[str]:
    per_link: Counter[str] = Counter()
    for t in plan.transfers:
        size = ring.tensors[t.tensor].part_bytes(t.first_byte, t.stop_byte)
        per_link[f"{t.source.value} to {t.target.value}"] += size
    moved = ", ".join(f"{link} {format_bytes(size)}" for link, size in sorted(per_link.items()))
    return [f"Bytes per step: {moved}."] if moved else []


def _compute(ring: Trace, plan: Plan) -> list[str]:
    """Returns what is computed otherwise than in the plain step."""
    lines = []
    if plan.recompute:
        lines.append(f"Recomputed in backward: {', '.join(plan.recompute)}.")
    if plan.repeats:
        spent_ns = sum(ring.ops[repeat.op].duration_ns for repeat in plan.repeats)
        made = {tensor for repeat in plan.repeats for tensor in ring.ops[repeat.op].writes}
        size = sum(ring.tensors[tensor].size_bytes for tensor in made)
        lines.append(
            f"Ops that run again: {len(plan.repeats)}, {format_seconds(spent_ns / NS_PER_S)} per step; they make "
            f"{format_bytes(size)} anew instead of moving it."
        )
    if plan.host_updates:
        updated = {tensor for update in plan.host_updates for tensor in ring.ops[update.op].writes}
        size = sum(ring.tensors[tensor].size_bytes for tensor in updated)
        spent_ns = sum(update.duration_ns for update in plan.host_updates)
        lines.append(
            f"Updates of the optimizer that the CPU runs: {len(plan.host_updates)}, on {format_bytes(size)} in host memory, "
            f"{format_seconds(spent_ns / NS_PER_S)} per step."
        )
    return lines
