"""The page of all ranks: lanes of each on one axis of time, and who waited for whom."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tieroff.core.io.json_files import write_whole
from tieroff.core.io.run_folder import Run
from tieroff.report import figures
from tieroff.report.lanes import Span, coarsened, spans_of
from tieroff.report.page import check_page, document, figure_html, section_html, table_html
from tieroff.report.ranks.steps import RankStep, steps_of
from tieroff.report.tables import Table
from tieroff.units import NS_PER_S, format_seconds

_LANES = (
    "The last planned step of each rank, by the machine's clock. A stall named another rank is a wait for the rank that called "
    "a collective last; one named communication is the exchange itself. FSDP2's collectives on the CPU have a lane of their "
    "own. Any other op in which a rank calls a collective includes the wait, so compute is drawn beside it."
)
_WAITS = (
    "A wait begins with a rank's own call of a collective, or with the last op or call that it began or ended after that, and "
    "ends when the last rank calls. It is the most that the rank can have waited: a collective that was called ahead of need "
    "(a bucket of DDP) goes on beside compute. While several are open, time counts for the one that ends first. Broadcasts, "
    "other collectives with a root, and those of NCCL are not counted."
)


def write_ranks_page(path: Path, runs: Mapping[int, Run]) -> None:
    """Writes the page of all ranks.

    Args:
        path: see `check_page`; a file that is there is replaced as a whole.
        runs: by rank, as `load_ranks` returns them.

    Raises:
        ConfigError: see `check_page`.
        StateError: see `steps_of`.
        OSError: the file cannot be written; the previous one is unchanged.
    """
    check_page(path)
    write_whole(path, ranks_page(runs))


def ranks_page(runs: Mapping[int, Run]) -> str:
    """Returns the text of the page; every text that comes from the runs is escaped."""
    steps = steps_of(runs)
    title = f"{steps[0].run.trace.name or 'step'}: {len(steps)} of {steps[0].collectives.world} ranks"
    return document(
        title,
        (
            *_summary(steps),
            *section_html("The step in time", "lanes", _LANES),
            figure_html(ranks_figure(steps), "figure-lanes"),
            *section_html("Waits for other ranks", "waits", _WAITS),
            table_html(waits_table(steps)),
        ),
    )


def _summary(steps: Sequence[RankStep]) -> Iterator[str]:
    yield f'<ul class="summary"><li>{html.escape(longest_awaited(steps))}</li></ul>'
    yield from (f'<p class="note">{html.escape(note)}</p>' for note in notes_on(steps))


def longest_awaited(steps: Sequence[RankStep]) -> str:
    """Returns a sentence on the rank that others waited for longest."""
    total: dict[int, int] = defaultdict(int)
    for step in steps:
        for awaited, waited_ns in step.waited_ns().items():
            total[awaited] += waited_ns
    if not total:
        return "No rank was seen to wait for another one."
    most = max(total, key=lambda rank: total[rank])
    waiting = [(step.waited_ns()[most], step) for step in steps if most in step.waited_ns()]
    waited_ns, step = max(waiting, key=lambda pair: pair[0])
    share = waited_ns / max(step.step_ns, 1)
    return (
        f"The others waited longest for rank {most}: rank {step.rank} for up to {format_seconds(waited_ns / NS_PER_S)}, "
        f"{share:.0%} of its step."
    )


def notes_on(steps: Sequence[RankStep]) -> Iterator[str]:
    """Yields what limits the truth of the waits."""
    world = steps[0].collectives.world
    if missing := sorted(set(range(world)) - {step.rank for step in steps}):
        yield f"{_named(missing)} of {world} not in this folder: where one of them called last, another is named in its place."
    if len({step.collectives.machine for step in steps}) > 1:
        yield (
            "The ranks ran on several machines, whose clocks are taken as they are: lanes and waits between machines are wrong "
            "by what these differ."
        )
    if silent := [step.rank for step in steps if not step.collectives.calls]:
        yield f"No collective is known of {_named(silent)}: torch's flight recorder had none of gloo's."
    if cut := [step.rank for step in steps if not step.is_recorded_whole]:
        yield f"The first collectives of the step are not known of {_named(cut)}: set TORCH_FR_BUFFER_SIZE higher (2000)."
    if coarse := [step.rank for step in steps if not step.run.was_timed]:
        yield f"Nothing moved on {_named(coarse)}, so no op was timed: compute between a call and its wait counts as waiting."


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def ranks_figure(steps: Sequence[RankStep]) -> Any:
    """Returns lanes of each rank, one below the other on one axis of time."""
    begin_ns, end_ns = min(step.start_ns for step in steps), max(step.stop_ns for step in steps)
    rows = {f"rank {step.rank}": _spans(step, step.start_ns - begin_ns) for step in steps}
    if sum(map(len, rows.values())) > figures.SPANS_MAX:
        rows = {name: coarsened(spans, (end_ns - begin_ns) // figures.GAPS_PER_STEP) for name, spans in rows.items()}
    return figures.lanes_of(rows, end_ns - begin_ns, "from the start of the first rank's step")


def _spans(step: RankStep, ahead_ns: int) -> list[Span]:
    own = spans_of(step.run.timeline, step.run.trace)
    if not step.run.was_timed:
        own = [Span("compute", "other", 0, step.step_ns, "the whole step", "nothing moved, so no op was timed")]
    waits = [
        Span(
            "stalls",
            "rank",
            wait.start_ns - step.start_ns,
            wait.stop_ns - step.start_ns,
            f"rank {wait.awaited}",
            f"{wait.call.name} {wait.call.number} {wait.call.shape}",
        )
        for wait in step.waits
    ]
    own = [
        part for span in own for part in (_outside(span, waits) if (span.lane, span.cause) == ("stalls", "peers") else (span,))
    ]
    own += waits
    return [replace(span, start_ns=span.start_ns + ahead_ns, stop_ns=span.stop_ns + ahead_ns) for span in own]


def _outside(stall: Span, waits: Sequence[Span]) -> Iterator[Span]:
    """Yields what of a stall lies outside of waits, which are in order of time and do not overlap."""
    at_ns = stall.start_ns
    for wait in waits:
        if at_ns < wait.stop_ns and wait.start_ns < stall.stop_ns:
            if at_ns < wait.start_ns:
                yield replace(stall, start_ns=at_ns, stop_ns=wait.start_ns)
            at_ns = wait.stop_ns
    if at_ns < stall.stop_ns:
        yield replace(stall, start_ns=at_ns)


def waits_table(steps: Sequence[RankStep]) -> Table:
    """Returns per rank for whom it waited, and for how long at most."""
    rows: list[tuple[str, ...]] = []
    for step in steps:
        took = format_seconds(step.step_ns / NS_PER_S)
        waited = step.waited_ns()
        if not waited:
            rows.append((str(step.rank), took, "no rank", "", "", "", ""))
        for awaited, waited_ns in waited.items():
            waits = [wait for wait in step.waits if wait.awaited == awaited]
            longest = max(waits, key=lambda wait: wait.stop_ns - wait.start_ns)
            longest_s = (longest.stop_ns - longest.start_ns) / NS_PER_S
            rows.append(
                (
                    str(step.rank),
                    took,
                    f"rank {awaited}",
                    format_seconds(waited_ns / NS_PER_S),
                    f"{waited_ns / max(step.step_ns, 1):.1%}",
                    str(len(waits)),
                    f"{format_seconds(longest_s)} in {longest.call.name} {longest.call.number} {longest.call.shape}",
                )
            )
    heads = ("rank", "its step", "waited for", "for up to", "of its step", "waits", "longest")
    return Table(heads, tuple(rows))
