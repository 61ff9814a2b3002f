"""How planning grows with the step: time and memory for GPT-like traces of a thousand to fifty thousand tensors.

A layer has 64 tensors (12 parameters with their gradients and two moments each, 13 activations, 3 gradients of
activations) and 40 ops; a step has 2 of each more. Every trace is planned in a process of its own; CPU seconds are those of
all its threads. Memory is the peak resident set above what the process had with the trace made; the peak itself, with the
interpreter, all modules and the trace, is beside it.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.results import command_of, save, when_and_where
from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR, RUNTIME_EXECUTOR
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.planner.make_plan import plan_with_timeline
from tieroff.report.terminal import make_table
from tieroff.units import GIB, KIB, NS_PER_S

COUNTS = (1_000, 5_000, 10_000, 25_000, 50_000)
PER_LAYER = 64
MACHINE = Machine(
    name="made up",
    measured="made up: a device with one host link and two drives",
    d2h_bytes_per_s=25 * 10**9,
    h2d_bytes_per_s=25 * 10**9,
    nvme_write_bytes_per_s=6 * 10**9,
    nvme_read_bytes_per_s=12 * 10**9,
    duplex_share=0.9,
)
EXECUTORS = {"runtime": RUNTIME_EXECUTOR, "ideal": IDEAL_EXECUTOR}

_WIDTH, _TOKENS, _ELEMENT_BYTES = 1024, 4096, 4
_FLOPS_PER_S, _BYTES_PER_S = 10**14, 2 * 10**12
_MATRICES = {2: 3, 4: 1, 8: 4, 10: 4}  # parameter of a layer -> its elements over the width squared; the others are vectors

# A layer's ops: reads, writes. p: parameters, G: their gradients, a: activations, x and g: the residual stream and its
# gradient as they come in, y and h: as they leave, u: gradients within the layer.
_FORWARD = (
    ("norm1", "x p0 p1", "a0 a1"),
    ("qkv", "a0 p2 p3", "a2"),
    ("attention", "a2", "a3 a4"),
    ("out", "a3 p4 p5", "a5"),
    ("add1", "x a5", "a6"),
    ("norm2", "a6 p6 p7", "a7 a8"),
    ("up", "a7 p8 p9", "a9"),
    ("gelu", "a9", "a10"),
    ("down", "a10 p10 p11", "a11"),
    ("add2", "a6 a11", "y"),
)
_BACKWARD = (
    ("down_weight", "g a10", "G10"),
    ("down_bias", "g", "G11"),
    ("down_input", "g p10", "u0"),
    ("gelu_input", "u0 a9", "u0"),
    ("up_weight", "u0 a7", "G8"),
    ("up_bias", "u0", "G9"),
    ("up_input", "u0 p8", "u1"),
    ("norm2_weight", "u1 a6 a8", "G6 G7"),
    ("norm2_input", "u1 a6 a8 p6 g", "g"),
    ("out_weight", "g a3", "G4"),
    ("out_bias", "g", "G5"),
    ("out_input", "g p4", "u1"),
    ("attention_input", "u1 a2 a3 a4", "u1"),
    ("qkv_weight", "u1 a0", "G2"),
    ("qkv_bias", "u1", "G3"),
    ("qkv_input", "u1 p2", "u1"),
    ("norm1_weight", "u1 x a1", "G0 G1"),
    ("norm1_input", "u1 x a1 p0 g", "h"),
)
_WIDE = {"a2": 3, "a9": 4, "a10": 4, "u0": 4}  # activations wider than the residual stream
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Row:
    """What planning one trace took.

    Attributes:
        tensor_count, op_count: of the trace.
        executor: name in EXECUTORS.
        share: of the peak with nothing moved, that is the device's budget.
        cpu_s, wall_s: of planning, the check of the plan included.
        memory_bytes: peak resident set above the one before planning.
        peak_bytes: peak resident set of the process while it planned.
        transfer_count: of the plan.
        step_s, ideal_s: predicted step time, and the sum of the ops' durations.
    """

    tensor_count: int
    op_count: int
    executor: str
    share: float
    cpu_s: float
    wall_s: float
    memory_bytes: int
    peak_bytes: int
    transfer_count: int
    step_s: float
    ideal_s: float


class _Builder:
    """A trace under construction."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.tensors: list[Tensor] = []

    def tensor(self, name: str, size_bytes: int, kind: TensorClass, owner: int = -1) -> int:
        """Adds a tensor and returns its index."""
        persistent = kind in (TensorClass.PARAMETER, TensorClass.OPTIMIZER, TensorClass.INPUT)
        self.tensors.append(Tensor(name, size_bytes, kind, is_persistent=persistent, owner=owner))
        return len(self.tensors) - 1

    def op(self, name: str, phase: str, reads: list[int], writes: list[int]) -> None:
        """Adds an op that takes as long as its bytes or, with a matrix, its multiplications do."""
        touched = sum(self.tensors[t].size_bytes for t in {*reads, *writes})
        matrices = [self.tensors[t] for t in (*reads, *writes) if self.tensors[t].size_bytes >= _matrix_bytes(1)]
        weights = [t for t in matrices if t.kind in (TensorClass.PARAMETER, TensorClass.GRADIENT) and phase != "optimizer"]
        flops = sum(2 * _TOKENS * (t.size_bytes // _ELEMENT_BYTES) for t in weights)
        duration_ns = NS_PER_S * touched // _BYTES_PER_S + NS_PER_S * flops // _FLOPS_PER_S
        self.ops.append(Op(name, max(1, duration_ns), tuple(reads), tuple(writes), phase=phase))


def _matrix_bytes(share: int) -> int:
    return share * _WIDTH * _WIDTH * _ELEMENT_BYTES


def make_trace(tensor_count: int) -> Trace:
    """Returns a step of as many layers as go into so many tensors, at least one."""
    build = _Builder()
    row_bytes = _TOKENS * _WIDTH * _ELEMENT_BYTES
    layers = max(1, (tensor_count - 2) // PER_LAYER)
    symbols = build.tensor("symbols", _TOKENS * 8, TensorClass.INPUT)
    stream = build.tensor("stream", row_bytes, TensorClass.ACTIVATION)
    build.op("embed", "forward", [symbols], [stream])
    names: list[dict[str, int]] = []
    for layer in range(layers):
        index = {"x": stream}
        for number in range(12):
            size = _matrix_bytes(_MATRICES[number]) if number in _MATRICES else _WIDTH * 64 * _ELEMENT_BYTES
            index[f"p{number}"] = owner = build.tensor(f"{layer}.p{number}", size, TensorClass.PARAMETER)
            index[f"G{number}"] = build.tensor(f"{layer}.p{number}.grad", size, TensorClass.GRADIENT, owner)
            for moment in _MOMENTS:
                index[f"{moment}{number}"] = build.tensor(f"{layer}.p{number}.{moment}", size, TensorClass.OPTIMIZER, owner)
        for name in (*(f"a{number}" for number in range(12)), "y", "g", "u0", "u1"):
            index[name] = build.tensor(f"{layer}.{name}", _WIDE.get(name, 1) * row_bytes, TensorClass.ACTIVATION)
        for name, reads, writes in _FORWARD:
            build.op(f"{layer}.{name}", "forward", [index[n] for n in reads.split()], [index[n] for n in writes.split()])
        stream = index["y"]
        names.append(index)
    build.op("loss", "backward", [stream], [names[-1]["g"]])
    for layer in reversed(range(layers)):
        index = names[layer]
        index["h"] = names[layer - 1]["g"] if layer else index["g"]
        for name, reads, writes in _BACKWARD:
            build.op(f"{layer}.{name}", "backward", [index[n] for n in reads.split()], [index[n] for n in writes.split()])
    for layer, index in enumerate(names):
        for number in range(12):
            updated = [index[f"{name}{number}"] for name in ("p", *_MOMENTS)]
            build.op(f"{layer}.update{number}", "optimizer", [*updated, index[f"G{number}"]], updated)
    return Trace(tuple(build.ops), tuple(build.tensors), name=f"gpt of {layers} layers")


def measure(tensor_count: int, executor: str, share: float) -> Row:
    """Returns what planning takes with a device budget of a share of the peak; the tiers below have room."""
    trace = make_trace(tensor_count)
    budget = {Tier.DEVICE: int(share * trace.peak_bytes), Tier.HOST: trace.peak_bytes // 2, Tier.NVME: 4 * trace.peak_bytes}
    before_bytes = _reset_peak()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    plan, _ = plan_with_timeline(trace, MACHINE, budget, capabilities=EXECUTORS[executor])
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    peak_bytes = _status_bytes("VmHWM")
    return Row(
        tensor_count=len(trace.tensors),
        op_count=len(trace.ops),
        executor=executor,
        share=share,
        cpu_s=cpu_s,
        wall_s=wall_s,
        memory_bytes=peak_bytes - before_bytes,
        peak_bytes=peak_bytes,
        transfer_count=len(plan.transfers),
        step_s=plan.step_ns / NS_PER_S,
        ideal_s=trace.ideal_ns / NS_PER_S,
    )


def _reset_peak() -> int:
    """Makes the present resident set the peak, and returns it in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}; the peak resident set is measured on Linux only")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=COUNTS, help="about how many tensors each trace has")
    parser.add_argument("--executors", nargs="+", choices=sorted(EXECUTORS), default=["runtime"], help="whom to plan for")
    parser.add_argument("--share", type=float, nargs="+", default=[0.5], help="device budgets, of the peak with nothing moved")
    parser.add_argument("--json", type=Path, default=None, help="also write everything to this file")
    options = parser.parse_args(arguments)
    if min(options.tensors) < PER_LAYER + 2:
        parser.error(f"expected traces of {PER_LAYER + 2} tensors or more, got {min(options.tensors)}")
    for share in options.share:
        if not 0.0 < share <= 1.0:
            parser.error(f"expected a share above 0 and up to 1, got {share}")
    return options


def show(rows: Sequence[Row]) -> None:
    """Prints the rows as a table."""
    names = ("tensors", "ops", "executor", "share", "cpu s", "wall s", "memory GiB", "KiB / tensor", "peak GiB", "transfers")
    table = make_table(None, (*names, "step / ideal"), text_columns=0)
    for row in rows:
        table.add_row(
            f"{row.tensor_count:,}",
            f"{row.op_count:,}",
            row.executor,
            f"{row.share:g}",
            f"{row.cpu_s:.2f}",
            f"{row.wall_s:.2f}",
            f"{row.memory_bytes / GIB:.3f}",
            f"{row.memory_bytes / KIB / row.tensor_count:.1f}",
            f"{row.peak_bytes / GIB:.3f}",
            f"{row.transfer_count:,}",
            f"{row.step_s / row.ideal_s:.3f}",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def document(command: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Returns what is written to JSON."""
    return {
        **when_and_where(command),
        "python": platform.python_version(),
        "effort": "fast",
        "machine": asdict(MACHINE),
        "rows": [asdict(row) for row in rows],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    options = parse_arguments(arguments)
    command = command_of(__file__, arguments)
    rows: list[Row] = []
    # A new process for each: memory that an earlier one left in the heap would hide what the next one takes.
    context = multiprocessing.get_context("spawn")
    for executor, share, count in itertools.product(options.executors, options.share, options.tensors):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            rows.append(pool.submit(measure, count, executor, share).result())
        save(options.json, document(command, rows), indent=2)  # row by row, so that an interruption loses none
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
