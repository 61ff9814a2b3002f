"""The kit's rows as the last section of docs/evidence.md: what was predicted before, and what a GPU then did, bad rows too.

cd scripts && python -m gpu_kit.page
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gpu_kit.places import RESULTS, ROOT
from gpu_kit.rows import CASES
from tieroff.units import format_bytes

PAGE = ROOT / "docs" / "evidence.md"
TITLE = "## Predicted before, measured after"
SITTINGS = {"h100": "NVIDIA H100 80GB", "h200": "NVIDIA H200"}
"""By the end of the files' names, the card."""


def section() -> str:
    """Returns the section, with a table for each card that was measured."""
    parts = [
        f"""{TITLE}

`scripts/gpu_evidence.py` trains models of today within less memory than their steps take. What `tieroff plan` says of each
row was written to `docs/results/expected_*.json` (`scripts/gpu_kit/expected.py`) and committed before the first row was
measured. The measured step is the median of the last quarter of a run's steps, by the GPU's own events, after a warm-up under
load; the peak is PyTorch's allocator's. Rows without a prediction are other libraries.
"""
    ]
    parts += [_sitting(name, card) for name, card in SITTINGS.items() if _measured_file(name).is_file()]
    return "\n".join(parts)


def _measured_file(name: str) -> Path:
    return RESULTS / f"gpu_evidence_{name}.json"


def _sitting(name: str, card: str) -> str:
    document = json.loads(_measured_file(name).read_text())
    expected = {row["key"]: row for row in json.loads((RESULTS / f"expected_{name}.json").read_text())["rows"]}
    rows = [_cells(row, expected.get(row["key"], {})) for row in document["rows"] if row["case"] in _with_rows()]
    header = ("row", "predicted", "nine in ten", "measured", "of it", "inside", "tokens/s", "peak", "moved", "stalls")
    head = f"### {card}, {document['date']}, PyTorch {document['torch']}"
    reasons = [
        f"* `{row['key']}`: {row['reason']}\n" for row in document["rows"] if row.get("step_s") is None and row.get("reason")
    ]
    return "\n".join([f"{head}\n\n{table(header, rows)}\n", *reasons])


def _with_rows() -> set[str]:
    return {case.name for case in CASES if case.rows}


def _cells(row: dict[str, Any], expected: dict[str, Any]) -> tuple[str, ...]:
    predicted, interval = expected.get("step_s"), expected.get("interval_s")
    step = row.get("step_s")
    if step is None:
        return (row["key"], _seconds(predicted), _interval(interval), row["status"], *[""] * 6)
    is_both = predicted is not None and interval is not None
    moved = sum((row.get("moved_bytes") or {}).values())
    return (
        row["key"],
        _seconds(predicted),
        _interval(interval),
        _seconds(step),
        f"{step / predicted:.2f}" if is_both else "",
        ("yes" if interval[0] <= step <= interval[1] else "no") if interval is not None else "",
        f"{row['tokens_per_s']:,.0f}",
        format_bytes(row["peak_bytes"]),
        format_bytes(moved) if moved else "",
        _seconds(row.get("stall_s")),
    )


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f} s"


def _interval(value: Sequence[float] | None) -> str:
    return "" if value is None else f"{value[0]:.2f}-{value[1]:.2f} s"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Writes the section anew and leaves the rest of the page."""
    others = PAGE.read_text().partition(f"\n{TITLE}")[0]
    PAGE.write_text(f"{others}\n{section()}")


if __name__ == "__main__":
    main()
