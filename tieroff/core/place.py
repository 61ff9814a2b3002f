"""Places in user code: the line of the innermost call that is neither of this library nor of torch, and the class it is in."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType


@cache
def _foreign_roots() -> tuple[str, ...]:
    torch = importlib.util.find_spec("torch")
    roots = [str(Path(__file__).resolve().parent.parent)]
    if torch is not None and torch.origin is not None:
        roots.append(str(Path(torch.origin).parent))
    return (*(f"{root}/" for root in roots), "<")  # such as <frozen importlib>, or code that is generated


def is_of_user(frame: FrameType) -> bool:
    """True for a frame that is neither of this library nor of torch."""
    return not frame.f_code.co_filename.startswith(_foreign_roots())


def user_frame(depth: int = 1) -> tuple[FrameType | None, int]:
    """Returns the innermost frame of user code, and how many frames above the caller it is (0 is the caller).

    Args:
        depth: frames to pass over first, this function's included.
    """
    frame: FrameType | None = sys._getframe(depth)
    above = 0
    while frame is not None and not is_of_user(frame):
        frame, above = frame.f_back, above + 1
    return frame, above


def line_of(frame: FrameType) -> str:
    """Returns the file's name and the line, such as "model.py:41"."""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where code runs.

    Attributes:
        kind: class of the innermost module whose forward runs, as its code names it; "" outside of all.
        line: of user code, such as "model.py:41"; "" if there is none.
    """

    kind: str = ""
    line: str = ""


def place_here(depth: int = 1) -> Place:
    """Returns where the caller runs.

    Frames are asked for their code only: reading a frame's variables would keep them alive as long as it runs.

    Args:
        depth: frames to pass over first, this function's included.
    """
    frame: FrameType | None = sys._getframe(depth)
    kind = line = ""
    while frame is not None and not (kind and line):
        if not line and is_of_user(frame):
            line = line_of(frame)
        owner, _, method = frame.f_code.co_qualname.rpartition(".")
        if not kind and method == "forward" and owner:
            kind = owner.rpartition(".")[2]
        frame = frame.f_back
    return Place(kind, line)


def module_of(events: Iterable[str]) -> str:
    """Returns the path of the module whose parameter was used last, "" where none was.

    Args:
        events: names of ticks, the last one first.
    """
    for name in events:
        kind, _, parameter = name.partition(":")
        if kind in ("param", "saved"):
            return parameter.rpartition(".")[0]
    return ""
