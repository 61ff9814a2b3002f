"""Runs one program, plain or wrapped, and prints what it left as JSON: a line and a process for each budget.

usage: python -m tests.scripts.run PROGRAM FOLDER MACHINE ("": the links are measured) BUDGET... ("": plain)
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch._dynamo  # torch.optim imports it at its first use: an import too

import tieroff.api  # noqa: F401  # its imports count as imports, not as training
from tests.scripts.script import Script


def status_bytes(field: str) -> int:
    """Returns a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field + ":")).split()[1]) * 1024


def run(program: str, budget: str, folder: Path, machine: str) -> None:
    """Runs a program to its end, and says what it left."""
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    folder.mkdir()
    script = Script(budget, folder, machine)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    before, begun, status = status_bytes("VmRSS"), time.process_time(), 0
    Path("/proc/self/clear_refs").write_text("5")
    try:
        importlib.import_module(f"tests.scripts.programs.{program}").main(script)
    except SystemExit as left:
        status = int(left.code or 0)
    seconds = time.process_time() - begun
    found = {"losses": script.losses, "digests": script.digests(), "exit": status}
    figures = {"seconds": seconds, "growth_bytes": status_bytes("VmHWM") - before, "phases": script.phases}
    sys.stdout.write(json.dumps({"left": found, "figures": figures}) + "\n")


def main(program: str, folder: str, machine: str, *budgets: str) -> None:
    """Runs it in a process for each budget, one after the other: what they import is most of their time."""
    for number, budget in enumerate(budgets):
        if os.fork() == 0:
            return run(program, budget, Path(folder) / str(number), machine)
        if os.wait()[1]:
            raise SystemExit(f"{budget or 'plain'}: the program failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
