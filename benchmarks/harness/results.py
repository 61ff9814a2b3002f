"""What the benches share: options, the head of a stored result, and its file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import Progress

from tieroff.errors import TieroffError
from tieroff.units import parse_bytes


class Report(Protocol):
    """Says what is being done now."""

    def __call__(self, what: str) -> None: ...


def parse_size(text: str) -> int:
    """Returns bytes from text such as "32GiB"; for argparse."""
    try:
        return parse_bytes(text)
    except TieroffError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def make_parser(description: str | None, *, budget: str = "", rate: str = "", **sizes: int) -> argparse.ArgumentParser:
    """Returns a parser with --json, and an option for each default that is given.

    Args:
        description: the script's docstring.
        budget: of the device, as in a config.
        rate: bytes per second of a slow drive, as text.
        sizes: numbers, such as steps and width.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    if budget:
        parser.add_argument("--budget", default=budget, help="of the device")
    if rate:
        parser.add_argument("--rate", type=parse_size, default=parse_size(rate), help="bytes per second of the slow drive")
    parser.add_argument("--json", type=Path, default=None, help="also write everything to this file")
    return parser


def command_of(script: str, given: Sequence[str] | None = None) -> str:
    """Returns the command line that runs a bench: with these arguments, or those of this process."""
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *(sys.argv[1:] if given is None else given)])


def when_and_where(command: str) -> dict[str, Any]:
    """Returns the head of a stored result: when, by which command and on which machine it was taken."""
    return {
        "date": date.today().isoformat(),
        "command": command,
        "kernel": f"{platform.system()} {platform.release()}",
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
    }


def document(rows: Sequence[dict[str, Any]], **about: Any) -> dict[str, Any]:
    """Returns a result of this process: its head, what else it is about, and its rows."""
    return {**when_and_where(command_of(sys.argv[0])), **about, "rows": list(rows)}


def save(path: Path | None, found: dict[str, Any], indent: int = 1) -> None:
    """Writes a result as JSON, where a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(found, indent=indent) + "\n")


@contextmanager
def progress(total: int) -> Iterator[Report]:
    """Gives a function that says what is being done: a bar on a terminal, else a line each."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        done = 0

        def report(what: str) -> None:
            nonlocal done
            bar.update(task, description=what, completed=done)
            done += 1
            if not console.is_terminal:
                print(f"{done} of {total}: {what}", file=sys.stderr, flush=True)

        yield report
