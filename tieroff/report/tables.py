"""The tables of a run's page: predicted beside measured, the longest stalls, ops that differ, and every decision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from tieroff.core.explain.describe import away_bytes
from tieroff.core.explain.words import op_words
from tieroff.core.history import StepFigures
from tieroff.core.io.run_folder import Run
from tieroff.core.machine import LINK_NAMES
from tieroff.core.plan import Plan, Transfer
from tieroff.core.tensor import Tensor, Tier
from tieroff.core.timeline import Timeline
from tieroff.core.trace import Trace
from tieroff.report.lanes import awaited
from tieroff.units import NS_PER_S, format_bytes, format_seconds

_LONGEST = 12
_MOVES_NAMED = 4
_LINKS = {"d2h": "device to host", "h2d": "host to device", "nvme_write": "written to NVMe", "nvme_read": "read from NVMe"}


@dataclass(frozen=True)
class Table:
    """Text for people; nothing is escaped yet."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """The plan's decision on one tensor or op.

    Attributes:
        name, kind: of the tensor; an op has kind "op", a recomputed module "module".
        size_bytes: of the tensor; what an op makes.
        where: the tiers that hold bytes of it.
        moves: when it moves, for people.
        moved_bytes: per step, over all links.
        predicted_stall_ns, measured_stall_ns: that the step waits for it; None where there is no such timeline.
    """

    name: str
    kind: str
    size_bytes: int
    where: str
    moves: str
    moved_bytes: int = 0
    predicted_stall_ns: int | None = None
    measured_stall_ns: int | None = None


def decisions(run: Run, predicted: Timeline | None) -> list[Decision]:
    """Returns the plan's decision on every tensor, biggest first, then on every op that runs differently."""
    plan = run.plan
    ring = run.trace
    away = away_bytes(ring, plan)
    transfers: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in sorted(plan.transfers, key=attrgetter("issue_at")):
        transfers[transfer.tensor].append(transfer)
    stalls = [_stalls(of) for of in (predicted, run.timeline if run.was_timed else None)]
    found = []
    for index, tensor in enumerate(ring.tensors):
        own = transfers[index]
        moved = sum(tensor.part_bytes(t.first_byte, t.stop_byte) for t in own)
        stall = [None if of is None else of.get(index, 0) for of in stalls]
        where, moves = _where(tensor, away.get(index, {})), _moves(own, ring)
        found.append(Decision(tensor.shown, tensor.kind.value, tensor.size_bytes, where, moves, moved, stall[0], stall[1]))
    found.sort(key=lambda decision: -decision.size_bytes)
    return [*found, *_ops(plan, ring)]


def _stalls(timeline: Timeline | None) -> dict[int, int] | None:
    if timeline is None:
        return None
    total: dict[int, int] = defaultdict(int)
    for stall in timeline.stalls:
        total[stall.tensor] += stall.duration_ns
    return total


def _where(tensor: Tensor, away: dict[Tier, int]) -> str:
    if not away:
        return "device" if tensor.is_movable else "device (cannot move)"
    parts = [t.value if size == tensor.size_bytes else f"{t.value} ({format_bytes(size)})" for t, size in away.items()]
    return " + ".join(["device", *parts])


def _moves(transfers: Sequence[Transfer], ring: Trace) -> str:
    """Returns when a tensor moves: at which tick a copy is issued, and before which op it has to be there."""
    texts = []
    for t in transfers[:_MOVES_NAMED]:
        what = f"{LINK_NAMES[t.source, t.target]} at {_tick(t.issue_at, ring)}"
        texts.append(what if t.ready_by == t.issue_at else f"{what}, by {_tick(t.ready_by, ring)}")
    if len(transfers) > _MOVES_NAMED:
        texts.append(f"{len(transfers) - _MOVES_NAMED} more")
    return "; ".join(texts)


def _tick(tick: int, ring: Trace) -> str:
    count = len(ring.ops)
    if tick == count:
        return "the step's end"
    return f"{tick % count} {ring.ops[tick % count].name}" + (" of the next step" if tick > count else "")


def _ops(plan: Plan, ring: Trace) -> Iterator[Decision]:
    def made(op: int) -> int:
        return sum(ring.tensors[tensor].size_bytes for tensor in ring.ops[op].writes)

    for repeat in plan.repeats:
        text = f"runs again before op {_tick(repeat.at, ring)}"
        yield Decision(ring.ops[repeat.op].name, "op", made(repeat.op), "device", text)
    for update in plan.host_updates:
        text = f"from {_tick(update.issue_at, ring)}, by {_tick(update.ready_by, ring)}"
        yield Decision(ring.ops[update.op].name, "op", made(update.op), "run by the CPU", text)
    for module in plan.recompute:
        yield Decision(module, "module", 0, "recomputed", "its activations are computed again in backward")


def comparison(run: Run, predicted: Timeline | None) -> Table:
    """Returns figures of the step, predicted beside measured."""
    step = run.last_planned
    waits_ns = predicted.stall_ns if predicted is not None else None
    again_ns = predicted.recompute_ns if predicted is not None else None
    engine_ns = predicted.engine_ns if predicted is not None else None
    rows = [
        _times("step", run.plan.step_ns, step.step_ns if step else None),
        _times("compute", run.trace.ideal_ns, step.compute_ns if step else None),
        _times("waiting for transfers", waits_ns, step.stall_ns if step else None),
        _times("computing again", again_ns, step.recompute_ns if step else None),
        _times("the engine's own work", engine_ns or None, step.rest_ns if step else None),
    ]
    if step is not None and step.ahead_ns is not None:
        rows.append(_times("the host ahead of the device", None, step.ahead_ns))
    measured_peaks = _measured_peaks(run, step)
    for tier in Tier:
        planned = run.plan.peak_bytes.get(tier, 0)
        if planned or measured_peaks.get(tier):
            rows.append(_sizes(f"peak on {tier.value}", planned, measured_peaks.get(tier)))
    moved = _planned_bytes(run)
    for link, words in _LINKS.items():
        seen = step.moved_bytes.get(link, 0) if step is not None else None
        if moved[link] or seen:
            rows.append(_sizes(f"{words}, per step", moved[link], seen))
    return Table(("", "predicted", "measured", "difference"), tuple(rows))


def _measured_peaks(run: Run, step: StepFigures | None) -> dict[Tier, int]:
    peaks: dict[Tier, int] = {tier: max(held) for tier, held in run.timeline.memory.items() if any(held)}
    if step is not None and step.peak_device_bytes:
        peaks[Tier.DEVICE] = step.peak_device_bytes
    return peaks


def _planned_bytes(run: Run) -> dict[str, int]:
    moved = dict.fromkeys(_LINKS, 0)
    ring = run.trace
    for t in run.plan.transfers:
        moved[LINK_NAMES[t.source, t.target]] += ring.tensors[t.tensor].part_bytes(t.first_byte, t.stop_byte)
    return moved


def _times(name: str, predicted_ns: int | None, measured_ns: int | None) -> tuple[str, ...]:
    shown = ["-" if ns is None else format_seconds(ns / NS_PER_S) for ns in (predicted_ns, measured_ns)]
    return name, *shown, _difference(predicted_ns, measured_ns)


def _sizes(name: str, predicted: int | None, measured: int | None) -> tuple[str, ...]:
    shown = ["-" if size is None else format_bytes(size) for size in (predicted, measured)]
    return name, *shown, _difference(predicted, measured)


def _difference(predicted: int | None, measured: int | None) -> str:
    if predicted is None or measured is None:
        return ""
    if not predicted:
        return "" if measured else "none"
    share = measured / predicted - 1
    return "none" if measured == predicted else f"{share:+.1%}"


def longest_stalls(timeline: Timeline, ring: Trace) -> Table:
    """Returns the longest stalls of a timeline: for what, on which link, before which op."""
    longest = sorted(timeline.stalls, key=lambda stall: -stall.duration_ns)[:_LONGEST]
    rows = tuple(
        (format_seconds(stall.duration_ns / NS_PER_S), awaited(stall, ring), stall.link, _tick(stall.op, ring))
        for stall in longest
        if stall.duration_ns
    )
    return Table(("stall", "for", "link", "before op"), rows)


def ops_that_differ(run: Run) -> Table:
    """Returns the ops whose measured time is furthest from what the plan was made for."""
    words = op_words(run.trace)
    pairs = [
        (abs(took - op.duration_ns), index, op, took)
        for index, (op, took) in enumerate(
            zip(run.trace.ops, (span.stop_ns - span.start_ns for span in run.timeline.ops), strict=False)
        )
    ]
    rows = tuple(
        (
            f"{index} {words[index]}",
            *_times("", op.duration_ns, took)[1:3],
            f"{(took - op.duration_ns) / NS_PER_S * 1e3:+.2f} ms",
        )
        for distance, index, op, took in sorted(pairs, key=lambda pair: -pair[0])[:_LONGEST]
        if distance
    )
    return Table(("op", "planned for", "measured", "difference"), rows)
