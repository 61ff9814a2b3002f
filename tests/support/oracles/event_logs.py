"""What planned steps do with memory, as text: the copies that are issued, awaited and freed at each tick, and the bytes there.

A change of the runtime that is to change nothing has the same logs before and after it:

    python -m tests.support.oracles.event_logs FOLDER      (once before the change and once after it; then diff -r)

[Note: logs that repeat]
A plan depends on measured times and on the scratch memory of ops, and the events of a step on when feedback looks at it. Here
an op takes a time by its bytes and no scratch memory, and either all planned steps have all events, or none its quiet ones.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import tieroff
from tests.support.models import LOOPS, MODELS
from tests.support.parity import BACKENDS, HOST, MIXED, NVME, Tiers, Trainer, Workload, config_for
from tieroff.core.plan import Plan
from tieroff.core.seams import Made, Pending
from tieroff.core.trace import Trace
from tieroff.runtime.backend.base import Backend
from tieroff.runtime.engine import Engine
from tieroff.runtime.execution.runner import PlanRunner
from tieroff.runtime.items.item import Item
from tieroff.runtime.items.residency import State
from tieroff.runtime.step.feedback import Feedback
from tieroff.session import workshop
from tieroff.session.planning import Planning
from tieroff.tracing.recorder import StepRecorder

_NAMES = (
    *("gpt", "mlp_batchnorm", "cnn", "lstm", "tied_and_shared", "in_place_and_views", "checkpoint_nonreentrant", "autocast"),
    *("bfloat16", "frozen", "accumulation", "input_gradient_penalty"),
)
WORKLOADS = tuple(workload for name in _NAMES for workload in (*MODELS, *LOOPS) if workload.name == name)

Budget = tuple[str, str, Tiers]  # policy, device, room below
BUDGETS: dict[str, Budget] = {"all": ("floor", "100%", MIXED), "some": ("auto", "75%", HOST), "more": ("auto", "60%", NVME)}

CASES = [
    pytest.param(workload, budget, id=f"{workload.name}-{budget}", marks=[] if number % 9 == 3 * at else [pytest.mark.long])
    for number, workload in enumerate(WORKLOADS)
    for at, budget in enumerate(BUDGETS)
]

# What a change of state is in a log.
_EVENTS = {
    (State.DEVICE, State.LEAVING): "out",
    (State.STALE, State.LEAVING): "out",
    (State.LEAVING, State.BOTH): "await out",
    (State.STALE, State.DEVICE): "await old",
    (State.LOWER, State.ARRIVING): "in",
    (State.ARRIVING, State.BOTH): "await in",
}


@dataclass
class Log:
    """The events of one step.

    Attributes:
        ticks: for each that went by, what happened from it to the next one; the bytes on the device stand last.
        issued: (tensor of the trace, "out" or "in") of each copy.
    """

    ticks: list[list[str]] = field(default_factory=lambda: [[]])
    issued: list[tuple[int, str]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(f"{tick}: {'; '.join(events)}\n" for tick, events in enumerate(self.ticks))

    @property
    def moves(self) -> list[str]:
        """What happened in its order, whichever ticks the step had."""
        return [event for events in self.ticks for event in events if not event.startswith("bytes")]


def difference(one: Log, other: Log) -> str:
    """Returns the first tick at which two logs differ, with those before it, for people; nothing where they are equal."""
    ours, theirs = one.text.splitlines(), other.text.splitlines()
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    if at == len(ours) == len(theirs):
        return ""
    changed = [*(f"- {line}" for line in ours[at : at + 3]), *(f"+ {line}" for line in theirs[at : at + 3])]
    return "\n".join([*ours[max(at - 3, 0) : at], *changed])


@contextlib.contextmanager
def logged(engine: Engine) -> Iterator[Log]:
    """Inside, what the engine does is written down."""
    log, kind, runner = Log(), Item, engine.executor.runner
    fields: dict[str, Any] = {name: vars(kind)[name] for name in ("state", "device")}
    measure: Any = PlanRunner.measure

    def add(event: str) -> None:
        while len(log.ticks) <= runner.cursor:
            log.ticks.append([])
        log.ticks[runner.cursor].append(event)

    def set_state(item: Item, state: State) -> None:
        with contextlib.suppress(AttributeError):  # it is being made
            event = _EVENTS.get((fields["state"].__get__(item, kind), state))
            if event is not None:
                add(f"{event} {item.name}")
            if event in ("in", "out"):
                log.issued.append((item.index, event))
        fields["state"].__set__(item, state)

    def set_device(item: Item, device: Any) -> None:
        with contextlib.suppress(AttributeError):
            if device is None and fields["device"].__get__(item, kind) is not None:
                add(f"free {item.name}")
        fields["device"].__set__(item, device)

    def measured(self: PlanRunner) -> None:
        measure(self)
        if self is runner and self.cursor:
            add(f"bytes {engine.executor.traffic.device_bytes}")

    patched: Any = kind
    patched.state = property(fields["state"].__get__, set_state)
    patched.device = property(fields["device"].__get__, set_device)
    PlanRunner.measure = measured  # type: ignore[method-assign]
    try:
        yield log
    finally:
        patched.state, patched.device = fields["state"], fields["device"]
        PlanRunner.measure = measure  # type: ignore[method-assign]


@contextlib.contextmanager
def repeatable(*, is_quiet: bool = False) -> Iterator[None]:
    """Inside, plans depend on what is the same in every run; see [Note: logs that repeat]."""
    source: Any = Planning
    recorder: Any = StepRecorder
    feedback: Any = Feedback
    plan, finish, passes = source.plan, recorder.finish, feedback.passes_next

    def traced(self: StepRecorder, *args: Any) -> Trace:
        trace: Trace = finish(self, *args)
        return replace(trace, ops=tuple(replace(op, transient_bytes=0) for op in trace.ops))

    def timed(trace: Trace) -> Trace:
        sizes = [sum(trace.tensors[i].size_bytes for i in {*op.reads, *op.writes}) for op in trace.ops]
        return replace(trace, ops=tuple(replace(op, duration_ns=5_000 + n) for op, n in zip(trace.ops, sizes, strict=True)))

    def planned(self: Planning, traces: Sequence[Trace], rates: dict[str, float], **options: Any) -> Pending[Made]:
        pending: Pending[Made] = plan(self, [timed(trace) for trace in traces], {}, **options)
        return pending

    recorder.finish, source.plan, feedback.passes_next = traced, planned, property(lambda _: is_quiet)
    waits, workshop.steps_wait = workshop.steps_wait, True  # for the plan, however busy the machine is
    try:
        yield
    finally:
        recorder.finish, source.plan, feedback.passes_next = finish, plan, passes
        workshop.steps_wait = waits


@dataclass(frozen=True)
class Logs:
    """Logs of the last two steps of a workload, and the plan that they followed."""

    before: Log
    last: Log
    plan: Plan


def logs_of(
    workload: Workload, budget: Budget, make_backend: Callable[[], Backend], folder: Path, *, is_quiet: bool = False
) -> Logs:
    """Trains for some steps and returns the logs of the last two."""
    policy, device, tiers = budget
    backend: Any = make_backend()
    backend.requested_most = lambda: None  # these plans have no room for scratch (`repeatable`), so each step would be over
    trainer = Trainer(workload, backend.device)
    with repeatable(is_quiet=is_quiet):
        config = config_for(tiers, folder, policy=policy, device=device)
        tieroff.wrap(trainer.model, trainer.optimizer, config, backend=backend)
        engine = tieroff.engine(trainer.model)
        logs = []
        try:
            for index in range(workload.steps):
                with logged(engine) as log:
                    trainer.run(index)
                logs.append(log)
            assert engine.stats().phase == "planned"
            return Logs(logs[-2], logs[-1], engine.plan)
        finally:
            tieroff.unwrap(trainer.model)


def main() -> None:
    """Writes the logs of every workload, budget and backend of the host into a folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--simulated", action="store_true", help="of the simulated device alone")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    backends = dict(BACKENDS)
    if options.simulated:
        from tests.accelerator import sim, target, vendor

        sim.load()
        vendor.install()
        backends = {"simulated": target.backend}
    for workload in WORKLOADS:
        for name, budget in BUDGETS.items():
            for backend, make in backends.items():
                with tempfile.TemporaryDirectory() as folder:
                    logs = logs_of(workload, budget, make, Path(folder))
                (options.folder / f"{workload.name}-{name}-{backend}.txt").write_text(logs.last.text)


if __name__ == "__main__":
    main()
