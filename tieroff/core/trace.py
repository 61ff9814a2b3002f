"""A Trace: one training step as a cyclic sequence of ops.

[Note: two queues]
An op runs in one of two queues, compute or communication, each of which takes its ops one at a time in their order. An op
of communication begins when compute has come to its place in the row and the op before it in its own queue has ended; the
row goes on at once. An op of compute with `awaits` first waits for that op, and so for all of communication before it. At
the end of the step compute waits for all that is left: nothing is under way from one step to the next.

An op of communication therefore takes the stretch of the row from its own place to the op that awaits it
(`Trace.done_at`). What it touches is on the device for all of it, what it writes is there from `done_at` on, and no op of
compute in it writes what it touches or reads what it writes. Its buffers are tensors like others, so that bytes on the
device depend on the row alone: it has no transient bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from tieroff.core.lifetime import Lifetime, derive_lifetimes
from tieroff.core.tensor import Tensor
from tieroff.errors import CaptureError

LARGEST_CALL = "largest_call"
"""The key in a trace's `meta` that describes the call of user code which needs most, as `Call.written` does."""


class Queue(StrEnum):
    """Where an op runs; see [Note: two queues]."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"


@dataclass(frozen=True, slots=True)
class Op:
    """One interval of the step's clock.

    Attributes:
        name: the tick that opens it, or a kernel's name.
        duration_ns: compute time, without any waiting for transfers.
        reads, writes: indices of tensors; one in both is written in place.
        transient_bytes: peak device bytes of everything alive in this op that is no tensor of the trace.
        phase: "forward", "backward", "recompute" (of a module that runs again, in backward), "optimizer" or "".
        module: dotted path of the module it ran in, or "".
        made_by: for people, the call that made the largest part of `transient_bytes`, and where it is; "" if unknown. Not part
            of a trace's structure.
        queue: where it runs; see [Note: two queues].
        awaits: index of the op of communication that must have ended before this one begins; -1 for none.
    """

    name: str
    duration_ns: int
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    transient_bytes: int = 0
    phase: str = ""
    module: str = ""
    made_by: str = ""
    queue: Queue = Queue.COMPUTE
    awaits: int = -1


@dataclass(frozen=True)
class Trace:
    """One step: ops in order and the tensors they touch. The step is a ring: op 0 follows the last.

    Attributes:
        ops: in order of execution.
        tensors: referred to by index.
        name: of the traced model or step.
        origin: "step" (a real one), "dry" or "file".
        meta: free text values that travel with it (shapes, torch version).
    """

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    name: str = ""
    origin: str = "file"
    meta: dict[str, str] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """Hex digest of the structure: names, sizes, uses. Durations and meta do not enter it."""
        content = [
            [(op.name, op.reads, op.writes, op.transient_bytes) for op in self.ops],
            [
                (t.name, t.size_bytes, t.kind.value, t.is_persistent, t.is_movable, t.holds, t.owner, t.lives_until)
                for t in self.tensors
            ],
        ]
        if self.communication:
            content.append([(op.queue.value, op.awaits) for op in self.ops])
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()[:32]

    @cached_property
    def ideal_ns(self) -> int:
        """The step with nothing moved: the sum of the op durations, with communication beside compute where there is some."""
        return self.starts_ns[-1]

    @cached_property
    def communication(self) -> tuple[int, ...]:
        """The ops of communication."""
        return tuple(index for index, op in enumerate(self.ops) if op.queue is Queue.COMMUNICATION)

    @cached_property
    def compute_ns(self) -> tuple[int, ...]:
        """The time that each op takes of the row: its duration, or nothing for communication."""
        return tuple(op.duration_ns if op.queue is Queue.COMPUTE else 0 for op in self.ops)

    @cached_property
    def starts_ns(self) -> tuple[int, ...]:
        """When compute comes to each op with nothing moved, after the waits for communication, and the step's end."""
        if not self.communication:
            return (0, *itertools.accumulate(op.duration_ns for op in self.ops))
        now_ns = free_ns = 0
        starts, ends = [], [0] * len(self.ops)
        for index, op in enumerate(self.ops):
            if op.awaits >= 0:
                now_ns = max(now_ns, ends[op.awaits])
            starts.append(now_ns)
            if op.queue is Queue.COMMUNICATION:
                ends[index] = free_ns = max(now_ns, free_ns) + op.duration_ns
            else:
                now_ns += op.duration_ns
        return (*starts, max(now_ns, free_ns))

    @cached_property
    def done_at(self) -> tuple[int, ...]:
        """The tick from which each op is known to have ended: the next one, or that of the first wait for communication."""
        found = list(range(1, len(self.ops) + 1))
        open_ops: list[int] = []
        for index, op in enumerate(self.ops):
            while open_ops and open_ops[0] <= op.awaits:
                found[open_ops.pop(0)] = index
            if op.queue is Queue.COMMUNICATION:
                open_ops.append(index)
        for index in open_ops:
            found[index] = len(self.ops)
        return tuple(found)

    def blocks(self, index: int) -> bool:
        """True for communication that is awaited at once, so that the row stands still for it."""
        return self.ops[index].queue is Queue.COMMUNICATION and self.done_at[index] == index + 1

    @cached_property
    def recompute_ops(self) -> tuple[int, ...]:
        """The ops that run modules again."""
        return tuple(index for index, op in enumerate(self.ops) if op.phase == "recompute")

    @cached_property
    def recompute_ns(self) -> int:
        """Sum of the durations of `recompute_ops`; `ideal_ns` holds it too."""
        return sum(self.ops[index].duration_ns for index in self.recompute_ops)

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes on the device at one op with nothing moved."""
        change = [0] * (len(self.ops) + 1)
        for tensor, life in zip(self.tensors, self.lifetimes, strict=True):
            change[life.birth] += tensor.size_bytes
            change[life.death] -= tensor.size_bytes
        held = itertools.accumulate(change)
        return max((size + op.transient_bytes for size, op in zip(held, self.ops, strict=False)), default=0)

    @cached_property
    def lifetimes(self) -> tuple[Lifetime, ...]:
        """The lifetime and the gaps of every tensor, by index."""
        return derive_lifetimes(self)

    def with_durations(self, durations_ns: list[int]) -> Trace:
        """Returns the same structure with other op durations.

        Raises:
            CaptureError: there are not as many as ops.
        """
        if len(durations_ns) != len(self.ops):
            raise CaptureError(f"expected {len(self.ops)} durations, one per op, got {len(durations_ns)}")
        ops = tuple(replace(op, duration_ns=value) for op, value in zip(self.ops, durations_ns, strict=True))
        return replace(self, ops=ops)

    def rewritten(self, ops: tuple[Op, ...], tensors: tuple[Tensor, ...], changed: Set[int]) -> Trace:
        """Returns the trace with as many other ops, and with other tensors: those of this one first, in the same order.

        Only tensors of `changed` and those that are new may differ in when they are used, written or held: the
        lifetimes of all others are kept, since to derive them takes longer than the rest of a trace.
        """
        trace = replace(self, ops=ops, tensors=tensors)
        known = [None if life.tensor in changed else life for life in self.lifetimes]
        vars(trace)["lifetimes"] = derive_lifetimes(trace, known)
        return trace


def with_waits(ops: Iterable[Op]) -> tuple[Op, ...]:
    """Returns the ops with a wait for communication at each op of compute that needs one for its data, and no others.

    That is the first that reads what communication writes, or writes what it touches; see [Note: two queues].
    """
    found: list[Op] = []
    open_ops: list[int] = []
    for index, op in enumerate(ops):
        if op.queue is Queue.COMMUNICATION:
            open_ops.append(index)
        else:
            met = [number for number in open_ops if _conflict(op, found[number])]
            op = replace(op, awaits=met[-1] if met else -1)
            open_ops = [number for number in open_ops if number > op.awaits]
        found.append(op)
    return tuple(found)


def _conflict(op: Op, communication: Op) -> bool:
    """True when an op writes what communication touches, or reads what that writes."""
    touched = {*communication.reads, *communication.writes}
    return not touched.isdisjoint(op.writes) or not set(communication.writes).isdisjoint(op.reads)


def validate(trace: Trace, where: str = "trace") -> None:
    """Returns when a trace is sound in itself; linear in its uses and holds.

    Raises:
        CaptureError: no ops, an unknown tensor, a size, a duration or `lives_until` out of range, a name used twice,
            holds that are not sorted, disjoint and inside the step, or owners that are unknown or own each other.
    """
    op_count, tensor_count = len(trace.ops), len(trace.tensors)
    if not op_count:
        raise CaptureError(f"{where}: expected at least one op, got none")
    for index, op in enumerate(trace.ops):
        at = f"{where}: ops[{index}] ({op.name})"
        if op.duration_ns < 0 or op.transient_bytes < 0:
            raise CaptureError(
                f"{at}: expected duration_ns and transient_bytes >= 0, got {op.duration_ns} and {op.transient_bytes}"
            )
        for used in (*op.reads, *op.writes):
            if not 0 <= used < tensor_count:
                raise CaptureError(f"{at}: expected tensors 0 to {tensor_count - 1}, got {used}")
    _validate_queues(trace, where)
    names: set[str] = set()
    for index, tensor in enumerate(trace.tensors):
        at = f"{where}: tensors[{index}] ({tensor.name})"
        if tensor.name in names:
            raise CaptureError(f"{at}: expected names that are unique, this one is there twice")
        names.add(tensor.name)
        if tensor.size_bytes <= 0:
            raise CaptureError(f"{at}: expected size_bytes > 0, got {tensor.size_bytes}")
        if not -1 <= tensor.owner < tensor_count:
            raise CaptureError(f"{at}: expected owner to be -1 or a tensor below {tensor_count}, got {tensor.owner}")
        if not -1 <= tensor.lives_until <= op_count:
            raise CaptureError(f"{at}: expected lives_until to be -1 or at most {op_count}, got {tensor.lives_until}")
        end = 0
        for start, stop in tensor.holds:
            if not end <= start < stop <= op_count:
                raise CaptureError(
                    f"{at}: expected holds sorted, disjoint and within 0 to {op_count}, got ({start}, {stop}) after {end}"
                )
            end = stop
    _validate_owners(trace, where)


def _validate_queues(trace: Trace, where: str) -> None:
    """Checks what [Note: two queues] asks of waits and of ops beside communication."""
    for index, op in enumerate(trace.ops):
        at = f"{where}: ops[{index}] ({op.name})"
        is_compute = op.queue is Queue.COMPUTE
        if op.awaits >= index or op.awaits < -1 or (op.awaits >= 0 and trace.ops[op.awaits].queue is Queue.COMPUTE):
            raise CaptureError(f"{at}: expected awaits to be -1 or an op of communication before it, got {op.awaits}")
        if not is_compute and (op.awaits >= 0 or op.transient_bytes):
            raise CaptureError(
                f"{at}: expected communication that awaits nothing and has its buffers as tensors, got awaits = {op.awaits} "
                f"and transient_bytes = {op.transient_bytes}"
            )
    reading: dict[int, int] = {}
    writing: dict[int, int] = {}
    for index, op in enumerate(trace.ops if trace.communication else ()):
        if op.queue is Queue.COMMUNICATION:
            reading.update((tensor, trace.done_at[index]) for tensor in (*op.reads, *op.writes))
            writing.update((tensor, trace.done_at[index]) for tensor in op.writes)
            continue
        for tensor, busy in (*((t, writing) for t in op.reads), *((t, reading) for t in op.writes)):
            if busy.get(tensor, 0) > index:
                raise CaptureError(
                    f"{where}: ops[{index}] ({op.name}): expected it to await the communication that touches tensor {tensor} "
                    f"({trace.tensors[tensor].name}), which is awaited at op {busy[tensor]} only"
                )


def _validate_owners(trace: Trace, where: str) -> None:
    """Follows every chain of owners to its end; a tensor that was followed before is not followed again."""
    seen_from = [-1] * len(trace.tensors)
    for first in range(len(trace.tensors)):
        index = first
        while index >= 0 and seen_from[index] < 0:
            seen_from[index] = first
            index = trace.tensors[index].owner
        if index >= 0 and seen_from[index] == first:
            raise CaptureError(
                f"{where}: tensors[{index}] ({trace.tensors[index].name}): expected owners without a cycle, "
                "this one owns itself, by others or directly"
            )


@dataclass(frozen=True, slots=True)
class Call:
    """One call of user code in a step, which gets parameters, gradients and state on the device, wherever they were before.

    Attributes:
        op: of the trace, in which it runs.
        size_bytes: of these and of what the program holds of such, with all that is there beside them.
        tensors: of the trace, in order: these.
    """

    op: int
    size_bytes: int
    tensors: tuple[int, ...] = ()

    def written(self) -> str:
        """Returns it as text, which `largest_call` reads."""
        return f"{self.op} {self.size_bytes} {','.join(map(str, self.tensors))}".strip()


def largest_call(meta: Mapping[str, str]) -> Call | None:
    """Returns the call that a trace's `meta` describes, None where no call gets anything."""
    if LARGEST_CALL not in meta:
        return None
    op, size_bytes, *tensors = meta[LARGEST_CALL].split()
    return Call(int(op), int(size_bytes), tuple(map(int, tensors[0].split(","))) if tensors else ())
