"""Exceptions and signal handlers at every place of the engine's code, as Ctrl-C and alarms come: between any two lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import tieroff

_SOURCE = str(Path(tieroff.__file__).parent)


def _place_of(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename[len(_SOURCE) + 1 :]}:{frame.f_lineno}"


class Interrupt(KeyboardInterrupt):
    """What is raised."""


def interrupt() -> None:
    """Raises what Ctrl-C does."""
    raise Interrupt


class Injector:
    """Counts the lines of tieroff that run, and raises, or does something else, before the one of a given number.

    Args:
        act: what is done there.

    Attributes:
        seen: lines that ran in the last call of `run`.
        trail: which they were, as (file, line).
        where: file and line at which it acted, "" when it did not.
    """

    def __init__(self, act: Callable[[], None] = interrupt) -> None:
        self._act = act
        self.seen = 0
        self.where = ""
        self.trail: list[tuple[str, int]] = []
        self._at = -1

    def places(self, times: int) -> list[int]:
        """Returns numbers of lines that ran in the last call: for each line of the source, this many of its times."""
        found: dict[tuple[str, int], list[int]] = {}
        for number, line in enumerate(self.trail):
            found.setdefault(line, []).append(number)
        chosen = {numbers[(len(numbers) - 1) * i // max(times - 1, 1)] for numbers in found.values() for i in range(times)}
        return sorted(chosen)

    def run(self, work: Callable[[], Any], at: int = -1) -> bool:
        """Runs `work`; True when it was interrupted before the line of number `at`, and the interrupt came out of it."""
        self.seen, self.where, self.trail, self._at = 0, "", [], at
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            work()
        except Interrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if self.is_watched(frame.f_code.co_filename) else None

    def is_watched(self, file: str) -> bool:
        """Returns whether lines of a file count: those of the engine."""
        return file.startswith(_SOURCE)

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            if self.seen == self._at:
                self.where = _place_of(frame)
                self._at = -1
                self._act()
            self.trail.append((frame.f_code.co_filename, frame.f_lineno))
            self.seen += 1
        return self._line


@contextmanager
def before_every_line(act: Callable[[str], None]) -> Iterator[None]:
    """Inside, `act` gets the place of each line of the engine before this thread runs it."""

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            act(_place_of(frame))
        return line

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(_SOURCE) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)
