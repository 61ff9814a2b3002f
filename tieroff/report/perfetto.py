"""A run's timelines in the JSON format that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tieroff.core.io.json_files import write_whole
from tieroff.core.io.run_folder import Run
from tieroff.core.timeline import Timeline
from tieroff.core.trace import Trace
from tieroff.errors import ConfigError
from tieroff.report.lanes import LANES, packed, spans_of

_ROWS_PER_LANE = 1000
_NS_PER_US = 1000


def write_perfetto(path: Path, run: Run, predicted: Timeline | None = None) -> None:
    """Writes the measured and the predicted step, a process each: lanes as threads, bytes per tier as counters.

    Args:
        path: the file; one that is there is replaced as a whole.
        run: the run to write.
        predicted: the simulator's timeline of the run's plan, if there is one.

    Raises:
        ConfigError: the path lies in no folder that exists, or there is no timeline at all.
        OSError: the file cannot be written; the previous one is unchanged.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: the folder {path.parent} does not exist")
    ring = run.trace
    timelines = {"measured": run.timeline if run.was_timed else None, "predicted": predicted}
    events = [
        event
        for process, (name, timeline) in enumerate(timelines.items(), 1)
        if timeline is not None
        for event in _events(process, f"{name}: {run.trace.name or 'step'}", timeline, ring)
    ]
    if not events:
        raise ConfigError(
            "--perfetto: this run has no timeline: it moved nothing, so none was measured, and the machine that it was planned "
            "for is not known"
        )
    write_whole(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n")


def _events(process: int, title: str, timeline: Timeline, ring: Trace) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": title}}
    rows = packed(spans_of(timeline, ring))  # spans of one thread may not overlap
    for lane in rows:
        for number, row in enumerate(rows[lane]):
            thread = LANES.index(lane) * _ROWS_PER_LANE + number + 1
            name = lane if not number else f"{lane} {number + 1}"
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": {"sort_index": thread}}
            for span in row:
                yield {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.cause,
                    "pid": process,
                    "tid": thread,
                    "ts": span.start_ns / _NS_PER_US,
                    "dur": (span.stop_ns - span.start_ns) / _NS_PER_US,
                    "args": {"detail": span.detail},
                }
    for tier, held in timeline.memory.items():
        for op, size_bytes in zip(timeline.ops, held, strict=False):
            yield {
                "ph": "C",
                "name": f"{tier.value} bytes",
                "pid": process,
                "tid": 0,
                "ts": op.start_ns / _NS_PER_US,
                "args": {"bytes": size_bytes},
            }
