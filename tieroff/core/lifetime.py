"""When each tensor must be on the device, and the gaps between.

[Note: required intervals]
A tensor is required at every op that reads or writes it and in every interval of its `holds`; the union, merged, is
its list of required intervals on the line [0, n]. One that is not persistent lives from the first to the last of
them, or on to its `lives_until`, with a last gap that no use ends. A persistent one lives on the whole ring, so it has
one more gap, which wraps from the last required interval round to the first (its `stop` is then counted from this
step's start: above n). A tensor that nothing requires is taken to be on the device for the whole step. Communication
requires what it touches until it is awaited, and writes it once more at the last op before that: what it wrote cannot be
copied sooner.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tieroff.core.tensor import Tensor
    from tieroff.core.trace import Trace


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch of ops [start, stop) between two required intervals, in which a tensor is idle.

    Attributes:
        tensor: index of the tensor.
        start, stop: first idle op, first op that requires it again; `stop > n` (or both >= n) past the step's end.
        wraps: it crosses the end of the step.
        last_write: the last op before `start` that wrote the tensor (its birth counts as a write if it is not
            persistent); for a tensor that is persistent, -1 when nothing in [0, start) wrote it.
        is_last: the tensor's life ends with the gap: nothing comes back.
    """

    tensor: int
    start: int
    stop: int
    wraps: bool
    last_write: int
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The life of one tensor in the step.

    Attributes:
        tensor: index of the tensor.
        birth, death: half-open interval of its life; (0, n) if it is persistent or unused.
        required: half-open op intervals in which it must be on the device: sorted, disjoint, not touching.
        writes: ops that write it, ascending; the birth of a tensor that is not persistent is one of them.
        gaps: in order; a gap that wraps comes last.
    """

    tensor: int
    birth: int
    death: int
    required: tuple[tuple[int, int], ...]
    writes: tuple[int, ...]
    gaps: tuple[Gap, ...]


def merge_intervals(intervals: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns the union of half-open intervals, sorted; those that touch become one."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def _gaps(
    tensor: int,
    required: tuple[tuple[int, int], ...],
    writes: tuple[int, ...],
    *,
    death: int,
    is_persistent: bool,
    op_count: int,
) -> tuple[Gap, ...]:
    pairs = [(a[1], b[0], False) for a, b in itertools.pairwise(required)]
    if is_persistent and required[0][0] + op_count > required[-1][1]:
        pairs.append((required[-1][1], required[0][0] + op_count, True))
    if not is_persistent and death > required[-1][1]:
        pairs.append((required[-1][1], death, False))
    gaps: list[Gap] = []
    position = 0
    last_write = -1
    for start, stop, wraps in pairs:
        while position < len(writes) and writes[position] < start:
            last_write = writes[position]
            position += 1
        is_last = not is_persistent and start == required[-1][1]
        gaps.append(Gap(tensor, start, stop, wraps, last_write, is_last=is_last))
    return tuple(gaps)


def derive_lifetimes(trace: Trace, known: Sequence[Lifetime | None] = ()) -> tuple[Lifetime, ...]:
    """Returns the lifetime of every tensor of a trace, by index; `Trace.lifetimes` keeps the result.

    Linear in the number of uses, but for the sorting of each tensor's holds. Lifetimes of the first tensors that are
    `known` are taken as they are.
    """
    op_count = len(trace.ops)
    found = [*known, *[None] * (len(trace.tensors) - len(known))]
    uses: dict[int, list[tuple[int, int]]] = {}
    writes: dict[int, list[int]] = {}
    for index, (tensor_, life) in enumerate(zip(trace.tensors, found, strict=True)):
        if life is None:
            uses[index], writes[index] = list(tensor_.holds), []
    done_at = trace.done_at
    for index, op in enumerate(trace.ops):
        for tensor in (*op.reads, *op.writes):
            if tensor in uses:
                uses[tensor].append((index, done_at[index]))
        for tensor in op.writes:
            if tensor in writes and (not writes[tensor] or writes[tensor][-1] != index):
                writes[tensor].append(index)
    for index in trace.communication:
        for tensor in trace.ops[index].writes:
            if tensor in writes:
                writes[tensor] = sorted({*writes[tensor], done_at[index] - 1})
    return tuple(
        _lifetime(index, tensor_, uses[index], writes[index], op_count) if life is None else life
        for index, (tensor_, life) in enumerate(zip(trace.tensors, found, strict=True))
    )


def _lifetime(index: int, tensor: Tensor, uses: list[tuple[int, int]], written: list[int], op_count: int) -> Lifetime:
    required = merge_intervals(uses)
    if not required:
        return Lifetime(index, 0, op_count, (), (), ())
    birth, death = 0, op_count
    if not tensor.is_persistent:
        birth, death = required[0][0], max(required[-1][1], tensor.lives_until)
        if not written or written[0] != birth:
            written = [birth, *written]
    writes = tuple(written)
    gaps = _gaps(index, required, writes, death=death, is_persistent=tensor.is_persistent, op_count=op_count)
    return Lifetime(index, birth, death, required, writes, gaps)
