"""One rehearsal: builds and registers the device, runs the script, and writes what it did."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tieroff.core.machine import load_machine
from tieroff.errors import ConfigError, StateError
from tieroff.rehearsal.below import Below, RehearsedVendor
from tieroff.rehearsal.build import load
from tieroff.rehearsal.costs import Costs
from tieroff.rehearsal.cuda import serve
from tieroff.rehearsal.figures import StepShare, median_host_s, settled, step_shares, typical
from tieroff.rehearsal.script import Performance, perform
from tieroff.runtime.backend.vendor import register_vendor
from tieroff.runtime.engine import Engine
from tieroff.session.links import stand_in
from tieroff.tracing.clock.interval import interval
from tieroff.tracing.clock.model import Constants
from tieroff.units import NS_PER_S

_OF_STEP = ("step_s", "compute_s", "waiting_s", "host_bound_s", "kernels", "values")


@dataclass(frozen=True)
class Request:
    """What is to be rehearsed.

    Attributes:
        device_budget: bytes, a share or "min", as in a config.
        host_bytes, nvme_bytes: of the lower tiers; None: as the script's config says, else the machine's.
        out: folder for the run and its report.
        is_quiet: the script's standard output goes to standard error.
    """

    script: Path
    arguments: tuple[str, ...]
    machine: Path
    device_budget: str
    host_bytes: int | None
    nvme_bytes: int | None
    out: Path
    is_quiet: bool


@dataclass(frozen=True)
class Outcome:
    """What a rehearsal found.

    Attributes:
        status: of the script, as a process ends with it.
        is_wrapped: it called `tieroff.wrap`.
        steps: how many updates it made.
        step: one that stands for the settled ones, None where there is none; `timed_steps` says of how many.
        host_s, host_cpu_s: medians of the host's own time per step, and of this process's processor time.
        interval_s: between which the step lies in nine cases of ten, by the errors of the clock.
        predicted_step_s: of the plan, by the simulator.
        peak_bytes: per tier, in use at once.
        real_peak_bytes: what this process took of real memory.
        explain: the engine's words.
        report: the page, None where there is none.
    """

    status: int
    is_wrapped: bool
    machine: str
    steps: int
    timed_steps: int
    step: StepShare | None
    host_s: float | None
    host_cpu_s: float | None
    interval_s: tuple[float, float] | None
    predicted_step_s: float | None
    budget_bytes: dict[str, int]
    peak_bytes: dict[str, int]
    moved_bytes: dict[str, int]
    real_peak_bytes: int
    explain: str
    run: str | None
    report: str | None
    notes: list[str] = field(default_factory=list)

    def as_document(self) -> dict[str, Any]:
        """Returns what `--json` prints."""
        document = asdict(self)
        of_step = document.pop("step") or {}
        document["host_bound_share"] = self.step.host_bound_s / self.step.step_s if self.step is not None else None
        return {**{name: of_step.get(name) for name in _OF_STEP}, **document}


def rehearse(request: Request) -> Outcome:
    """Runs a script on the rehearsed device of a machine.

    Raises:
        ConfigError: the machine's file says too little, or the device cannot be built.
    """
    native = load()  # before anything asks PyTorch for CUDA
    machine = load_machine(request.machine)
    if not machine.device_bytes:
        raise ConfigError(f"expected device_bytes in machine {machine.name!r}, the memory of the GPU to rehearse; add it")
    native.register(Costs(machine))
    native.set_machine(
        machine.device_bytes,
        [
            (machine.h2d_bytes_per_s, machine.h2d_latency_s),
            (machine.d2h_bytes_per_s, machine.d2h_latency_s),
            (machine.nvme_read_bytes_per_s, machine.nvme_read_latency_s),
            (machine.nvme_write_bytes_per_s, machine.nvme_write_latency_s),
        ],
        machine.duplex_share,
    )
    serve(native, machine)
    register_vendor("cuda", RehearsedVendor(native))
    below = Below(native, machine, request.machine, request.device_budget, request.host_bytes, request.nvme_bytes)
    token = stand_in.set(below)
    try:
        done = perform(request.script, request.arguments, native, is_quiet=request.is_quiet)
    finally:
        stand_in.reset(token)
    engine = done.engines[-1] if done.engines else None
    shares = step_shares(done.marks)
    timed = settled(shares, engine.history.steps if engine is not None else None)
    step = typical(timed) if timed else None
    factors = interval(machine, Constants.shipped().of(machine.clock))
    allocated_bytes = max((share.allocated_bytes for share in timed or shares), default=0)
    host_s, host_cpu_s = median_host_s(timed) if timed else (None, None)
    run, report, notes = _written(engine, request.out)
    return Outcome(
        status=done.status,
        is_wrapped=engine is not None,
        machine=machine.name,
        steps=len(shares),
        timed_steps=len(timed),
        step=step,
        host_s=host_s,
        host_cpu_s=host_cpu_s,
        interval_s=(step.step_s * factors[0], step.step_s * factors[1]) if step is not None else None,
        predicted_step_s=_predicted_s(engine),
        budget_bytes=_budget(engine),
        peak_bytes=_peaks(engine, allocated_bytes),
        moved_bytes=step.moved_bytes if step is not None else {},
        real_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        explain=engine.explain() if engine is not None else "",
        run=run,
        report=report,
        notes=[*_notes(done, timed, engine), *notes],
    )


def _written(engine: Engine | None, out: Path) -> tuple[str | None, str | None, list[str]]:
    """Writes the run's folder and its page; returns their paths, and what there is to say."""
    if engine is None:
        return None, None, []
    try:
        engine.save_run(out)
        page = out / "report.html"
        engine.save_report(page)
    except StateError as error:
        return None, None, [str(error)]
    except ConfigError as error:  # no page without plotly
        return str(out), None, [str(error)]
    return str(out), str(page), []


def _predicted_s(engine: Engine | None) -> float | None:
    try:
        return engine.plan.step_ns / NS_PER_S if engine is not None else None
    except StateError:
        return None


def _budget(engine: Engine | None) -> dict[str, int]:
    try:
        return {tier.value: size for tier, size in engine.plan.budget_bytes.items()} if engine is not None else {}
    except StateError:
        return {}


def _peaks(engine: Engine | None, allocated_bytes: int) -> dict[str, int]:
    """Returns the most that was in use at once: of the device by its own count and by the engine's, of each tier below."""
    steps = engine.history.steps if engine is not None else ()
    peaks = {"allocated": allocated_bytes, "device": 0, "host": 0, "nvme": 0}
    for step in steps:
        peaks["device"] = max(peaks["device"], step.peak_device_bytes)
        peaks["host"] = max(peaks["host"], step.peak_host_bytes)
        peaks["nvme"] = max(peaks["nvme"], step.nvme_bytes)
    return peaks


def _notes(done: Performance, timed: Sequence[StepShare], engine: Engine | None) -> list[str]:
    """Returns what has to be known of these figures."""
    notes: list[str] = []
    if engine is None:
        notes.append("the script never called tieroff.wrap: it was rehearsed as it is, and the budget had no effect")
    elif len(done.engines) > 1:
        notes.append(f"{len(done.engines)} models were wrapped; budget, plan and page are those of the last one")
    values = sum(share.values for share in timed)
    if values:
        often = f"{values / len(timed):.3g} times a step"
        notes.append(f"the script reads from the device ({often}): it gets zeros, and the host waits for them as it would")
    if not timed:
        notes.append(
            "no step ran by plan: let the script run more steps (plans are there from the third step on, at the earliest)"
        )
    return notes
