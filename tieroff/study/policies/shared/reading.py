"""What published rules ask of a trace besides its tensors: phases, layers, and the gaps of what backward reads again."""

from __future__ import annotations

import itertools
from enum import StrEnum

from tieroff.core.tensor import TensorClass
from tieroff.core.trace import Op, Trace
from tieroff.planner.problem.problem import Problem, Slot


class Phase(StrEnum):
    """A part of the step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


# Parts of kernels' names in traces from files, in the order of asking: `Linear_Apply_Grad_Weight`, `Add_MultiGredient`.
_PHASE_WORDS = (
    ("apply_grad", Phase.OPTIMIZER),
    ("backward", Phase.BACKWARD),
    ("multigredient", Phase.BACKWARD),
    ("forward", Phase.FORWARD),
    ("makeloss", Phase.FORWARD),
)
_WEIGHTED_WORDS = ("conv", "linear", "matmul")


def phase_of(op: Op) -> Phase | None:
    """Returns the phase that an op's own fields or name tell, or None."""
    if op.phase:
        return Phase.BACKWARD if op.phase == "recompute" else Phase(op.phase)
    name = op.name.lower()
    return next((phase for word, phase in _PHASE_WORDS if word in name), None)


def phases(trace: Trace) -> tuple[Phase, ...]:
    """Returns the phase of each op; one that does not tell is of the phase of the op before it, at first of forward.

    In a trace that tells nothing, forward goes up to the op with the most bytes that are not persistent.
    """
    told = [phase_of(op) for op in trace.ops]
    if not any(told):
        change = [0] * (len(told) + 1)
        for tensor, life in zip(trace.tensors, trace.lifetimes, strict=True):
            if not tensor.is_persistent:
                change[life.birth] += tensor.size_bytes
                change[life.death] -= tensor.size_bytes
        line = list(itertools.accumulate(change[:-1]))
        turn = line.index(max(line)) + 1
        return tuple(Phase.FORWARD if index < turn else Phase.BACKWARD for index in range(len(told)))
    last = Phase.FORWARD
    result: list[Phase] = []
    for phase in told:
        last = phase or last
        result.append(last)
    return tuple(result)


def turn_of(trace: Trace) -> int:
    """Returns the first op that is not forward: where forward ends."""
    return next((index for index, phase in enumerate(phases(trace)) if phase is not Phase.FORWARD), len(trace.ops))


def layers(trace: Trace) -> tuple[int, ...]:
    """Returns the layer of each op.

    In forward, consecutive ops of one module are a layer, and an op without a module is one by itself; layers count up
    from 0. An op after it is of the layer that last read, in forward, what the op reads of forward; it is never of a
    later layer than the ops before it, since backward goes down.
    """
    turn = turn_of(trace)
    result: list[int] = []
    reader_of: dict[int, int] = {}
    for index, op in enumerate(trace.ops[:turn]):
        is_same = index > 0 and op.module != "" and op.module == trace.ops[index - 1].module
        layer = result[-1] + (not is_same) if result else 0
        result.append(layer)
        for tensor in (*op.reads, *op.writes):
            if not trace.tensors[tensor].is_persistent:
                reader_of[tensor] = layer
    layer = result[-1] if result else 0
    for op in trace.ops[turn:]:
        told = [reader_of[tensor] for tensor in op.reads if tensor in reader_of]
        layer = min(layer, max(told, default=layer))
        result.append(layer)
    return tuple(result)


def is_weighted(trace: Trace) -> tuple[bool, ...]:
    """Returns for each op whether it is a convolution, a linear layer or a product of matrices: the costly kinds.

    Names tell. Where no name does, they are the ops that read a parameter larger than the average one.
    """
    told = [any(word in op.name.lower() for word in _WEIGHTED_WORDS) for op in trace.ops]
    if any(told):
        return tuple(told)
    sizes = [t.size_bytes for t in trace.tensors if t.kind is TensorClass.PARAMETER]
    mean_bytes = sum(sizes) / max(1, len(sizes))
    is_weight = [t.kind is TensorClass.PARAMETER and t.size_bytes >= mean_bytes for t in trace.tensors]
    return tuple(any(is_weight[tensor] for tensor in op.reads) for op in trace.ops)


def saved_slots(problem: Problem) -> list[Slot]:
    """Returns, in order of production, the slots over which activations wait from forward for backward.

    Each is the gap of an activation from its last use in forward to its first use after it; one whose life ends
    without that use is not among them.
    """
    turn = turn_of(problem.trace)
    tensors, lifetimes = problem.trace.tensors, problem.trace.lifetimes
    slots = [slot for unit in problem.units for slot in unit.slots if not slot.is_last]
    saved = [
        slot
        for slot in slots
        if tensors[slot.tensor].kind is TensorClass.ACTIVATION
        and not tensors[slot.tensor].is_persistent
        and lifetimes[slot.tensor].birth < turn
        and slot.start <= turn <= slot.stop
    ]
    return sorted(saved, key=lambda slot: (lifetimes[slot.tensor].birth, slot.tensor))
