"""Places in user code: the line of the innermost call that is neither of this library nor of torch, and the class it is in."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType, FrameType


@cache
def _foreign_roots() -> tuple[str, ...]:
    torch = importlib.util.find_spec("torch")
    roots = [str(Path(__file__).resolve().parent.parent)]
    if torch is not None and torch.origin is not None:
        roots.append(str(Path(torch.origin).parent))
    return (*(f"{root}/" for root in roots), "<")  # such as <frozen importlib>, or code that is generated


def is_of_user(frame: FrameType) -> bool:
    """True for a frame that is neither of this library nor of torch."""
    return _of_code(frame.f_code)[0]


@lru_cache(maxsize=4096)  # a recorded step asks of some twenty frames for each tensor
def _of_code(code: CodeType) -> tuple[bool, str]:
    """Returns whether code is of the user, and the class whose forward it is, "" for any other."""
    owner, _, method = code.co_qualname.rpartition(".")
    kind = owner.rpartition(".")[2] if method == "forward" else ""
    return not code.co_filename.startswith(_foreign_roots()), kind


def user_frame() -> tuple[FrameType | None, int]:
    """Returns the innermost frame of user code, and how many frames above the caller it is (0 is the caller)."""
    frame: FrameType | None = sys._getframe(1)
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


def place_here() -> Place:
    """Returns where the caller runs.

    Frames are asked for their code only: reading a frame's variables would keep them alive as long as it runs.
    """
    frame: FrameType | None = sys._getframe(1)
    kind = line = ""
    while frame is not None and not (kind and line):
        is_users, found = _of_code(frame.f_code)
        if is_users and not line:
            line = line_of(frame)
        kind = kind or found
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
