"""Runs made by hand, for tests of what is shown of them."""

from __future__ import annotations

from dataclasses import replace

from tieroff.core.history import StepFigures
from tieroff.core.io.run_folder import Run
from tieroff.core.machine import Machine
from tieroff.core.plan import Plan, Residency, Transfer
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.timeline import OpSpan, Stall, Timeline, TransferSpan
from tieroff.core.trace import Op, Trace
from tieroff.units import MIB

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME
MS = 1_000_000
HOSTILE = '</script><script>document.body.dataset.pwned="1"</script>'

TRACE = Trace(
    ops=(
        Op("make a", 10 * MS, (2,), (0,), phase="forward"),
        Op("make b", 10 * MS, (0,), (1,), phase="forward"),
        Op("use b", 10 * MS, (1,), (), phase="backward"),
        Op("use a", 10 * MS, (0,), (2,), phase="backward"),
    ),
    tensors=(
        Tensor("a", 4 * MIB, TensorClass.ACTIVATION),
        Tensor("b", 2 * MIB, TensorClass.ACTIVATION),
        Tensor("w", MIB, TensorClass.PARAMETER, is_persistent=True),
    ),
    name="sample",
    origin="step",
)
PLAN = Plan(
    policy="hand",
    trace_digest=TRACE.digest,
    op_count=4,
    budget_bytes={DEVICE: 7 * MIB, HOST: 64 * MIB, NVME: 64 * MIB},
    peak_bytes={DEVICE: 7 * MIB, HOST: 0, NVME: 4 * MIB},
    residencies=(
        Residency(0, DEVICE, 0, 2),
        Residency(0, NVME, 2, 4),
        Residency(0, DEVICE, 3, 4),
        Residency(1, DEVICE, 1, 3),
        Residency(2, DEVICE, 0, 4),
    ),
    transfers=(Transfer(0, DEVICE, NVME, 2, 2, 0), Transfer(0, NVME, DEVICE, 3, 3, 1)),
    skipped={"small": 1},
    step_ns=48 * MS,
)
TIMELINE = Timeline(
    ops=(OpSpan(0, 11 * MS), OpSpan(11 * MS, 22 * MS), OpSpan(30 * MS, 40 * MS), OpSpan(46 * MS, 56 * MS)),
    transfers=(
        TransferSpan(0, DEVICE, NVME, 22 * MS, 29 * MS, 4 * MIB),
        TransferSpan(0, NVME, DEVICE, 40 * MS, 45 * MS, 4 * MIB),
    ),
    stalls=(Stall(2, 7 * MS, 0, DEVICE, NVME), Stall(3, 5 * MS, 0, NVME, DEVICE)),
    memory={DEVICE: (5 * MIB, 7 * MIB, 3 * MIB, 5 * MIB), HOST: (0, 0, 0, 0), NVME: (0, 0, 4 * MIB, 4 * MIB)},
    step_ns=56 * MS,
)
MACHINE = Machine(
    "box", nvme_bytes=64 * MIB, nvme_write_bytes_per_s=1000 * MIB, nvme_read_bytes_per_s=1000 * MIB, nvme_endurance_bytes=10**15
)


def figures(number: int, phase: str = "planned") -> StepFigures:
    """Returns the figures of a step like that of `TIMELINE`."""
    moved = {"d2h": 0, "h2d": 0, "nvme_write": 4 * MIB, "nvme_read": 4 * MIB}
    return StepFigures(number, phase, 57 * MS, 42 * MS, 12 * MS, 0, 7 * MIB, 0, 4 * MIB, moved)


def sample() -> Run:
    """Returns a run that moved one activation to the NVMe and back."""
    steps = (figures(1, "traced"), figures(2, "measured"), figures(3))
    return Run(TRACE, PLAN, TIMELINE, 'device = "cpu"\n', steps, MACHINE, "one\ntwo\nthree\nfour\nfive\nsix <b>")


def hostile() -> Run:
    """Returns the same with names that end a script and begin another."""
    tensors = tuple(replace(tensor, name=f"{tensor.name}{HOSTILE}") for tensor in TRACE.tensors)
    ops = tuple(replace(op, name=f"{op.name}{HOSTILE}", module=HOSTILE) for op in TRACE.ops)
    trace = replace(TRACE, ops=ops, tensors=tensors, name=HOSTILE)
    machine = replace(MACHINE, name=HOSTILE)
    run = replace(sample(), trace=trace, plan=replace(PLAN, trace_digest=trace.digest), machine=machine)
    return replace(run, config_toml=HOSTILE, explanation=HOSTILE, result={HOSTILE: HOSTILE})


def idle() -> Run:
    """Returns a run in which everything fits, so nothing was moved or timed."""
    held = (Residency(0, DEVICE, 0, 4), Residency(1, DEVICE, 1, 3), Residency(2, DEVICE, 0, 4))
    plan = replace(PLAN, residencies=held, transfers=(), peak_bytes={DEVICE: 7 * MIB, HOST: 0, NVME: 0}, step_ns=40 * MS)
    step = replace(figures(3, "nothing moved"), stall_ns=0, nvme_bytes=0, moved_bytes=dict.fromkeys(figures(3).moved_bytes, 0))
    return replace(sample(), plan=plan, timeline=Timeline((), (), ()), steps=(step,), explanation="")
