"""Recompute of whole layers, for an executor that cannot repeat single ops: which ones, and what they cost.

[Note: layers that run again]
Of a layer that runs again nothing is kept from forward but what came in. When backward first asks for something that the
layer saved, the layer runs, and all that it saves is on the device until backward is done with it. Its cost is the time of
its forward ops. The step that is left is one of the same kind, made as for single ops (see [Note: remade problems] in
recompute.py), in which what the layer saves cannot move.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from tieroff.core.plan import Plan, Repeat
from tieroff.core.tensor import TensorClass
from tieroff.core.trace import Queue, Trace
from tieroff.errors import InfeasiblePlanError
from tieroff.planner.extended.recompute import split
from tieroff.units import NS_PER_S, format_bytes, format_seconds

log = logging.getLogger("tieroff")

# What a step must gain, as a share and at least, for layers to run again: less is within the noise of its durations.
_GAIN = 0.05
_GAIN_NS = 5_000_000
_TRIES = 4  # numbers of layers that are planned for


@dataclass(frozen=True, slots=True)
class LayerRun:
    """One forward of a layer.

    Attributes:
        path: of the module.
        ops: its forward ops that run again.
        saved: tensors that it saves and nobody else reads before backward.
        at: the op in which backward first asks for one of them.
        cost_ns: time of `ops`.
    """

    path: str
    ops: range
    saved: tuple[int, ...]
    at: int
    cost_ns: int


def layer_runs(trace: Trace) -> list[LayerRun]:
    """Returns the forwards of layers that the trace names, in order; only of those that save something.

    None with communication among its ops: a layer that runs again would have to communicate again. None at all in a step where
    communication goes on beside compute, of which a second run would take another time than is counted here.
    """
    if not all(map(trace.blocks, trace.communication)):
        return []
    runs: list[LayerRun] = []
    reads: list[list[int]] = [[] for _ in trace.tensors]
    for index, op in enumerate(trace.ops):
        for tensor in op.reads:
            reads[tensor].append(index)
    is_forward = [op.phase == "forward" for op in trace.ops]
    born: dict[int, list[int]] = {}
    for tensor, life in enumerate(trace.lifetimes):
        value = trace.tensors[tensor]
        if value.kind is TensorClass.ACTIVATION and not value.is_persistent and len(life.writes) == 1:
            born.setdefault(life.birth, []).append(tensor)
    for path, group in itertools.groupby(range(len(trace.ops)), lambda i: trace.ops[i].module if is_forward[i] else ""):
        ops = list(group)
        if not path or any(trace.ops[op].queue is Queue.COMMUNICATION for op in ops):
            continue
        saved = [
            tensor
            for op in ops
            for tensor in born.get(op, ())
            if all(read in ops or not is_forward[read] for read in reads[tensor])
            and any(not is_forward[read] for read in reads[tensor])
        ]
        if not saved:
            continue
        at = min(read for tensor in saved for read in reads[tensor] if not is_forward[read])
        cost_ns = sum(trace.ops[op].duration_ns for op in ops)
        runs.append(LayerRun(path, range(ops[0], ops[-1] + 1), tuple(saved), at, cost_ns))
    return runs


def run_again(trace: Trace, runs: list[LayerRun]) -> Trace:
    """Returns the step in which these layers run again; see [Note: layers that run again]."""
    births = {tensor: [run.at] for run in runs for tensor in run.saved}
    needs: dict[int, set[int]] = {}
    for run in runs:
        read = {tensor for op in run.ops for tensor in trace.ops[op].reads}
        needs.setdefault(run.at, set()).update(read - set(run.saved))
    repeats = tuple(Repeat(op, run.at) for run in runs for op in run.ops)
    ring, origin = split(trace, births, needs, repeats)
    tensors = tuple(
        replace(tensor, is_movable=False) if source in births else tensor
        for tensor, source in zip(ring.tensors, origin, strict=True)
    )
    return replace(ring, tensors=tensors)


def choose_modules(trace: Trace, plan: Plan, make: Callable[[Trace], Plan]) -> tuple[str, ...]:
    """Returns the paths of layers to run again in backward, in order of forward; () where that gains next to nothing.

    Layers are taken from the front: what they save has the longest way to backward.

    Args:
        trace: a step whose forward ops name their layers.
        plan: of it, moving alone.
        make: plans a step.
    """
    least_ns = max(int(_GAIN * plan.step_ns), _GAIN_NS)
    runs = layer_runs(trace)
    paths = list(dict.fromkeys(run.path for run in runs))
    costs_ns = {path: sum(run.cost_ns for run in runs if run.path == path) for path in paths}
    stall_ns = plan.step_ns - trace.ideal_ns
    if not paths or stall_ns - min(costs_ns.values()) < least_ns:
        return ()
    best_ns, best = plan.step_ns - least_ns, 0
    for count in sorted({-(-len(paths) * part // _TRIES) for part in range(1, _TRIES + 1)}):
        if sum(costs_ns[path] for path in paths[:count]) > stall_ns:
            break
        try:
            step_ns = make(run_again(trace, [run for run in runs if run.path in paths[:count]])).step_ns
        except InfeasiblePlanError:
            continue
        if step_ns <= best_ns:
            best_ns, best = step_ns, count
    chosen = tuple(paths[:best])
    if chosen:
        size = sum(trace.tensors[tensor].size_bytes for run in runs if run.path in chosen for tensor in run.saved)
        cost, gain = (format_seconds(ns / NS_PER_S) for ns in (sum(costs_ns[path] for path in chosen), plan.step_ns - best_ns))
        log.info(
            "%d layers run again in backward: %s a step for %s less to keep; the step is to take %s less",
            best,
            cost,
            format_bytes(size),
            gain,
        )
    return chosen
