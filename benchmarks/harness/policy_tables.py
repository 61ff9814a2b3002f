"""The tables and the figure of docs/policies.md, from what benchmarks/bench_policies.py found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

from tieroff.planner.policies import all_policies, find_policy

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
PUBLISHED = {"demand": "uvm_lru_s", "flashneuron": "flashneuron_s", "deepum": "deepum_s", "g10": "g10_s"}
"""Policies whose times are published per cell, and their columns in published_times.csv."""

_SHORT = {"BERT_Base": "BERT", "VIT": "ViT", "ResNet152": "ResNet"}
_LEAST = "auto"

Rows = Sequence[dict[str, Any]]


def order(policies: Sequence[str]) -> list[str]:
    """Returns policies as they are shown: `auto`, the published ones by name, then this project's own parts."""
    return sorted(policies, key=lambda name: (name != _LEAST, not find_policy(name).is_published, name))


def with_tables(page: str, found: dict[str, Any]) -> str:
    """Returns a page with what is between its markers replaced by the tables.

    Raises:
        ValueError: the page does not have both markers once, in order.
    """
    counts = page.count(BEGIN), page.count(END)
    if counts != (1, 1) or page.index(BEGIN) > page.index(END):
        raise ValueError(f"expected {BEGIN} and {END} once each and in this order, found {counts[0]} and {counts[1]}")
    before, after = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
    return f"{before}\n\n{tables(found)}\n{after}"


def tables(found: dict[str, Any]) -> str:
    """Returns all tables as Markdown."""
    rows: Rows = found["rows"]
    parts = [
        f"Made on {found['date']} by `{_command(found)}` (effort {found['effort']}). All figures are tieroff's, except the "
        "columns named published.",
        "### One row per policy",
        "Planning is CPU time in seconds, with bound and simulation, because the machine was shared. It is left out where it "
        "was not measured (`plan_cpu_s` is null in the file). For `auto` it excludes the other rows.",
        _summary(rows),
        "### step/ideal on the traces of G10",
        "Under the common model, with 40 GiB of device memory and 128 GiB of host memory. 1 is the sum of the ops' times; a "
        "dash means that the policy's rule does not bring the step under the budget. The bound is the best one proven at this "
        "effort.",
        _matrix([row for row in rows if row["part"] == "g10"]),
        "### step/ideal on traces of this project's own models",
        "Device budgets are shares of the peak of live bytes; the executor is this project's runtime.",
        _matrix([row for row in rows if row["part"] == "own"]),
        "### Beside the published times",
        "Seconds per step under each policy's own options, and what the authors of G10 published for it.",
        _beside(rows),
    ]
    return "\n\n".join(parts) + "\n"


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in heads[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, rule, *lines))


def _policies(rows: Rows) -> list[str]:
    return order(list(dict.fromkeys(row["policy"] for row in rows)))


def _command(found: dict[str, Any]) -> str:
    """Returns the command, under the folder where the benchmarks lie today."""
    return str(found["command"]).replace("scripts/bench_", "benchmarks/bench_")


def _summary(rows: Rows) -> str:
    """One row per policy: what it declares, how many steps it brings under their budget, and how near to the ideal."""
    lines = []
    for policy in _policies(rows):
        own = [row for row in rows if row["policy"] == policy]
        met = [row for row in own if row["step_s"] is not None]
        declared = find_policy(policy)
        share = statistics.geometric_mean([row["ideal_s"] / row["step_s"] for row in met]) if met else None
        longest = max((row["plan_cpu_s"] for row in own if row["plan_cpu_s"] is not None), default=None)
        lines.append(
            (
                f"`{policy}`",
                declared.paper or "-",
                declared.decides.value,
                ", ".join(declared.options.words()) or "common",
                ", ".join(declared.assumes.words()) or "-",
                f"{len(met)} of {len(own)}",
                "-" if share is None else f"{share:.3f}",
                "-" if longest is None else f"{longest:.1f}",
            )
        )
    means = ("steps met", "ideal/step, geometric mean of these", "planning, s, at most")
    heads = ("policy", "paper", "decides", "own options", "also assumes", *means)
    return _table(heads, lines)


def column_name(row: dict[str, Any]) -> str:
    """Returns the short name of a row's column: BERT 256, or gpt 50%."""
    if row["part"] == "own":
        return f"{row['cell']} {row['share']:.0%}"
    model, _, batch = row["cell"].rpartition("-b")
    return f"{_SHORT.get(model, model)} {batch}"


def _matrix(rows: Rows) -> str:
    columns = list(dict.fromkeys(column_name(row) for row in rows))
    cells = {(row["policy"], column_name(row)): row for row in rows}
    lines: list[list[str]] = []
    for policy in _policies(rows):
        found = [cells.get((policy, column)) for column in columns]
        lines.append([f"`{policy}`", *(_share(row, "step_s") for row in found)])
    best = [cells.get((_LEAST, column)) for column in columns]
    lines.append(["bound", *(_share(row, "bound_s") for row in best)])
    return _table(("policy", *columns), lines)


def _share(row: dict[str, Any] | None, key: str) -> str:
    return "-" if row is None or row[key] is None else f"{row[key] / row['ideal_s']:.3f}"


def _beside(rows: Rows) -> str:
    lines = []
    for policy in PUBLISHED:
        for row in rows:
            if row["policy"] != policy or row["part"] != "g10" or "published_s" not in row:
                continue
            ours, theirs = row["faithful_step_s"], row["published_s"]
            text = ["does not fit" if time is None else f"{time:.4f}" for time in (ours, theirs)]
            off = "" if ours is None or theirs is None else f"{ours / theirs - 1:+.1%}"
            lines.append((f"`{policy}`", column_name(row), *text, off))
    return _table(("policy", "trace", "ours, s", "published, s", "ours over published"), lines)


def broken(rows: Rows, plan_s_max: float) -> list[str]:
    """Returns what should not be: rows faster than `auto`, and searches that take too long; empty if nothing is."""
    messages = []
    best = {(row["part"], column_name(row)): row["step_s"] for row in rows if row["policy"] == _LEAST}
    for row in rows:
        where = row["part"], column_name(row)
        if row["step_s"] is None or row["policy"] == _LEAST:
            continue
        if where in best and (best[where] is None or row["step_s"] < best[where]):
            messages.append(f"{row['policy']} takes {row['step_s']} s on {where[1]}, less than auto with {best[where]} s")
        if row["part"] == "g10" and find_policy(row["policy"]).is_published and (row["plan_cpu_s"] or 0.0) > plan_s_max:
            messages.append(f"{row['policy']} planned {where[1]} in {row['plan_cpu_s']:.1f} s, more than {plan_s_max:.0f} s")
    return messages


def figure(found: dict[str, Any]) -> str:
    """Returns an SVG: step/ideal of every policy on every step it brings under its budget, with the geometric mean."""
    rows = [row for row in found["rows"] if row["step_s"] is not None]
    names = _policies(found["rows"])
    left, width, pitch, top = 130, 560, 18, 34
    most = max([row["step_s"] / row["ideal_s"] for row in rows], default=2.0)

    def x(share: float) -> float:
        return left + width * math.log(share) / math.log(most) if most > 1 else left

    height = top + pitch * len(names) + 24
    title = "step / ideal under the common model (logarithmic): a dot per step, a bar at the geometric mean"
    box = f'viewBox="0 0 {left + width + 110} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="14">{title}</text>',
    ]
    for tick in (1, 1.5, 2, 3, 5, 10, 20, 50):
        if tick <= most:
            parts.append(f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{top - 8}" y2="{height - 20}" stroke="#ddd"/>')
            parts.append(f'<text x="{x(tick):.1f}" y="{height - 6}" text-anchor="middle">{tick}</text>')
    for index, name in enumerate(names):
        y = top + pitch * index
        own = [row["step_s"] / row["ideal_s"] for row in rows if row["policy"] == name]
        total = sum(row["policy"] == name for row in found["rows"])
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        parts.extend(f'<circle cx="{x(one):.1f}" cy="{y}" r="3" fill="#1f6fb4" fill-opacity="0.45"/>' for one in own)
        if own:
            mean = x(statistics.geometric_mean(own))
            parts.append(f'<line x1="{mean:.1f}" x2="{mean:.1f}" y1="{y - 7}" y2="{y + 7}" stroke="#c0392b" stroke-width="2"/>')
        parts.append(f'<text x="{left + width + 12}" y="{y + 4}" fill="#555">{len(own)} of {total} met</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def policy_names() -> list[str]:
    """Returns every policy of this project."""
    return order(list(all_policies()))
