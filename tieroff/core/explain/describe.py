"""Sentences for users: what a plan does with a step's tensors, what that costs, and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tieroff.core.buckets import bytes_below
from tieroff.core.explain.staying import held, not_managed
from tieroff.core.history import StepFigures
from tieroff.core.plan import Plan
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.trace import Trace
from tieroff.units import NS_PER_S, format_bytes, format_seconds

_BIGGEST = 5
_TIERS = tuple(Tier)
_NAMED = 3
STALLED_SHARE = 0.05  # share of a step spent in stalls from which on a hint is given
HOST_BOUND_SHARE = 0.25  # the same of the engine's own work
AHEAD_SHARE = 0.01  # share of a step up to which a host that is ahead of its accelerator by no more sets its pace
# From which share of the device memory that was taken, and from which size on, what lies unused in pieces is worth a hint.
FRAGMENTED_SHARE, FRAGMENTED_BYTES_MIN = 0.2, 256 << 20
_TOLD_NS = 1000  # the engine's work for a tick is told from here on; a shorter one reads as none
_MOVING = (TensorClass.ACTIVATION, TensorClass.PARAMETER, TensorClass.GRADIENT, TensorClass.OPTIMIZER)

Away = dict[int, dict[Tier, int]]
"""Per tensor that is ever in a lower tier, its bytes there, per tier."""


@dataclass(frozen=True)
class Explained:
    """A step and its plan, as an explanation needs them.

    Attributes:
        trace, plan: the step and its plan.
        measured: the figures of the last step; None before one ended.
        unmoved: reason why the engine moves no such tensor -> names of the tensors.
        is_cpu: device and host are one memory, so user code computes the same on tensors in lower tiers.
        compute_type: the type that parameters and inputs are cast to, or "" without a cast.
        may_update_in_backward: the optimizer could be stepped in backward but is not, and user code used no gradients.
        allocator: of an accelerator: the most bytes that PyTorch's allocator took of the device, and the most that tensors had
            of them; None on the CPU.
        planned: how many plans were made of the step, and why the last took the place of the one before it.
        unmanaged: why tensors stay on the device whatever a plan says -> their bytes.
        updates: a sentence on who updates, and whether it makes a difference; "" where that is no question.
        raised_from: the device budget as it was asked for, where that is less than the step runs in; else "".
    """

    trace: Trace
    plan: Plan
    measured: StepFigures | None = None
    unmoved: Mapping[str, Sequence[str]] = field(default_factory=dict)
    is_cpu: bool = True
    compute_type: str = ""
    may_update_in_backward: bool = False
    allocator: tuple[int, int] | None = None
    unmanaged: Mapping[str, int] = field(default_factory=dict)
    planned: tuple[int, str] = (1, "")
    updates: str = ""
    raised_from: str = ""


def explain(step: Explained, *, detail: bool = False) -> list[str]:
    """Returns five lines: what fits, what moved and where, what it costs, exactness, and what did not move.

    Lines follow on what the program holds on the device and what is not managed, with bytes, where there is some, and on
    memory that lies in pieces, with what to set.

    Args:
        step: the step.
        detail: adds the lines of `describe`.
    """
    lines = [fit(step.trace, step.plan, step.raised_from), _moved(step), _cost(step), exactness(step), _left_alone(step)]
    lines += held(step.trace, step.plan) + not_managed(step.unmanaged)
    if step.allocator is not None:
        lines += fragmentation(*step.allocator)
    if detail:
        lines += describe(step.trace, step.plan)
        lines.append("Tensors saved outside the model's forward (by a loss, say) are counted, not moved; tieroff.scope does.")
    return lines


def fit(trace: Trace, plan: Plan, raised_from: str = "") -> str:
    """Returns the sentence on whether anything had to move; `raised_from`: see `Explained`."""
    peak, budget = (format_bytes(of.get(Tier.DEVICE, 0)) for of in (plan.peak_bytes, plan.budget_bytes))
    if raised_from:
        budget = f"{budget}, raised from {raised_from}"
    if plan.moves_nothing and raised_from:
        return f"Nothing moved, because no plan needs less: the device holds at most {peak} of {budget}."
    if plan.moves_nothing:
        return f"Nothing moved, because everything fits: the device holds at most {peak} of {budget}."
    plain = format_bytes(trace.peak_bytes)
    return f"It fits: the device holds at most {peak} of {budget}; with nothing moved it would be {plain}."


def ready(trace: Trace, plan: Plan, steps_done: int, asked: str = "", raised_from: str = "") -> str:
    """Returns one line that says that a kind of step has its plan.

    Args:
        trace, plan: the step and its plan.
        steps_done: steps that were run before it.
        asked: the device budget as it was written, where that is no number of bytes.
        raised_from: see `Explained`.
    """
    per_tier: Counter[Tier] = Counter()
    for sizes in away_bytes(trace, plan).values():
        per_tier.update(sizes)
    names = {Tier.HOST: "host memory", Tier.NVME: "NVMe"}
    moved = [f"{format_bytes(per_tier[tier])} to {name}" for tier, name in names.items() if per_tier[tier]]
    limit = format_bytes(plan.budget_bytes.get(Tier.DEVICE, 0))
    if raised_from:
        limit = f"{limit}, raised from {raised_from}"
    elif asked:
        limit = f"{asked} ({limit})"
    step = f", step {_time(plan.step_ns)} predicted" if moved else ""
    return f"plan ready after step {steps_done}: {' and '.join(moved) or 'nothing has to move'}{step}, fits {limit}"


def exactness(step: Explained) -> str:
    """Returns the sentence on whether numbers equal those of the plain run."""
    if step.plan.host_updates and not step.updates:
        return (
            f"The CPU makes {len(step.plan.host_updates)} updates of the optimizer. A training does so only where its first "
            "updates show that they are the device's, bit for bit; else the device makes them."
        )
    text = "Numbers are those of the plain run, bit for bit: nothing is rounded or reordered."
    if step.compute_type:
        text = (
            f"Parameters and inputs are cast to {step.compute_type} (compute_dtype), as in FSDP2's mixed precision; "
            "parameters, gradients, state and sums over micro-batches keep their own type. Moving rounds and reorders nothing."
        )
    ring = step.trace
    kinds = {ring.tensors[index].kind for index in away_bytes(ring, step.plan)}
    if step.updates:
        text = f"{text} {step.updates}"
    if step.is_cpu or TensorClass.GRADIENT not in kinds:
        return text
    own = (
        "torch's clip_grad_norm_ sums gradients that lie below in another way than a list of them, which can differ in the "
        "last bit; tieroff.clip_grad_norm_ does not."
    )
    return f"{text} {own}"


def _moved(step: Explained) -> str:
    ring, plan = step.trace, step.plan
    count = len(ring.tensors) - _held_by_program(ring)
    away = away_bytes(ring, plan)
    words = []
    for kind in _MOVING:
        per_tier = _of_class(ring, away, kind)
        if per_tier:
            words.append(f"{kind.value} " + " and ".join(f"{format_bytes(size)} to {t.value}" for t, size in per_tier.items()))
    if words:
        text = f"Moved: {len(away)} of {count} tensors, for a part of the step: {', '.join(words)}."
    elif plan.moves_nothing:
        text = f"Moved: none of {count} tensors."
    else:
        text = f"Moved: none of {count} tensors; ops run again instead."
    return " ".join([text, *unused(plan, ring, is_raised=bool(step.raised_from))])


def unused(plan: Plan, trace: Trace, *, is_raised: bool = False) -> list[str]:
    """Returns a sentence per tier that has a budget and is not used, with the reason; `is_raised`: so was the device's."""
    sliced = bytes_below(trace.meta)
    used = [tier.value for tier in (Tier.HOST, Tier.NVME) if plan.peak_bytes.get(tier, 0) or sliced.get(tier, 0)]
    if plan.moves_nothing:
        reason = "no plan needs less of the device with it" if is_raised else "everything fits without it"
    else:
        reason = (
            f"{'NVMe' if used[0] == Tier.NVME.value else 'host memory'} was enough" if used else "nothing has to be held there"
        )
    return [
        f"{'NVMe' if tier is Tier.NVME else 'Host memory'} is there and unused, because {reason}."
        for tier in (Tier.HOST, Tier.NVME)
        if plan.budget_bytes.get(tier, 0) and tier.value not in used
    ]


def _cost(step: Explained) -> str:
    predicted = step.plan.step_ns
    text = f"Predicted step {_time(predicted)}, of which compute {_time(step.trace.ideal_ns)}"
    measured, (count, reason) = step.measured, step.planned
    if measured is None:
        return f"{text}; none was measured yet."
    limit, hint = _host_limit(len(step.plan.transfers), measured), ""
    if limit:
        hint = (
            f" The host limits this step: {limit}. A larger batch has more compute for the same work; a larger [plan] "
            "min_bytes keeps small tensors on the device."
        )
    if reason:
        hint += f" It was planned again, {count} times in all: {reason}."
    if step.may_update_in_backward and measured.stall_ns > STALLED_SHARE * measured.step_ns:
        hint += (
            " Nothing used gradients between backward and optimizer.step(): [plan] update_in_backward = true would not keep "
            "them and would run updates beside backward; docs/what-works.md lists the loops that may use it."
        )
    return (
        f"{text}; the last one ({measured.phase}) took {_time(measured.step_ns)}: compute {_time(measured.compute_ns)}, "
        f"waiting for transfers {_time(measured.stall_ns)}, the engine's own work {_time(measured.rest_ns)}"
        f"{_each(measured.rest_ns, len(step.trace.ops))}.{hint}"
    )


def _each(rest_ns: int, ticks: int) -> str:
    """Returns what of the engine's work a tick takes; "" where that is nothing, as where only the whole step is timed."""
    each_ns = rest_ns // max(ticks, 1)
    return f" ({_time(each_ns)} for each of {ticks} ticks)" if each_ns >= _TOLD_NS else ""


def _host_limit(transfers: int, measured: StepFigures) -> str:
    """Returns by what it shows that the host sets the pace of a step with transfers; "" where it does not."""
    if not transfers:
        return ""
    if measured.rest_ns > HOST_BOUND_SHARE * measured.step_ns:
        each = _time(measured.rest_ns // transfers)
        return f"{transfers} transfers take it {each} each (all of the engine's own work, divided by their number)"
    if measured.ahead_ns is not None and measured.ahead_ns < AHEAD_SHARE * measured.step_ns:
        ahead = _time(measured.ahead_ns)
        return f"it was {ahead} ahead of the device (median), which waits for it, and {transfers} transfers take time of it"
    return ""


def _left_alone(step: Explained) -> str:
    counts = dict(step.plan.skipped)
    if "not movable" in counts:
        counts["not movable"] -= _held_by_program(step.trace)
    reasons = [f"{count} by rule '{rule}'" for rule, count in sorted(counts.items()) if count > 0]
    for reason, names in step.unmoved.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        reasons.append(f"{reason}: {', '.join(names[:_NAMED])}{more}")
    return f"Left alone: {'; '.join(reasons) or 'nothing that could move'}."


def _held_by_program(trace: Trace) -> int:
    """Returns how many tensors are memory that the program holds beside communication, and no tensors of anybody."""
    if not trace.communication:
        return 0
    used = {tensor for op in trace.ops for tensor in (*op.reads, *op.writes)}
    return sum(not tensor.is_movable and index not in used for index, tensor in enumerate(trace.tensors))


def fragmentation(reserved_bytes: int, lent_bytes: int) -> list[str]:
    """Returns a line where the allocator has taken far more of the device than tensors ever had of it, else none."""
    unused_bytes = reserved_bytes - lent_bytes
    if unused_bytes < max(FRAGMENTED_SHARE * reserved_bytes, FRAGMENTED_BYTES_MIN):
        return []
    return [
        f"Fragmentation: PyTorch's allocator took {format_bytes(reserved_bytes)} of the device, of which tensors had at most "
        f"{format_bytes(lent_bytes)} at a time: start with PYTORCH_ALLOC_CONF=expandable_segments:True where the device has "
        f"that, or leave {format_bytes(unused_bytes)} of it out of [budget] device."
    ]


def _time(ns: int) -> str:
    return format_seconds(ns / NS_PER_S)


def of_slices(size_bytes: int) -> str:
    """Returns what of the bytes below is state that no plan moves, as the rest of a sentence; "" for nothing."""
    return f", {format_bytes(size_bytes)} of it for state that is updated in slices" if size_bytes else ""


def describe(trace: Trace, plan: Plan) -> list[str]:
    """Returns the details: bytes per class and link, what is computed differently, the biggest that move; a line each."""
    ring, count = trace, len(trace.tensors) - _held_by_program(trace)
    away = away_bytes(ring, plan)
    lines = [f"Policy {plan.policy}: {len(away)} of {count} tensors leave the device for a part of the step."]
    if not plan.moves_nothing:
        lines += _by_class(ring, away)
        lines += _by_link(ring, plan)
    sliced = bytes_below(trace.meta)
    for tier in (Tier.HOST, Tier.NVME):
        own = sliced.get(tier, 0)
        if plan.peak_bytes.get(tier, 0) or own:
            sizes = (format_bytes(of.get(tier, 0) + own) for of in (plan.peak_bytes, plan.budget_bytes))
            lines.append(f"{tier.value} holds at most {' of '.join(sizes)}{of_slices(own)}.")
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
    return f"{tensor.shown} ({format_bytes(tensor.size_bytes)}) to {places}"


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
    """Returns a line on what is computed differently from the plain step."""
    lines = []
    if plan.recompute:
        lines.append(f"Recomputed in backward: {', '.join(plan.recompute)}.")
    if plan.repeats:
        spent_ns = sum(ring.ops[repeat.op].duration_ns for repeat in plan.repeats)
        made = {tensor for repeat in plan.repeats for tensor in ring.ops[repeat.op].writes}
        size = sum(ring.tensors[tensor].size_bytes for tensor in made)
        lines.append(
            f"Ops that run again: {len(plan.repeats)}, {format_seconds(spent_ns / NS_PER_S)} per step; they make "
            f"{format_bytes(size)} again instead of moving it."
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
