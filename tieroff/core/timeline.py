"""A Timeline: what happened when, on compute and on each link. The same type for predicted and measured steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from tieroff.core.machine import LINK_NAMES
from tieroff.core.tensor import Tier


@dataclass(frozen=True, slots=True)
class OpSpan:
    """One op in its queue, in ns from the start of the step."""

    start_ns: int
    stop_ns: int


@dataclass(frozen=True, slots=True)
class RunSpan:
    """One more run of op `op`, a repeat on the device or an update by the CPU, in ns from the start of the step."""

    op: int
    start_ns: int
    stop_ns: int


@dataclass(frozen=True, slots=True)
class TransferSpan:
    """One transfer's time on its link, in ns from the start of the step; its bytes begin at `first_byte` of the tensor."""

    tensor: int
    source: Tier
    target: Tier
    start_ns: int
    stop_ns: int
    size_bytes: int
    first_byte: int = 0

    @property
    def link(self) -> str:
        """One of d2h, h2d, nvme_write, nvme_read."""
        return LINK_NAMES[self.source, self.target]


@dataclass(frozen=True, slots=True)
class Stall:
    """A wait before op `op` (n: at the end of the step) for a transfer, the CPU's update of op `update` or communication.

    Of all that is awaited at once it names the one that ends last. One of an update has tensor -1 and both tiers HOST; one of
    communication, which is the op `communication`, has tensor -1 and both tiers DEVICE.
    """

    op: int
    duration_ns: int
    tensor: int
    source: Tier
    target: Tier
    first_byte: int = 0
    update: int = -1
    communication: int = -1

    @property
    def link(self) -> str:
        """One of d2h, h2d, nvme_write, nvme_read; cpu for an update, peers for communication."""
        if self.communication >= 0:
            return "peers"
        return "cpu" if self.update >= 0 else LINK_NAMES[self.source, self.target]


@dataclass(frozen=True)
class Timeline:
    """One step.

    Attributes:
        ops: one span per op, in order.
        transfers: those issued in the step, in order of start; one that crosses the step's end may stop after it.
        stalls: in order of op; their sum is the step's time apart from compute, repeats and `engine_ns`.
        memory: per tier, bytes at each op.
        step_ns: time of one step. Predicted: the mean over the steps after which the state repeats, rounded up.
        repeats: ops that ran once more, in order.
        host_updates: updates by the CPU that were issued in the step, in order.
        recompute_ns: what recompute took of the step: repeats, and ops that run modules again.
        engine_ns: predicted compute that starting transfers takes of the step, beside the ops; see `Machine.move_compute_s`.
        first_step_ns: predicted time of the first step, which waits for nothing from a step before it; 0 if unknown.
        communication: of `ops`, those of communication, whose spans lie beside those of compute.
        cycle: steps after which the state at a step's end repeats; 0: it did not within the steps that were simulated,
            and all values are those of the last of them.
        began_ns: when the step began, by the machine's clock, from the beginning of 1970; 0 if it was predicted.
        host_ns: moments at which the host began or ended an op, from the start of the step, if the device is another one.
    """

    ops: tuple[OpSpan, ...]
    transfers: tuple[TransferSpan, ...]
    stalls: tuple[Stall, ...]
    memory: dict[Tier, tuple[int, ...]] = field(default_factory=dict)
    step_ns: int = 0
    repeats: tuple[RunSpan, ...] = ()
    host_updates: tuple[RunSpan, ...] = ()
    recompute_ns: int = 0
    engine_ns: int = 0
    first_step_ns: int = 0
    cycle: int = 1
    communication: tuple[int, ...] = ()
    began_ns: int = 0
    host_ns: tuple[int, ...] = ()

    @property
    def is_periodic(self) -> bool:
        """True when the state at a step's end repeats, so that `step_ns` holds for any number of steps."""
        return self.cycle > 0

    @property
    def compute_ns(self) -> int:
        """Sum of the spans of compute."""
        beside = set(self.communication)
        return sum(op.stop_ns - op.start_ns for index, op in enumerate(self.ops) if index not in beside)

    @property
    def stall_ns(self) -> int:
        """Sum of the stalls, waits for communication among them."""
        return sum(stall.duration_ns for stall in self.stalls)

    @property
    def moved_bytes(self) -> dict[str, int]:
        """Bytes per link name; all four names are there."""
        moved = dict.fromkeys(("d2h", "h2d", "nvme_write", "nvme_read"), 0)
        for span in self.transfers:
            moved[span.link] += span.size_bytes
        return moved
