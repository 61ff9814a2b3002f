"""What a planned step did, as the same data that a simulated one gives."""

from __future__ import annotations

from bisect import bisect_left

from tieroff.core.tensor import Tier
from tieroff.core.timeline import OpSpan, Stall, Timeline, TransferSpan
from tieroff.runtime.custody import Custody
from tieroff.runtime.step.kinds import Planned

_ENDS = {
    "d2h": (Tier.DEVICE, Tier.HOST),
    "h2d": (Tier.HOST, Tier.DEVICE),
    "nvme_write": (Tier.DEVICE, Tier.NVME),
    "nvme_read": (Tier.NVME, Tier.DEVICE),
}


def measured_timeline(planned: Planned, custody: Custody, start_ns: int, recompute_ns: int) -> Timeline:
    """Returns what the step that began then did up to now."""
    clock, traffic = custody.executor.clock, custody.executor.traffic
    ops = tuple(
        OpSpan(max(a - start_ns, 0), max(b - start_ns, 0)) for a, b in zip(clock.starts_ns, clock.stops_ns, strict=False)
    )
    transfers = []
    for index, link, arrival, size_bytes in traffic.spans:
        if index < 0 or not arrival.stop_ns:
            continue
        source, target = _ENDS[link]
        times = arrival.start_ns - start_ns, arrival.stop_ns - start_ns
        transfers.append(TransferSpan(index, source, target, *times, size_bytes))
    transfers.sort(key=lambda span: span.start_ns)
    stalls = tuple(
        Stall(bisect_left(clock.starts_ns, begun_ns), ended_ns - begun_ns, index, source, target)
        for index, source, target, begun_ns, ended_ns in traffic.waits
    )
    step_ns = max([span.stop_ns for span in ops], default=0)
    return Timeline(ops, tuple(transfers), stalls, _memory(planned, custody, len(ops)), step_ns, recompute_ns=recompute_ns)


def _memory(planned: Planned, custody: Custody, op_count: int) -> dict[Tier, tuple[int, ...]]:
    """Returns what each tier held at each op; at the last one, in which user code runs on, what it holds now."""
    memory = {}
    for tier, held in custody.executor.traffic.memory.items():
        store = custody.stores.get(tier)
        below = store.used_bytes if store is not None else 0
        open_ops = planned.trace.ops[len(held) : op_count]
        device_bytes = custody.executor.traffic.device_bytes
        now = [device_bytes + op.transient_bytes if tier is Tier.DEVICE else below for op in open_ops]
        memory[tier] = (*held, *now)
    return memory
