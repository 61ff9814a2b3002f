"""A Plan: the full list of decisions for one step, as data.

[Note: order of events at a tick]
At tick i, before op i runs, in this order:
  1. transfers to a lower tier with `ready_by == i` are awaited (one with `issue_at == i` too is issued first);
  2. residencies with `stop == i` end: their bytes are free;
  3. residencies with `start == i` begin and transfers with `issue_at == i` are issued, in order of rank;
  4. transfers with `ready_by == i` that lead to the device are awaited;
  5. ops that repeat at i run, in order of op.
Then op i runs. Updates on the host are awaited with 1 and issued with 3. Transfers between HOST and NVME are ones to a
lower tier when they lead to the NVME, and are awaited in 1 in either direction. Bytes that count in a tier at op i are
those of residencies with `start <= i < stop`, plus, on the device, the most transient bytes of the op and of those that
repeat before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tieroff.core.tensor import Tier

WHOLE = 0
"""`stop_byte` of an item that reaches to the end of its tensor."""


@dataclass(frozen=True, slots=True)
class Residency:
    """Bytes of a tensor are held in a tier over the half-open op interval [start, stop).

    `0 <= start < n` and `start < stop <= start + n` for a ring of n ops; `stop > n` wraps into the next step, also of a
    gradient in HOST that an update there reads until then. Bytes of a persistent tensor that never leave a tier have
    `(0, n)` there. The bytes are [first_byte, stop_byte) of the tensor; `stop_byte` WHOLE means up to its end.
    """

    tensor: int
    tier: Tier
    start: int
    stop: int
    first_byte: int = 0
    stop_byte: int = WHOLE


@dataclass(frozen=True, slots=True)
class Transfer:
    """One move of bytes [first_byte, stop_byte) of a tensor along one link, between any two tiers.

    It is issued at tick `issue_at` and complete before op `ready_by` runs, `issue_at <= ready_by <= issue_at + n`.
    The source must be resident from `issue_at` to `ready_by`, the target from `issue_at` on. Transfers of one link
    (see `LINK_NAMES`) are served in order of `rank`.
    """

    tensor: int
    source: Tier
    target: Tier
    issue_at: int
    ready_by: int
    rank: int
    first_byte: int = 0
    stop_byte: int = WHOLE


@dataclass(frozen=True, slots=True)
class Repeat:
    """Recompute: op `op` runs once more at tick `at` (`op < at`), after the tick's transfers and before op `at`.

    What it reads must be on the device and of the version that its first run read; residencies of what it writes
    may begin at `at`. It writes nothing that is persistent and nothing that it also reads.
    """

    op: int
    at: int


@dataclass(frozen=True, slots=True)
class HostUpdate:
    """Op `op`, an update of the optimizer, is run by the CPU in place on host memory; on the device it takes no time.

    It is issued at tick `issue_at >= op` and complete before op `ready_by` runs, `issue_at <= ready_by <= issue_at + n`,
    within `duration_ns` of the CPU's time, which serves updates one at a time in order of issue, with the host's memory to
    itself. All that the op reads
    and writes is resident in HOST over the window and valid there at its start; what it writes is then valid in HOST
    alone, and no op touches it meanwhile.
    """

    op: int
    issue_at: int
    ready_by: int
    duration_ns: int


class AllocationKind(StrEnum):
    """How bytes of a residency on the device take room.

    BYTES: as they are. ADDRESSES: at planned addresses; the room taken at an op is the highest end of what is held there.
    """

    BYTES = "bytes"
    ADDRESSES = "addresses"


@dataclass(frozen=True)
class Allocation:
    """The device's allocator as the plan counts it.

    Attributes:
        kind: see there.
        addresses: of ADDRESSES: one per residency of the plan, in its order; -1 for those of other tiers.
    """

    kind: AllocationKind = AllocationKind.BYTES
    addresses: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the executor of a plan can do. A planner emits nothing that is not named here.

    Attributes:
        tiers: tiers below the device that exist.
        wraps: transfers and device residencies of moved tensors may cross the end of the step.
        late_evictions: those of optimizer state that leaves may: it is let go in the next step, before an op of that uses it.
        moves_host_nvme: transfers between HOST and NVME.
        gradient_follows_parameter: a gradient leaves the device if and only if its parameter does.
        recompute: modules can be recomputed.
        repeats_ops: single ops can be (`Plan.repeats`).
        updates_on_host: the CPU can run ops of the optimizer (`Plan.host_updates`).
        updates_cross: such updates may end in the next step, with the host copies of the gradients that they read, and loads
            of what they wrote may cross the step's end.
        updates_early: such updates may be of ops that backward follows, and begin after their op, once gradients are there.
        splits: parts of a tensor move on their own.
        min_bytes: smaller tensors stay on the device.
        granule_bytes: room below is taken in multiples of this, and parts of tensors are cut at its multiples.
    """

    tiers: tuple[Tier, ...] = (Tier.HOST, Tier.NVME)
    wraps: bool = False
    late_evictions: bool = False
    moves_host_nvme: bool = False
    gradient_follows_parameter: bool = False
    recompute: bool = True
    repeats_ops: bool = False
    updates_on_host: bool = False
    updates_cross: bool = False
    updates_early: bool = False
    splits: bool = False
    min_bytes: int = 0
    granule_bytes: int = 1


IDEAL_EXECUTOR = Capabilities(
    wraps=True,
    moves_host_nvme=True,
    repeats_ops=True,
    updates_on_host=True,
    updates_cross=True,
    updates_early=True,
    splits=True,
)
"""All that a plan can say: what published policies are compared under, whatever runs their plans."""

RUNTIME_EXECUTOR = Capabilities(late_evictions=True, gradient_follows_parameter=True, min_bytes=64 * 2**10, granule_bytes=4096)
"""What this project's own runtime can do with its default config; of some optimizers it updates on the host, too."""


@dataclass(frozen=True)
class Plan:
    """All decisions for one step of one trace.

    Attributes:
        policy: name of the policy that made it.
        trace_digest: `Trace.digest` of the trace it is for.
        op_count: number of ops of that trace.
        budget_bytes: limit per tier that the plan was made for.
        peak_bytes: predicted peak per tier.
        residencies, transfers: see there; every byte of every tensor has at least one residency.
        recompute: dotted paths of modules whose activations are recomputed in backward.
        repeats: single ops that run again.
        host_updates: ops of the optimizer that the CPU runs.
        allocation: how bytes on the device are counted.
        skipped: rule -> number of tensors that it kept from moving, for people to read.
        step_ns: predicted step time, or 0 when it was not simulated.
    """

    policy: str
    trace_digest: str
    op_count: int
    budget_bytes: dict[Tier, int]
    peak_bytes: dict[Tier, int]
    residencies: tuple[Residency, ...]
    transfers: tuple[Transfer, ...]
    recompute: tuple[str, ...] = ()
    repeats: tuple[Repeat, ...] = ()
    host_updates: tuple[HostUpdate, ...] = ()
    allocation: Allocation = Allocation()
    skipped: dict[str, int] = field(default_factory=dict)
    step_ns: int = 0

    @property
    def moves_nothing(self) -> bool:
        """True when every tensor stays on the device."""
        return not (self.transfers or self.recompute or self.repeats or self.host_updates)
