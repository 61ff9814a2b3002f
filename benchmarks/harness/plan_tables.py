"""The tables that benchmarks/bench_plan.py prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from tieroff.report.terminal import make_table
from tieroff.units import format_bytes, format_seconds

_SHARES = ("ideal/step", "above bound", "recompute", "planning")
_LINKS = {"out": "d2h", "in": "h2d", "written": "nvme_write", "read": "nvme_read"}
"""Heads of the columns of bytes per step, and the links."""


def show(console: Console, found: dict[str, Any]) -> None:
    """Prints the tables."""
    if found["rows"]:
        heads = ("trace", "host", "auto", "G10, published", "bound", "ideal", *_SHARES, *_LINKS)
        table = make_table(f"traces of G10, {format_bytes(found['device_bytes'])} of device memory", heads, 1)
        for row in found["rows"]:
            times = (_step(row), _seconds(row["g10_s"]))
            table.add_row(row["cell"], format_bytes(row["host_bytes"]), *times, *_shares(row))
        console.print(table)
        for one in found["summary"]:
            console.print(_summary_line(one), highlight=False)
    if found["own"]:
        heads = ("trace", "machine", "executor", "budget", "auto", "bound", "ideal", *_SHARES, *_LINKS)
        table = make_table("traces of PyTorch models, recorded on a CPU", heads, 3)
        for row in found["own"]:
            names = (row["cell"], row["machine"], row["executor"], f"{row['share']:.0%}")
            table.add_row(*names, _step(row), *_shares(row))
        console.print(table)
    if found["noise"]:
        title = "ops that take other times than planned for: largest step/ideal over some seeds"
        table = make_table(title, ("trace", "noise", "step/ideal", "planned for them"), 1)
        for row in found["noise"]:
            shares = (f"{row['noise']:.0%}", *(f"{row[key]:.4f}" for key in ("step_over_ideal", "informed_step_over_ideal")))
            table.add_row(row["cell"], *shares)
        console.print(table)
    console.print(found["left_out"], highlight=False)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _step(row: dict[str, Any]) -> str:
    return _seconds(row["step_s"]) if row["step_s"] is not None else str(row["status"])


def _shares(row: dict[str, Any]) -> list[str]:
    if row["step_s"] is None:
        return ["-"] * (2 + len(_SHARES) + len(_LINKS))
    moved = [format_bytes(row[f"{link}_bytes"]) for link in _LINKS.values()]
    times = [_seconds(row["bound_s"]), _seconds(row["ideal_s"])]
    spent = [_seconds(row["recompute_s"]), format_seconds(row["plan_s"])]
    return [*times, f"{row['ideal_share']:.4f}", f"{row['above_bound']:.2%}", *spent, *moved]


def _summary_line(one: dict[str, Any]) -> str:
    def shown(key: str, form: str) -> str:
        return "-" if one[key] is None else format(one[key], form)

    slower = ", ".join(one["slower_than_g10"]) or "none"
    return (
        f"host {format_bytes(one['host_bytes'])}: geometric mean of ideal/step {shown('ideal_share', '.4f')} over "
        f"{one['cells']} traces, {shown('table_ideal_share', '.4f')} over {one['table_cells']} of the published table; "
        f"where G10 is published ({one['published_cells']}): {shown('published_ideal_share', '.4f')}, "
        f"G10 {shown('g10_ideal_share', '.4f')}, slower than G10: {slower}; at most {shown('above_bound_max', '.2%')} above "
        f"the bound; planning at most {shown('plan_s_max', '.2f')} s; infeasible: {one['infeasible']}"
    )
