"""A Trace: one training step as a cyclic sequence of ops."""

from __future__ import annotations

import hashlib
import json
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
        phase: "forward", "backward", "optimizer" or "".
        module: dotted path of the module it ran in, or "".
    """

    name: str
    duration_ns: int
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    transient_bytes: int = 0
    phase: str = ""
    module: str = ""


@dataclass(frozen=True)
class Trace:
    """One step: ops in order and the tensors they touch. The step is a ring: op 0 follows the last.

    Attributes:
        ops: in order of execution.
        tensors: referred to by index.
        name: what was traced.
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
