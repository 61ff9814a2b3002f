"""Runs one program and prints what it left as JSON; a process of its own.

usage: python -m tests.scripts.run PROGRAM BUDGET ("": plain) FOLDER [MACHINE]
"""

from __future__ import annotations

import importlib
import json
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


def main(program: str, budget: str, folder: str, machine: str | None = None) -> None:
    """Runs a program to its end, and says what it left; the links are measured where no machine file is named."""
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    script = Script(budget, Path(folder), machine)
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


if __name__ == "__main__":
    main(*sys.argv[1:])
