"""A Trace: one training step as a cyclic sequence of ops."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from tieroff.core.lifetime import Lifetime, derive_lifetimes
from tieroff.core.tensor import Tensor
from tieroff.errors import CaptureError


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
    """

    name: str
    duration_ns: int
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    transient_bytes: int = 0
    phase: str = ""
    module: str = ""
    made_by: str = ""


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
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()[:32]

    @cached_property
    def ideal_ns(self) -> int:
        """Sum of the op durations: the step with nothing to wait for."""
        return sum(op.duration_ns for op in self.ops)

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
