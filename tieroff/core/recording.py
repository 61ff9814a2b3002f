"""The seam between the runtime, which knows the events of a step, and tracing, which turns one step into a Trace."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tieroff.core.tensor import TensorClass
from tieroff.core.trace import Trace

_LARGEST_BUCKET_BYTES = 32 << 20
_BUCKETS_AT_LEAST = 8


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

    @property
    def written_below(self) -> frozenset[Hashable]:
        """The keys of subjects whose bytes below forward or backward wrote: user code did, past the engine."""

    @property
    def written_in_backward(self) -> frozenset[Hashable]:
        """Those of `written_below` that were written before the last backward had ended, such as by hooks."""

    def backward_ended(self) -> None:
        """A backward is over: user code runs next."""

    @property
    def scratch_bytes(self) -> int:
        """The most memory that one op took for itself, past every tensor that was seen."""

    def used_below(self, op: int) -> dict[Hashable, bool]:
        """Returns the keys of subjects whose bytes below an op used past the engine, and whether it wrote them."""

    def written(self, keys: set[Hashable]) -> set[Hashable]:
        """Returns those of `keys` whose bytes on the device some op wrote after they had been bound."""

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

    def read(self, key: Hashable) -> None:
        """The op that runs reads the subject's bytes on the device, in code that is not watched."""

    def begin_unseen(self) -> None:
        """Code begins whose tensors are not seen one by one: what it takes for itself has to be measured."""

    def end_unseen(self) -> None:
        """That code has ended."""

    def died(self, key: Hashable) -> None:
        """Nothing can ask for the subject's bytes any more."""

    def stop(self) -> None:
        """Ends watching; safe to call twice and after an exception."""

    def finish(self, subjects: list[Subject], durations_ns: list[int], name: str) -> Trace:
        """Returns the trace of what was watched."""


def buckets_of(sizes_bytes: Sequence[int]) -> list[range]:
    """Returns which parameters of an optimizer are updated together, given their bytes in its order: one range per bucket.

    A bucket holds neighbours, at most 32 MiB and an eighth of all bytes, but at least one parameter.
    """
    limit_bytes = max(min(_LARGEST_BUCKET_BYTES, sum(sizes_bytes) // _BUCKETS_AT_LEAST), 1)
    starts, filled_bytes = [0], 0
    for position, size_bytes in enumerate(sizes_bytes):
        if position > starts[-1] and filled_bytes + size_bytes > limit_bytes:
            starts.append(position)
            filled_bytes = 0
        filled_bytes += size_bytes
    return [range(*pair) for pair in zip(starts, [*starts[1:], len(sizes_bytes)], strict=True)]
