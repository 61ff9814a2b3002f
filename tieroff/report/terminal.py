"""What the command line and the scripts show: tables on standard output; on standard error how far long work is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tieroff.units import format_bytes, format_seconds

PIPED_WIDTH = 240
"""Columns of a table that goes to a file or another program, where rich would take 80."""

# Columns, with their heads, of tables that fit 80 characters.
_NARROW = {
    "policy": "policy",
    "step_s": "step",
    "bound_s": "bound",
    "stall_s": "stall",
    "peak_device_bytes": "device",
    "faithful_step_s": "faithful",
}

Report = Callable[[str, float | None], None]
"""Called with the current activity and the share that is done; None if unknown."""


@contextlib.contextmanager
def progress() -> Iterator[Report]:
    """Yields a function that shows the current activity and the share that is done: a bar on a terminal, else nothing.

    The bar is on standard error and is gone when the work is over, so standard output holds results and nothing else.
    """
    console = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def report(what: str, share: float | None) -> None:
            bar.update(task, description=what, total=None if share is None else 1.0, completed=share or 0.0)

        yield report


def make_console(*, markup: bool = True) -> Console:
    """Returns a console on standard output; wide enough for the tables where there is no terminal."""
    console = Console(markup=markup)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    return console


def make_table(title: str | None, heads: Sequence[str], text_columns: int = 1) -> Table:
    """Returns an empty table; the first columns hold text and are to the left, the others numbers."""
    table = Table(title=title, title_justify="left")
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index < text_columns else "right", no_wrap=index < text_columns)
    return table


def print_table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Prints lines of text under heads; the first column is to the left, others to the right."""
    table = make_table(title or None, columns)
    for line in lines:
        table.add_row(*line)
    make_console(markup=False).print(table)


def print_rows(rows: Sequence[dict[str, Any]], *, is_wide: bool = False) -> None:
    """Prints rows of `plan` and `compare` with sizes and times for people, in 80 columns unless `is_wide`.

    In the narrow table a row without a step time has its status in that place.
    """

    def shown(row: dict[str, Any], key: str) -> str:
        value = row.get(key)
        if value is None:
            return str(row.get("status", "-")) if key == "step_s" and not is_wide else "-"
        if key.endswith("_bytes"):
            return format_bytes(float(str(value)))
        return format_seconds(float(str(value))) if key.endswith("_s") else str(value)

    every = [column for column in rows[0] if column != "reason"] if rows else ["policy"]
    columns = every if is_wide else [column for column in every if column in _NARROW]
    words = [column.removesuffix("_bytes").removesuffix("_s").replace("_", " ") for column in columns]
    heads = words if is_wide else [_NARROW[column] for column in columns]
    print_table("", heads, [[shown(row, column) for column in columns] for row in rows])
    if columns != every:
        make_console(markup=False).print(f"{len(every) - len(columns)} more columns with --wide or --json")
