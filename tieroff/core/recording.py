"""The seam between the runtime, which knows the events of a step, and tracing, which turns one step into a Trace."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from tieroff.core.tensor import TensorClass
from tieroff.core.trace import Trace


@dataclass(frozen=True, slots=True)
class Subject:
    """One tensor that the trace will list.

    Attributes:
        key: what the runtime called it when it bound storages to it.
        owner: key of the tensor that decides its tier, or None.
    """

    key: Hashable
    name: str
    size_bytes: int
    kind: TensorClass
    is_persistent: bool = False
    is_movable: bool = True
    owner: Hashable = None


class Recorder(Protocol):
    """Watches one step."""

    def start(self) -> None:
        """Begins to watch every op of this thread."""

    def event(self, name: str, phase: str) -> None:
        """A tick: op number n + 1 begins."""

    def bind(self, storage: object, key: Hashable, is_below: bool = False, is_new: bool = False) -> None:
        """This storage holds the bytes of the subject `key`.

        Args:
            is_below: in a lower tier, so it counts nowhere.
            is_new: the engine has just made it; otherwise the program did, when it was first seen.
        """

    def died(self, key: Hashable) -> None:
        """Nothing can ask for the subject's bytes any more."""

    def stop(self) -> None:
        """Ends watching; safe to call twice and after an exception."""

    def finish(self, subjects: list[Subject], durations_ns: list[int], name: str) -> Trace:
        """Returns the trace of what was watched."""
