"""A fresh interpreter that runs a module of this library, with the program's import path and nothing else of it."""

from __future__ import annotations

import os
import sys


def module_command(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Returns the command that runs a module in another interpreter, and its environment.

    Raises:
        OSError: the interpreter is not known, or it would run this program again instead of the module.
    """
    executable: str | None = sys.executable
    if not executable or getattr(sys, "frozen", False):
        raise OSError("this program does not say which interpreter runs it (sys.executable)")
    # Python passes over entries that are no text, so a program runs with a `Path` in there.
    entries: list[object] = [*sys.path]
    path = os.pathsep.join(entry or os.getcwd() for entry in entries if isinstance(entry, str))
    environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
    # -P: the working directory is in the path where the program has it there, and nowhere else.
    return [executable, "-P", "-m", module, *arguments], environment
