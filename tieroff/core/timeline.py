"""A Timeline: what happened when, on compute and on each link. The same type for predicted and measured steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from tieroff.core.machine import LINK_NAMES
from tieroff.core.tensor import Tier


@dataclass(frozen=True, slots=True)
class OpSpan:
    """Compute of one op, in ns from the start of the step."""

    start_ns: int
    stop_ns: int


@dataclass(frozen=True, slots=True)
class TransferSpan:
    """One transfer's time on its link, in ns from the start of the step."""

    tensor: int
    source: Tier
    target: Tier
    start_ns: int
    stop_ns: int
    size_bytes: int

    @property
    def link(self) -> str:
        """One of d2h, h2d, nvme_write, nvme_read."""
        return LINK_NAMES[self.source, self.target]


@dataclass(frozen=True, slots=True)
class Stall:
    """A wait before op `op` (n: at the end of the step) for the transfer of a tensor."""

    op: int
    duration_ns: int
    tensor: int
    source: Tier
    target: Tier

    @property
    def link(self) -> str:
        """One of d2h, h2d, nvme_write, nvme_read."""
        return LINK_NAMES[self.source, self.target]


@dataclass(frozen=True)
class Timeline:
    """One step.

    Attributes:
        ops: one span per op, in order.
        transfers: in order of start.
        stalls: in order of op; their sum is what the step took besides compute.
        memory: per tier, bytes at each op.
        step_ns: from the start of the step to its end.
    """

    ops: tuple[OpSpan, ...]
    transfers: tuple[TransferSpan, ...]
    stalls: tuple[Stall, ...]
    memory: dict[Tier, tuple[int, ...]] = field(default_factory=dict)
    step_ns: int = 0

    @property
    def compute_ns(self) -> int:
        """Sum of the op spans."""
        return sum(op.stop_ns - op.start_ns for op in self.ops)

    @property
    def stall_ns(self) -> int:
        """Sum of the stalls."""
        return sum(stall.duration_ns for stall in self.stalls)

    @property
    def moved_bytes(self) -> dict[str, int]:
        """Bytes per link name; all four names are there."""
        moved = dict.fromkeys(("d2h", "h2d", "nvme_write", "nvme_read"), 0)
        for span in self.transfers:
            moved[span.link] += span.size_bytes
        return moved
