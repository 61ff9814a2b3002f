"""The figures of a step that has just ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

from tieroff.core.tensor import Tier
from tieroff.runtime.backend.stamp import ns_of
from tieroff.runtime.managed.model import ManagedModel
from tieroff.runtime.step.kinds import Measuring, Planned, Recording, StepKind
from tieroff.runtime.step.mode import PASS, PLANNED, Mode
from tieroff.runtime.step.stats import Stats
from tieroff.units import NS_PER_S


def figures_of(kind: StepKind, managed: ManagedModel, recompute_ns: int) -> Callable[[], Stats]:
    """Returns what gives the figures of the step that ends now, once the device is through with it, which it waits for."""
    executor, counts = managed.executor, managed.executor.traffic.counts
    times, ended, mode = executor.clock.times, executor.traffic.now(), executor.state.mode
    host, nvme = managed.stores.get(Tier.HOST), managed.stores.get(Tier.NVME)
    counted = Stats(
        step_s=0.0,
        compute_s=0.0,
        stall_s=0.0,
        recompute_s=recompute_ns / NS_PER_S,
        peak_device_bytes=executor.runner.peak_bytes,
        peak_host_bytes=host.peak_bytes if host is not None else 0,
        nvme_bytes=nvme.used_bytes if nvme is not None else 0,
        moved_bytes=dict(counts.moved_bytes),
        moved_bytes_by_class=dict(counts.by_class),
        fallbacks=counts.fallbacks,
        host_updates=counts.host_updates,
        faults=counts.faults,
        phase=_what_it_was(kind, mode),
        plans=kind.feedback.plan_count,
        settled_after=kind.feedback.settled_after,
        settings={"backend": managed.backend.name, **managed.settings.chosen},
    )

    def timed() -> Stats:
        step_ns = ns_of(ended) - ns_of(times.begun)
        stall_ns = counts.stall_ns
        # What an accelerator does between two ops takes it no time. Where they have no stamps, all that is no stall is compute.
        compute_ns = times.row_ns() if times.has_ops else max(step_ns - stall_ns, 0)
        stamps = [time for time in (ended, *(start for start, _ in counts.stalls)) if not isinstance(time, int)]
        return replace(
            counted,
            step_s=step_ns / NS_PER_S,
            compute_s=(step_ns if mode is PASS else compute_ns) / NS_PER_S,
            stall_s=stall_ns / NS_PER_S,
            host_ahead_s=median(stamp.ahead_ns() for stamp in stamps) / NS_PER_S if stamps else None,
        )

    return timed


def _what_it_was(kind: StepKind, mode: Mode) -> str:
    if mode is PASS:
        return "nothing moved"
    if isinstance(kind.stage, Recording):
        return "traced"
    if isinstance(kind.stage, Measuring):
        return "measured"
    return "planned" if isinstance(kind.stage, Planned) and mode is PLANNED else "on demand"
