"""Writes the tables of docs/benchmarks.md and of the README from docs/results/*.json.

A page marks where a table goes with `<!-- table: NAME -->` and `<!-- end -->`; what lies between is replaced. NAME is a file of
docs/results without its ending, or `readme`. A test compares the pages with what this script makes, so they cannot drift.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tieroff.units import format_bytes, format_seconds

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "docs/results"
PAGES = (ROOT / "README.md", ROOT / "docs/benchmarks.md")
G10_HOST_BYTES = 128 * 2**30  # of the three amounts in bench_plan*.json, the one of G10's main table
_MARKED = re.compile(r"(<!-- table: ([\w.]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Document = dict[str, Any]
Row = dict[str, Any]


def load(name: str) -> Document:
    """Returns a document of docs/results."""
    found: Document = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def fill(page: str) -> str:
    """Returns a page with every marked table made again."""
    return _MARKED.sub(lambda match: f"{match[1]}\n{make_table(match[2])}\n\n{match[3]}", page)


def make_table(name: str) -> str:
    """Returns the table of one document, followed by the line that says when, how and where it was measured.

    Raises:
        KeyError: no table is known under this name.
    """
    for prefix, make in _TABLES.items():
        if name.startswith(prefix):
            return make(name)
    raise KeyError(f"no table for {name}; known: {', '.join(_TABLES)}")


def conditions(found: Document) -> str:
    """Returns one line: command, date and machine."""
    machine = found.get("machine", "")
    about = machine if "processor" in machine else found
    # The benches lay in scripts/ when some of these commands ran.
    command = found.get("command", "python benchmarks/bench_io.py").replace("scripts/bench_", "benchmarks/bench_")
    command = re.sub(r" --(json|page|figure) \S+", "", command)
    cores = f"{about['cores']} shared cores" if "cores" in about else machine
    names = [f"{key} {about[key]}" for key in ("torch", "deepspeed") if about.get(key)]
    return "; ".join([f"`{command}`", found["date"], cores, *names])


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table whose first column is aligned left and the others right."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _seconds(value: float | None) -> str:
    return "" if value is None else format_seconds(value) if value else "0"


def _peak(row: Row) -> str:
    budget = row["budget_bytes"]
    of_budget = f" ({row['peak_bytes'] / budget:.0%} of budget)" if budget else ""
    return format_bytes(row["peak_bytes"]) + of_budget


def _losses(row: Row) -> str:
    if row["losses_equal"]:
        return "equal"
    return f"differ by {row['loss_gap_max']:.0e}"


def _readme(name: str) -> str:
    found = load("bench_step_gpt2")
    rows = [row for row in found["rows"] if row["budget"] != "100%"]
    heads = ("", "budget", "peak memory of the process", "tokens/s", "of plain", "losses")
    cells = [
        (
            "plain PyTorch" if row["budget_bytes"] is None else f"tieroff, {row['budget']}",
            "none" if row["budget_bytes"] is None else format_bytes(row["budget_bytes"]),
            _peak(row),
            f"{row['tokens_per_s']:.0f}",
            "" if row["budget_bytes"] is None else f"{row['relative']:.0%}",
            "" if row["budget_bytes"] is None else _losses(row),
        )
        for row in rows
    ]
    return f"{table(heads, cells)}\n\n{conditions(found)}."


def _steps(name: str) -> str:
    found = load(name)
    heads = ("budget", "tokens/s", "of plain", "step", "predicted", "lower bound", "stalls", "moved per step", "peak", "losses")
    cells = [
        (
            row["budget"],
            f"{row['tokens_per_s']:.0f}",
            f"{row['relative']:.0%}",
            *(_seconds(row[key]) for key in ("step_s", "predicted_s", "bound_s", "stall_s")),
            format_bytes(sum(row["moved_bytes"].values())),
            _peak(row),
            _losses(row),
        )
        for row in found["rows"]
    ]
    return f"{table(heads, cells)}\n\n{conditions(found)}."


def _peers(name: str) -> str:
    found = load(name)
    heads = ("", "tokens/s", "of plain", "step", "stalls", "peak memory", "of plain's", "losses")
    cells = [
        (
            row["peer"],
            f"{row['tokens_per_s']:.0f}",
            f"{row['relative']:.0%}",
            _seconds(row["step_s"]),
            _seconds(row["stall_s"]),
            _peak(row),
            f"{row['peak_relative']:.0%}",
            _losses(row),
        )
        for row in found["rows"]
        if row["status"] == "ok"
    ]
    return f"{table(heads, cells)}\n\n{conditions(found)}."


def _io(name: str) -> str:
    found = load(name)
    heads = ("engine", "transfers", "block", "GB/s", "raw loop, GB/s", "ratio", "range", "control", "usable")
    cells = [
        (
            row["subject"],
            (row["kind"] if row["kind"] == row["way"] else "both ways") + (", beside a matmul" if row["matmul"] else ""),
            format_bytes(row["block_bytes"]),
            f"{row['bytes_per_s'] / 1e9:.2f}",
            f"{row['raw_bytes_per_s'] / 1e9:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['low']:.2f} to {row['high']:.2f}",
            f"{row['control_ratio']:.2f}",
            "no" if row["is_void"] else "yes",
        )
        for row in found["rows"]
        if row["way"] in (row["kind"], "sum")
    ]
    drive = f"{found['drive']}, {found['file_system']}"
    return f"{table(heads, cells)}\n\n{conditions(found)}; drive {drive}; compared with {found['reference']}."


def _plans(name: str) -> str:
    moves, full = ({row["cell"]: row for row in _g10_rows(load(one))} for one in ("bench_plan_moves", "bench_plan"))
    heads = ("trace", "ideal", "G10, published", "`auto`, moves only", "lower bound", "`auto`, with recompute", "planning")
    cells = []
    for cell, row in moves.items():
        times = (row["ideal_s"], row["g10_s"], row["step_s"], row["bound_s"], full[cell]["step_s"])
        cells.append((cell, *(f"{one:.3f}" for one in times), f"{full[cell]['plan_s']:.1f}"))
    shares = [_mean(row["ideal_s"] / row[key] for row in moves.values()) for key in ("g10_s", "step_s")]
    with_recompute = _mean(full[cell]["ideal_s"] / full[cell]["step_s"] for cell in moves)
    numbers = ["1", *(f"{one:.3f}" for one in shares), "", f"{with_recompute:.3f}", ""]
    cells.append((f"ideal / step, geometric mean of {len(moves)}", *numbers))
    return f"{table(heads, cells)}\n\n{conditions(load('bench_plan_moves'))}; all times in seconds."


def _g10_rows(found: Document) -> list[Row]:
    return [row for row in found["rows"] if row["host_bytes"] == G10_HOST_BYTES and row["g10_s"] is not None]


def _mean(shares: Iterable[float]) -> float:
    logs = [math.log(one) for one in shares]
    return math.exp(sum(logs) / len(logs))


def _foresight(name: str) -> str:
    found = load(name)
    ways = ("demand", "auto")
    heads = ("model", *(f"{what}, {way}" for what in ("step", "stalls", "faults") for way in ways), "losses")
    cells = [
        (
            row["model"],
            *(_seconds(row[way][key]) for key in ("step_s", "stall_s") for way in ways),
            *(str(row[way]["faults"]) for way in ways),
            "equal" if all(row[way]["losses_equal"] for way in ways) else "DIFFERENT",
        )
        for row in found["rows"]
    ]
    return f"{table(heads, cells)}\n\n{conditions(found)}; drive slowed to {found['rate_bytes_per_s'] / 1e6:.0f} MB/s each way."


def _host(name: str) -> str:
    found = load(name)
    has_wall = any("wall_of_plain" in row for row in found["rows"])
    heads = (
        *("model", "backend", "budget", "plain", "step", "mean", "of plain", "95 % interval"),
        *(["wall, of plain"] if has_wall else []),
        *("tensors that move", "losses"),
    )
    cells = [
        (
            row["model"],
            row["backend"],
            row["budget"],
            *(_seconds(row[key]) for key in ("plain_s", "step_s", "mean_s")),
            f"{row['of_plain'][0]:.2f}",
            "{1:.2f} to {2:.2f}".format(*row["of_plain"]),
            *([f"{row['wall_of_plain']:.2f}"] if has_wall else []),
            str(row["moved_tensors"]),
            "equal" if row["losses_equal"] else "DIFFERENT",
        )
        for row in found["rows"]
    ]
    return f"{table(heads, cells)}\n\n{conditions(found)}."


def _recompute(name: str) -> str:
    found = load(name)
    heads = ("layers", "recompute, predicted", "recompute, measured", "step, moving", "step, recomputing", "losses")
    times = ("predicted_s", "measured_s", "step_moving_s", "step_again_s")
    cells = [
        (", ".join(row["layers"]), *(_seconds(row[key]) for key in times), "equal" if row["losses_equal"] else "DIFFERENT")
        for row in found["rows"]
    ]
    return f"{table(heads, cells)}\n\n{conditions(found)}; drive slowed to {found['rate_bytes_per_s'] / 1e6:.0f} MB/s each way."


def _scale(name: str) -> str:
    found = load(name)
    heads = ("tensors", "ops", "executor", "budget", "planning, CPU time", "planner's memory", "transfers")
    cells = [
        (
            f"{row['tensor_count']:,}",
            f"{row['op_count']:,}",
            row["executor"],
            f"{row['share']:.0%} of peak",
            _seconds(row["cpu_s"]),
            format_bytes(row["peak_bytes"]),
            f"{row['transfer_count']:,}",
        )
        for row in found["rows"]
    ]
    return f"{table(heads, cells)}\n\n{conditions(found)}."


def _huge_pages(name: str) -> str:
    found = load(name)
    heads = ("huge pages", "step", "compute", "stalls", "minor faults", "system time", "peak")
    cells = [
        (
            "on" if row["huge_pages"] else "off",
            *(_seconds(row[key]) for key in ("step_s", "compute_s", "stall_s")),
            f"{row['minor_faults']:,}",
            _seconds(row["system_s"]),
            format_bytes(row["peak_bytes"]),
        )
        for row in found["rows"]
    ]
    return f"{table(heads, cells)}\n\n{conditions(found)}."


def _clock(name: str) -> str:
    found = load(name)
    heads = (
        "model",
        "budget",
        "device",
        "peak",
        "moved per step",
        "compute",
        "stalls",
        "predicted",
        "measured",
        "of predicted",
        *(["ahead"] if any("ahead" in row for row in found["rows"]) else []),
    )
    cells = [
        (
            row["model"],
            row["budget"],
            found.get("gpu") or f"H100 / {found['slower']:g}",
            *(format_bytes(row[key]) for key in ("peak", "moved")),
            *(_seconds(row[key]) for key in ("compute", "waits", "predicted", "measured")),
            f"{row['measured/predicted']:.3f}",
            *([_seconds(row["ahead"])] if "ahead" in row else []),
        )
        for row in found["rows"]
    ]
    return f"{table(heads, cells)}\n\n{conditions(found)}."


def _updates(name: str) -> str:
    found = load(name)
    rows = [
        (
            f"{row['optimizer']}, {row['type']}, {row['arithmetic']}",
            str(row["threads"]),
            f"{row['copy_bytes_per_s'] / 1e9:.1f}",
            f"{row['update_bytes_per_s'] / 1e9:.1f}",
            f"{row['of_copy']:.2f}",
            f"{row['state_bytes_per_s'] / 1e9:.1f}",
        )
        for row in found["rows"]
    ]
    heads = ("optimizer", "threads", "copy, GB/s", "update, GB/s", "of the copy", "state, GB/s")
    return table(heads, rows) + "\n\n" + conditions(found)


def _update_bits(name: str) -> str:
    found = load(name)
    modes = list(dict.fromkeys(row["mode"] for row in found["rows"]))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in found["rows"]:
        shares = [(share, name) for name, (_, share) in row.get("found_out", {}).items()]
        none = f"none ({min(shares)[1]}: {min(shares)[0]:.0e} differ)" if shares else row.get("refused", "none")
        first = row["equal"][0] if row["equal"] else none
        cells.setdefault((row["optimizer"], row["type"]), {})[row["mode"]] = first
    lines = [(f"{optimizer}, {kind}", *(by_mode[mode] for mode in modes)) for (optimizer, kind), by_mode in cells.items()]
    return table(("optimizer", *modes), lines) + "\n\n" + conditions(found)


_TABLES: dict[str, Callable[[str], str]] = {
    "readme": _readme,
    "bench_step": _steps,
    "bench_peers": _peers,
    "bench_io": _io,
    "bench_plan": _plans,
    "bench_clock": _clock,
    "bench_foresight": _foresight,
    "bench_host": _host,
    "bench_recompute": _recompute,
    "bench_scale": _scale,
    "bench_update": _updates,
    "update_bits": _update_bits,
    "huge_pages": _huge_pages,
}
"""By the beginning of the document's name; no key is the beginning of another one."""


def main() -> None:
    """Fills the tables of all pages."""
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
