"""What a planned step did, as the same data that a simulated one gives."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from tieroff.core.tensor import Tier
from tieroff.core.timeline import OpSpan, Stall, Timeline, TransferSpan
from tieroff.core.trace import Trace
from tieroff.runtime.backend.stamp import Time, clock_ns, ns_of
from tieroff.runtime.execution.clock import StepTimes
from tieroff.runtime.managed.model import ManagedModel
from tieroff.runtime.step.kinds import Planned
from tieroff.storage.completion import Timed

_ENDS = {
    "d2h": (Tier.DEVICE, Tier.HOST),
    "h2d": (Tier.HOST, Tier.DEVICE),
    "nvme_write": (Tier.DEVICE, Tier.NVME),
    "nvme_read": (Tier.NVME, Tier.DEVICE),
}


def timeline_of(planned: Planned, managed: ManagedModel, recompute_ns: int) -> Callable[[], Timeline]:
    """Returns what gives the timeline of the step up to now, once the device is through with it, which it waits for."""
    times, traffic = managed.executor.clock.times, managed.executor.traffic
    spans, waits = traffic.spans, traffic.waits
    memory = _memory(planned, managed, len(times.host_stops_ns))
    return lambda: _timeline(times, spans, waits, memory(), recompute_ns, planned.trace)


def _timeline(
    times: StepTimes,
    spans: list[tuple[int, str, Timed, int]],
    waits: list[tuple[int, Tier, Tier, Time, Time]],
    memory: dict[Tier, tuple[int, ...]],
    recompute_ns: int,
    trace: Trace,
) -> Timeline:
    start_ns, starts_ns = ns_of(times.begun), times.starts_ns
    ops = [OpSpan(max(a - start_ns, 0), max(b - start_ns, 0)) for a, b in zip(starts_ns, times.stops_ns, strict=False)]
    peers = tuple(_waits_for_peers(times, trace, ops))
    for one in times.communicated:
        ops[one.op] = OpSpan(one.start_ns - start_ns, one.stop_ns - start_ns)
    transfers = []
    for index, link, arrival, size_bytes in spans:
        if index < 0 or not arrival.stop_ns:
            continue
        source, target = _ENDS[link]
        begun_ns, ended_ns = arrival.start_ns - start_ns, arrival.stop_ns - start_ns
        transfers.append(TransferSpan(index, source, target, begun_ns, ended_ns, size_bytes))
    transfers.sort(key=lambda span: span.start_ns)
    stalls = tuple(
        Stall(bisect_left(starts_ns, ns_of(begun)), max(ns_of(ended) - ns_of(begun), 0), index, source, target)
        for index, source, target, begun, ended in waits
    )
    stalls = tuple(sorted((*stalls, *peers), key=lambda stall: stall.op)) if peers else stalls
    step_ns = max([span.stop_ns for span in ops], default=0)
    host_ns = () if times.is_by_host else tuple(sorted(ns - start_ns for ns in times.host_starts_ns + times.host_stops_ns))
    return Timeline(
        tuple(ops),
        tuple(transfers),
        stalls,
        memory,
        step_ns,
        recompute_ns=recompute_ns,
        communication=trace.communication,
        began_ns=clock_ns(times.begun),
        host_ns=host_ns,
    )


def _waits_for_peers(times: StepTimes, trace: Trace, ops: Sequence[OpSpan]) -> Iterator[Stall]:
    """Yields the waits of compute for communication: for all of what was awaited at once, and else from the wait on."""
    beside = {one.op: one for one in times.communicated}
    for index in trace.communication:
        one = beside.get(index)
        wait_ns = one.waited_ns if one is not None else ops[index].stop_ns - ops[index].start_ns
        if wait_ns and (one is not None or trace.blocks(index)):
            at = one.until if one is not None else index + 1
            yield Stall(at, wait_ns, -1, Tier.DEVICE, Tier.DEVICE, communication=index)


def _memory(planned: Planned, managed: ManagedModel, op_count: int) -> Callable[[], dict[Tier, tuple[int, ...]]]:
    """Returns what gives what each tier held at each op; at the last one, in which user code runs on, what it holds now."""
    held, device_bytes = managed.executor.traffic.held, managed.executor.traffic.device_bytes
    below = {tier: store.used_bytes for tier, store in managed.stores.items()}

    def by_tier() -> dict[Tier, tuple[int, ...]]:
        memory = {}
        for tier, bytes_per_op in held.by_tier().items():
            open_ops = planned.trace.ops[len(bytes_per_op) : op_count]
            now = [device_bytes + op.transient_bytes if tier is Tier.DEVICE else below.get(tier, 0) for op in open_ops]
            memory[tier] = (*bytes_per_op, *now)
        return memory

    return by_tier
