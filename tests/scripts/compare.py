"""Runs the programs plain and wrapped, each in a process of its own, and writes the table of docs/works-with.md.

usage: python -m tests.scripts.compare [PROGRAM ...]   (default: all, which also writes the table)
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PAGE = ROOT / "docs/works-with.md"
PROGRAMS = tuple(sorted(path.stem for path in (HERE / "programs").glob("*.py")))
BUDGETS = ("50%", "min")
# One op of these needs more than half of the step's peak: an LSTM's, or a convolution's work space.
LARGE_OPS = {"recurrent": ("80%", "min"), "workers": ("70%", "min")}
_MARKS = ("<!-- table -->\n", "<!-- end -->")
_MIB = 1 << 20


def budgets_of(program: str) -> tuple[str, ...]:
    """Returns the budgets that a program is trained in."""
    return LARGE_OPS.get(program, BUDGETS)


def runs(program: str, budgets: Sequence[str], machine: Path | None = None) -> list[dict[str, Any]]:
    """Runs a program with each budget, in processes and folders of their own; returns what each left, and its figures.

    Without a machine file each measures the links: two seconds, and gigabytes through the drive.

    Raises:
        RuntimeError: one ended with an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.scripts.run", program, folder, str(machine or ""), *budgets]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{program}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def row(program: str) -> str:
    """Returns the table's line of a program."""
    about = ast.get_docstring(ast.parse((HERE / "programs" / f"{program}.py").read_text(encoding="utf-8"))) or ""
    budgets = budgets_of(program)
    plain, *others = runs(program, ("", *budgets))
    cells = []
    for budget, wrapped in zip(budgets, others, strict=True):
        verdict = "equal" if wrapped["left"] == plain["left"] else "**differs**"
        figures = wrapped["figures"]
        cells.append(f"{verdict} | {budget} | {_figures(plain['figures'])} | {_figures(figures)}")
    return "\n".join(f"| `{program}` | {about} | {cell} |" for cell in cells)


def _figures(figures: dict[str, Any]) -> str:
    return f"{figures['growth_bytes'] / _MIB:.0f} MiB, {figures['seconds']:.1f} s"


def main(programs: list[str]) -> None:
    """Prints the lines of the table, and writes them into the page if they are all of them."""
    lines = []
    for program in programs or PROGRAMS:
        lines.append(row(program))
        sys.stdout.write(lines[-1] + "\n")
    if not programs:
        head, rest = PAGE.read_text(encoding="utf-8").split(_MARKS[0])
        titles = "| program | what it does | result | budget | plain | wrapped |\n|---|---|---|---|---|---|\n"
        table = titles + "\n".join(lines) + "\n"
        PAGE.write_text(head + _MARKS[0] + table + _MARKS[1] + rest.split(_MARKS[1])[1], encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
