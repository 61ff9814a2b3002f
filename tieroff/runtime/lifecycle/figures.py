"""The figures of a step that has just ended."""

from __future__ import annotations

import time

from tieroff.core.tensor import Tier
from tieroff.runtime.custody import Custody
from tieroff.runtime.step.kinds import Measuring, Planned, Recording, StepKind
from tieroff.runtime.step.mode import Mode
from tieroff.runtime.step.stats import Stats
from tieroff.units import NS_PER_S


def stats_of(kind: StepKind, custody: Custody, begun_ns: int, recompute_ns: int) -> Stats:
    """Returns the figures of the step that began then, up to now."""
    executor, counts = custody.executor, custody.executor.traffic.counts
    step_ns = time.monotonic_ns() - begun_ns
    compute_ns = sum(b - a for a, b in zip(executor.clock.starts_ns, executor.clock.stops_ns, strict=False))
    host, nvme = custody.stores.get(Tier.HOST), custody.stores.get(Tier.NVME)
    return Stats(
        step_s=step_ns / NS_PER_S,
        compute_s=(step_ns if executor.state.mode is Mode.PASS else compute_ns) / NS_PER_S,
        stall_s=counts.stall_ns / NS_PER_S,
        recompute_s=recompute_ns / NS_PER_S,
        peak_device_bytes=executor.runner.peak_bytes,
        peak_host_bytes=host.peak_bytes if host is not None else 0,
        nvme_bytes=nvme.used_bytes if nvme is not None else 0,
        moved_bytes=dict(counts.moved_bytes),
        moved_bytes_by_class=dict(counts.by_class),
        fallbacks=counts.fallbacks,
        faults=counts.faults,
        phase=_what_it_was(kind, executor.state.mode),
        plans=kind.feedback.plan_count,
        settled_after=kind.feedback.settled_after,
        settings={"backend": custody.backend.name, **custody.settings.chosen},
    )


def _what_it_was(kind: StepKind, mode: Mode) -> str:
    if mode is Mode.PASS:
        return "nothing moved"
    if isinstance(kind.stage, Recording):
        return "traced"
    if isinstance(kind.stage, Measuring):
        return "measured"
    return "planned" if isinstance(kind.stage, Planned) and mode is Mode.PLANNED else "on demand"
