"""How published policies' assumptions enter a simulation, and what both simulators ask of a plan before they run it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tieroff.core.machine import LINK_NAMES, UPDATE_PASSES, Machine
from tieroff.core.plan import AllocationKind, HostUpdate, Plan, Repeat, Residency, Transfer
from tieroff.core.tensor import Tier
from tieroff.core.trace import Trace
from tieroff.errors import InvalidPlanError, TraceMismatchError
from tieroff.units import NS_PER_S

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """What the simulator assumes in addition to the plan and the machine.

    Attributes:
        has_exclusive_link: the link between device and host carries one transfer at a time, either way, in order of
            issue. What the NVMe moves over that link is not part of the order.
        writes_clean: bytes that leave the device are written to the tier that keeps them even when it has a valid copy.
        eviction_blocks: a copy out of the device is awaited where it is issued.
        step_count_max: steps (of a plan for several: rounds of it) to simulate at most, until the state repeats.
    """

    has_exclusive_link: bool = False
    writes_clean: bool = False
    eviction_blocks: bool = False
    step_count_max: int = 16


def prepare(plan: Plan, trace: Trace, machine: Machine, options: SimulationOptions) -> Plan:
    """Returns the plan as the options change it.

    Raises:
        TraceMismatchError: the plan is for another trace.
        ConfigError: the plan uses a link that the machine does not have.
        InvalidPlanError: an index, a tick or a range of bytes is out of range.
    """
    if plan.trace_digest != trace.digest:
        raise TraceMismatchError(
            f"expected a plan for trace {trace.digest}, got one for {plan.trace_digest}: plan this trace again"
        )
    if plan.op_count != len(trace.ops):
        raise InvalidPlanError(f"expected {len(trace.ops)} ops in the plan, got {plan.op_count}", rule="digest")
    _check_ranges(plan, trace)
    for source, target in sorted({(t.source, t.target) for t in plan.transfers}):
        machine.link(source, target)
    if options.writes_clean:
        plan = with_clean_writes(plan, trace)
    if options.eviction_blocks:
        plan = with_blocking_evictions(plan)
    return plan


def move_compute_ns(machine: Machine, repeats: Sequence[Repeat]) -> int:
    """Returns the compute that each transfer takes, in ns.

    None is counted where ops run again: the CPU backend, which it is for, plans no such steps.
    """
    return 0 if repeats else round(machine.move_compute_s * NS_PER_S)


def size_of(item: Residency | Transfer, ring: Trace) -> int:
    """Returns the bytes of a residency or a transfer."""
    return (item.stop_byte or ring.tensors[item.tensor].size_bytes) - item.first_byte


def byte_range(item: Residency | Transfer, ring: Trace) -> Range:
    """Returns the half-open range of bytes of a residency or a transfer within its tensor."""
    return item.first_byte, item.stop_byte or ring.tensors[item.tensor].size_bytes


def share_millionths(machine: Machine) -> int:
    """Returns the share of its bandwidth that a direction of the host link has while the other one is busy."""
    return min(1_000_000, round(machine.duplex_share * 1_000_000))


class MemoryLimits(NamedTuple):
    """What transfers and updates share of the host's memory; see [Note: links in the simulator].

    Attributes:
        bytes_per_s: what it reads and writes, 0 for any.
        update_bytes_per_s: what an update does that has it to itself, 0 for nothing.
        host_passes, nvme_passes: how often a byte passes it between the device and HOST, and between the device and NVME.
    """

    bytes_per_s: int
    update_bytes_per_s: int
    host_passes: int
    nvme_passes: int


def memory_limits(machine: Machine) -> MemoryLimits:
    """Returns what both simulators ask of the host's memory."""
    return MemoryLimits(
        machine.host_memory_bytes_per_s,
        round(machine.cpu_update_bytes_per_s * UPDATE_PASSES),
        machine.memory_passes(Tier.DEVICE, Tier.HOST),
        machine.memory_passes(Tier.DEVICE, Tier.NVME),
    )


def memory_rate(machine: Machine) -> int:
    """Returns the most bytes per second that the host's memory carries in a simulation, 0 for any.

    Nothing that moves there slows down to less than a byte per second, nor does each of two passes of it.
    """
    return machine.host_memory_bytes_per_s + 16 if machine.host_memory_bytes_per_s else 0


def rerank(transfers: list[Transfer]) -> tuple[Transfer, ...]:
    """Returns transfers with ranks of 0, 1, ... per link in order of issue, then of the ranks that they have."""
    counts: dict[str, int] = defaultdict(int)
    ranked: list[Transfer] = []
    for transfer in sorted(transfers, key=lambda t: (t.issue_at, not is_issued_first(t), t.rank)):
        link = LINK_NAMES[transfer.source, transfer.target]
        ranked.append(replace(transfer, rank=counts[link]))
        counts[link] += 1
    return tuple(ranked)


def is_issued_first(transfer: Transfer) -> bool:
    """True for one that does not lead to the device and is awaited where it is issued."""
    return transfer.target is not Tier.DEVICE and transfer.issue_at == transfer.ready_by


def with_blocking_evictions(plan: Plan) -> Plan:
    """Returns a plan in which every copy out of the device is awaited where it is issued; residencies stay as they are."""
    transfers = [replace(t, ready_by=t.issue_at) if t.source is Tier.DEVICE else t for t in plan.transfers]
    return replace(plan, transfers=rerank(transfers))


def with_clean_writes(plan: Plan, ring: Trace) -> Plan:
    """Returns a plan that writes what leaves the device also when the copy below is still valid.

    Bytes that are dropped while a lower tier keeps them, and that no transfer took from the device during that
    residency, get a transfer to the fastest tier that keeps them. It is issued after the last op of the residency that
    requires the tensor, and awaited where the residency ends.
    """
    residencies: dict[int, list[Residency]] = defaultdict(list)
    transfers: dict[int, list[Transfer]] = defaultdict(list)
    for residency in plan.residencies:
        residencies[residency.tensor].append(residency)
    for transfer in plan.transfers:
        transfers[transfer.tensor].append(transfer)
    last = 1 + max((t.rank for t in plan.transfers), default=0)
    added = [
        replace(transfer, rank=last)
        for tensor, held in residencies.items()
        for dropped in held
        if dropped.tier is Tier.DEVICE
        for transfer in _clean_writes(dropped, held, transfers[tensor], ring)
    ]
    return replace(plan, transfers=rerank([*plan.transfers, *added])) if added else plan


def _clean_writes(dropped: Residency, held: list[Residency], transfers: list[Transfer], ring: Trace) -> Iterator[Transfer]:
    op_count = len(ring.ops)
    life = ring.lifetimes[dropped.tensor]
    is_persistent = ring.tensors[dropped.tensor].is_persistent
    is_dropped = dropped.stop - dropped.start < op_count if is_persistent else dropped.stop < life.death
    if not is_dropped:
        return
    shifts = (0, op_count, -op_count) if is_persistent else (0,)
    left = [byte_range(dropped, ring)]
    for t in transfers:
        if t.source is Tier.DEVICE and any(
            dropped.start <= t.issue_at + shift and t.ready_by + shift <= dropped.stop for shift in shifts
        ):
            left = _without(left, byte_range(t, ring))
    stops = [
        min(stop + shift, dropped.stop) for start, stop in life.required for shift in shifts if start + shift < dropped.stop
    ]
    issue = max((stop for stop in stops if stop > dropped.start), default=dropped.stop)
    for tier in (Tier.HOST, Tier.NVME):
        for keeper in held:
            if keeper.tier is not tier or not _covers(keeper, dropped.stop, shifts):
                continue
            begin = issue if _covers(keeper, issue, shifts) else dropped.stop
            shift = op_count if begin >= op_count and dropped.stop > op_count else 0
            kept = byte_range(keeper, ring)
            for start, stop in left:
                start, stop = max(start, kept[0]), min(stop, kept[1])
                if start < stop:
                    yield Transfer(dropped.tensor, Tier.DEVICE, tier, begin - shift, dropped.stop - shift, 0, start, stop)
            left = _without(left, kept)


def _covers(residency: Residency, tick: int, shifts: tuple[int, ...]) -> bool:
    return any(residency.start <= tick + shift < residency.stop for shift in shifts)


def _without(ranges: list[Range], taken: Range) -> list[Range]:
    """Returns what of the ranges lies outside of another one."""
    pieces = [piece for a, b in ranges for piece in ((a, min(b, taken[0])), (max(a, taken[1]), b))]
    return [(a, b) for a, b in pieces if a < b]


def _check_ranges(plan: Plan, ring: Trace) -> None:
    op_count = plan.op_count
    for r in plan.residencies:
        if not (0 <= r.start < op_count and r.start < r.stop <= r.start + op_count and _has_bytes(r, ring)):
            _refuse("0 <= start < n, start < stop <= start + n and bytes of a tensor of the trace", op_count, r)
    items: tuple[Transfer | HostUpdate, ...] = (*plan.transfers, *plan.host_updates)
    for item in items:
        if not 0 <= item.issue_at <= op_count or not item.issue_at <= item.ready_by <= item.issue_at + op_count:
            _refuse("0 <= issue_at <= n and issue_at <= ready_by <= issue_at + n", op_count, item)
    for t in plan.transfers:
        if t.source is t.target or not _has_bytes(t, ring):
            _refuse("two different tiers and bytes of a tensor of the trace", op_count, t)
    for update in plan.host_updates:
        if not 0 <= update.op < op_count or update.duration_ns < 0:
            _refuse("0 <= op < n and duration_ns >= 0", op_count, update)
    for repeat in plan.repeats:
        if not 0 <= repeat.op < repeat.at < op_count:
            _refuse("0 <= op < at < n", op_count, repeat)
    addresses = plan.allocation.addresses
    if plan.allocation.kind is AllocationKind.ADDRESSES and len(addresses) != len(plan.residencies):
        expected = f"expected one address per residency, {len(plan.residencies)}, got {len(addresses)}"
        raise InvalidPlanError(f"address: {expected}", rule="address")


def _has_bytes(item: Residency | Transfer, ring: Trace) -> bool:
    if not 0 <= item.tensor < len(ring.tensors):
        return False
    size = ring.tensors[item.tensor].size_bytes
    return 0 <= item.first_byte < (item.stop_byte or size) <= size


def _refuse(expected: str, op_count: int, item: Residency | Transfer | HostUpdate | Repeat) -> None:
    raise InvalidPlanError(f"range: expected {expected} with n = {op_count}, got {item}", rule="range")
