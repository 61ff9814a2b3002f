"""A timeline as lanes of spans: compute, stalls by their cause, each link, and updates on the CPU."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tieroff.core.explain.words import op_words
from tieroff.core.timeline import Stall, Timeline
from tieroff.core.trace import Trace
from tieroff.units import NS_PER_S, format_bytes, format_seconds

LANES = ("compute", "stalls", "peers", "d2h", "h2d", "nvme_write", "nvme_read", "cpu")
"""In the order in which they are shown; the names of links are those of `core.machine`, peers is communication."""

_PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one lane.

    Attributes:
        lane: one of `LANES`.
        cause: of compute, the phase ("forward", "backward", "optimizer", "recompute" or "other"); of a stall, the lane that
            was waited for, or "rank"; of others, the lane itself.
        start_ns, stop_ns: from the step's start.
        name: of the op or the tensor; not escaped.
        detail: more for people.
        busy: the share of the stretch that is filled: 1 but for spans that stand for many.
    """

    lane: str
    cause: str
    start_ns: int
    stop_ns: int
    name: str
    detail: str = ""
    busy: float = 1.0


def spans_of(timeline: Timeline, ring: Trace) -> list[Span]:
    """Returns all spans of a timeline, lane by lane, each in order of start; `ring` is the trace of the plan's ops."""
    return [
        *sorted((*_ops(timeline, ring, "compute"), *_repeats(timeline, ring)), key=lambda span: span.start_ns),
        *_stalls(timeline, ring),
        *_ops(timeline, ring, "peers"),
        *sorted(_transfers(timeline, ring), key=lambda span: (LANES.index(span.lane), span.start_ns)),
        *(Span("cpu", "cpu", run.start_ns, run.stop_ns, ring.ops[run.op].name) for run in timeline.host_updates),
    ]


def _ops(timeline: Timeline, ring: Trace, lane: str) -> Iterator[Span]:
    """Yields the ops of one queue: communication is the lane of peers."""
    beside = set(timeline.communication)
    for index, (span, op, words) in enumerate(zip(timeline.ops, ring.ops, op_words(ring), strict=False)):
        if span.stop_ns > span.start_ns and (index in beside) == (lane == "peers"):
            cause = lane if lane == "peers" else op.phase if op.phase in _PHASES else "other"
            yield Span(lane, cause, span.start_ns, span.stop_ns, words, f"op {index}")


def _repeats(timeline: Timeline, ring: Trace) -> Iterator[Span]:
    for run in timeline.repeats:
        yield Span("compute", "recompute", run.start_ns, run.stop_ns, ring.ops[run.op].name, f"op {run.op} again")


def _transfers(timeline: Timeline, ring: Trace) -> Iterator[Span]:
    for span in timeline.transfers:
        name = ring.tensors[span.tensor].shown
        yield Span(span.link, span.link, span.start_ns, span.stop_ns, name, format_bytes(span.size_bytes))


def _stalls(timeline: Timeline, ring: Trace) -> Iterator[Span]:
    """Stalls of an op lie one after the other, from the end of the compute before it."""
    beside = set(timeline.communication)
    ends_ns = [0, *itertools.accumulate((0 if i in beside else op.stop_ns for i, op in enumerate(timeline.ops)), max)]
    at_ns = 0
    for op, stalls in itertools.groupby(sorted(timeline.stalls, key=lambda stall: stall.op), key=lambda stall: stall.op):
        end_ns = ends_ns[op] if op < len(ends_ns) else 0
        at_ns = max(at_ns, end_ns) if beside else end_ns  # between two ops of communication there is no compute
        for stall in stalls:
            before = ring.ops[op].name if op < len(ring.ops) else "the end of the step"
            yield Span(
                "stalls",
                stall.link,
                at_ns,
                at_ns + stall.duration_ns,
                awaited(stall, ring),
                f"before {before}, {format_seconds(stall.duration_ns / NS_PER_S)}",
            )
            at_ns += stall.duration_ns


def awaited(stall: Stall, ring: Trace) -> str:
    """Returns the name of what a stall waits for."""
    if stall.update >= 0 or stall.communication >= 0:
        return ring.ops[max(stall.update, stall.communication)].name
    return ring.tensors[stall.tensor].shown if stall.tensor >= 0 else "a tensor outside the trace"


def coarsened(spans: Iterable[Span], gap_ns: int) -> list[Span]:
    """Returns spans of which those of one lane and cause that overlap or lie this near are one; their names are counted."""
    groups: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        groups[span.lane, span.cause].append(span)
    merged: list[Span] = []
    for (lane, cause), group in groups.items():
        run: list[Span] = []
        stop_ns = 0
        for span in sorted(group, key=lambda span: span.start_ns):
            if run and span.start_ns > stop_ns + gap_ns:
                merged.append(_joined(lane, cause, run, stop_ns))
                run = []
            stop_ns = max(stop_ns, span.stop_ns) if run else span.stop_ns
            run.append(span)
        if run:
            merged.append(_joined(lane, cause, run, stop_ns))
    return merged


def _joined(lane: str, cause: str, run: list[Span], stop_ns: int) -> Span:
    if len(run) == 1:
        return run[0]
    busy_ns = end_ns = 0
    for span in run:
        busy_ns += max(span.stop_ns - max(span.start_ns, end_ns), 0)
        end_ns = max(end_ns, span.stop_ns)
    busy = busy_ns / (stop_ns - run[0].start_ns) if stop_ns > run[0].start_ns else 1.0
    name = f"{len(run)} from {run[0].name} to {run[-1].name}"
    return Span(lane, cause, run[0].start_ns, stop_ns, name, f"busy for {busy:.0%} of the time", busy)


def packed(spans: Iterable[Span]) -> dict[str, list[list[Span]]]:
    """Returns per lane as many rows as it takes for no two spans of one row to overlap."""
    rows: dict[str, list[list[Span]]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_ns):
        free = next((row for row in rows[span.lane] if row[-1].stop_ns <= span.start_ns), None)
        if free is None:
            rows[span.lane].append([span])
        else:
            free.append(span)
    return dict(rows)
