"""A Plan: the full list of decisions for one step, as data.

[Note: order of events at a tick]
At tick i, before op i runs, in this order:
  1. transfers to a lower tier with `ready_by == i` are awaited (one with `issue_at == i` too is issued first);
  2. residencies with `stop == i` end: their bytes are free;
  3. residencies with `start == i` begin and transfers with `issue_at == i` are issued, in order of rank;
  4. transfers with `ready_by == i` that lead to the device are awaited.
Then op i runs. Bytes that count in a tier at op i are those of residencies with `start <= i < stop`, plus, on the
device, the op's transient bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tieroff.core.tensor import Tier


@dataclass(frozen=True, slots=True)
class Residency:
    """A tensor's bytes are held in a tier over the half-open op interval [start, stop).

    `0 <= start < n` and `start < stop <= start + n` for a ring of n ops; `stop > n` wraps into the next step. A
    persistent tensor that never leaves a tier has `(0, n)` there.
    """

    tensor: int
    tier: Tier
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One move of a whole tensor along one link.

    It is issued at tick `issue_at` and complete before op `ready_by` runs, `issue_at <= ready_by <= issue_at + n`.
    The source must be resident from `issue_at` to `ready_by`, the target from `issue_at` on. Transfers of one link are
    served in order of `rank`.
    """

    tensor: int
    source: Tier
    target: Tier
    issue_at: int
    ready_by: int
    rank: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the executor of a plan can do. A planner emits nothing that is not named here.

    Attributes:
        tiers: tiers below the device that exist.
        wraps: transfers and device residencies of moved tensors may cross the end of the step.
        moves_host_nvme: transfers between HOST and NVME.
        gradient_follows_parameter: a gradient leaves the device if and only if its parameter does.
        recompute: modules can be recomputed.
        min_bytes: smaller tensors stay on the device.
        granule_bytes: room below is taken in multiples of this.
    """

    tiers: tuple[Tier, ...] = (Tier.HOST, Tier.NVME)
    wraps: bool = False
    moves_host_nvme: bool = False
    gradient_follows_parameter: bool = False
    recompute: bool = True
    min_bytes: int = 0
    granule_bytes: int = 1


@dataclass(frozen=True)
class Plan:
    """All decisions for one step of one trace.

    Attributes:
        policy: name of the policy that made it.
        trace_digest: `Trace.digest` of the trace it is for.
        op_count: number of ops of that trace.
        budget_bytes: limit per tier that the plan was made for.
        peak_bytes: predicted peak per tier.
        residencies, transfers: see there; every tensor of the trace has at least one residency.
        recompute: dotted paths of modules whose activations are recomputed in backward.
        bucket_order: order in which the optimizer's buckets are updated.
        skipped: rule -> number of tensors that it kept from moving, for people to read.
        step_ns: predicted step time, or 0 when it was not simulated.
        period: steps that the plan covers.
    """

    policy: str
    trace_digest: str
    op_count: int
    budget_bytes: dict[Tier, int]
    peak_bytes: dict[Tier, int]
    residencies: tuple[Residency, ...]
    transfers: tuple[Transfer, ...]
    recompute: tuple[str, ...] = ()
    bucket_order: tuple[int, ...] = ()
    skipped: dict[str, int] = field(default_factory=dict)
    step_ns: int = 0
    period: int = 1

    @property
    def moves_nothing(self) -> bool:
        """True when every tensor stays on the device."""
        return not self.transfers and not self.recompute
