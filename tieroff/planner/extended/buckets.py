"""Buckets of the optimizer that the CPU can update, and what they touch; see [Note: updated problems] in host_updates.py."""

from __future__ import annotations

from dataclasses import dataclass

from tieroff.core.buckets import updated_on_device
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.trace import Queue, Trace
from tieroff.planner.problem.problem import Problem
from tieroff.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class Bucket:
    """An op of the optimizer that the CPU can run, and what it touches; see [Note: updated problems].

    Attributes:
        op: its index.
        state, parameters, gradients: tensors.
        cpu_ns: what the update takes with host memory to itself.
        beside_ns: the same beside copies both ways.
        moved_ns: what the busier link takes to move the state, to the device and back.
    """

    op: int
    state: tuple[int, ...]
    parameters: tuple[int, ...]
    gradients: tuple[int, ...]
    cpu_ns: int
    beside_ns: int
    moved_ns: int

    @property
    def tensors(self) -> tuple[int, ...]:
        """All that it touches."""
        return self.state + self.parameters + self.gradients


def uses_of(trace: Trace) -> list[list[int]]:
    """Returns the ops that touch each tensor, in order."""
    runs: list[list[int]] = [[] for _ in trace.tensors]
    for index, op in enumerate(trace.ops):
        for tensor in {*op.reads, *op.writes}:
            runs[tensor].append(index)
    return runs


def can_update(problem: Problem) -> bool:
    """True when the executor updates on the host, the machine says how fast, and there is host memory."""
    can = problem.capabilities
    returns = can.wraps or can.updates_cross  # parameters come back across the step's end
    return can.updates_on_host and returns and problem.machine.cpu_update_bytes_per_s > 0 and Tier.HOST in problem.tiers


def find_buckets(problem: Problem) -> list[Bucket]:
    """Returns the buckets that the CPU can update, in order of op.

    Also those that it updates in more time than the links take to move their state: it works beside them, so the fastest step
    may give each side a share.
    """
    if not can_update(problem):
        return []
    runs = uses_of(problem.trace)
    stays = updated_on_device(problem.trace.meta)
    found: list[Bucket] = []
    backward_end = end_of_backward(problem.trace)
    for index, op in enumerate(problem.trace.ops):
        if op.phase != "optimizer" or op.queue is Queue.COMMUNICATION:
            continue
        if index < backward_end and not problem.capabilities.updates_early:
            continue
        own = tuple(dict.fromkeys((*op.reads, *op.writes)))
        if stays and not stays.isdisjoint(problem.trace.tensors[tensor].name for tensor in own):
            continue
        kinds = {tensor: _kind(problem, tensor, runs[tensor], index) for tensor in own}
        if "" in kinds.values():
            continue
        state, parameters, gradients = (
            tuple(t for t in own if kinds[t] == kind) for kind in ("state", "parameter", "gradient")
        )
        counted = sum(problem.size_bytes(t) for t in own if problem.trace.tensors[t].kind is TensorClass.OPTIMIZER)
        if counted and _has_its_gradients(problem, parameters, gradients):
            machine = problem.machine
            rates = machine.cpu_update_bytes_per_s, max(machine.update_bytes_per_s, 1)
            cpu_ns, beside_ns = (-(-counted * NS_PER_S // rate) for rate in rates)
            held = sum(map(problem.size_bytes, state))
            moved_ns = max(link.transfer_ns(held) for link in problem.links(Tier.HOST))
            found.append(Bucket(index, state, parameters, gradients, cpu_ns, beside_ns, moved_ns))
    return found


def end_of_backward(trace: Trace) -> int:
    """Returns the op after the last one of backward."""
    return max((index + 1 for index, op in enumerate(trace.ops) if op.phase == "backward"), default=0)


def _has_its_gradients(problem: Problem, parameters: tuple[int, ...], gradients: tuple[int, ...]) -> bool:
    """True where gradients need not follow their parameters below, or do so by the bucket's own copies."""
    if not problem.capabilities.gradient_follows_parameter:
        return True
    tensors, own = problem.trace.tensors, set(parameters)
    owned = {i for i, tensor in enumerate(tensors) if tensor.kind is TensorClass.GRADIENT and tensor.owner in own}
    return owned == {gradient for gradient in gradients if tensors[gradient].owner >= 0}


def _kind(problem: Problem, tensor: int, runs: list[int], op: int) -> str:
    """Returns what a tensor is to an update, or "" where the CPU cannot have it; see [Note: updated problems]."""
    trace, own = problem.trace, problem.trace.tensors[tensor]
    if own.kind is TensorClass.INPUT or not own.is_movable or own.size_bytes < problem.capabilities.min_bytes:
        return ""
    others = [run for run in runs if run != op]
    if any(trace.ops[run].phase == "optimizer" for run in others):
        return ""
    if any(start == op and stop > op + 1 for start, stop in own.holds):
        return ""  # the program wants it from the update on, which it would have to wait for at once
    if not own.is_persistent:
        return "gradient" if others and others[-1] < op else ""
    if any(tensor in trace.ops[run].writes for run in others):
        is_sum = own.kind is TensorClass.GRADIENT and others[-1] < op and all(stop <= op + 1 for _, stop in own.holds)
        return "gradient" if is_sum else ""
    if others and tensor not in trace.ops[op].writes and not problem.capabilities.wraps:
        return ""  # a frozen one, which a plan may keep on the device across the step's end, and nothing brings back
    return "parameter" if others else "state"
