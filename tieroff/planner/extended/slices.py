"""Updates in slices in a trace that was not recorded in a run: as the runtime makes them.

The runtime updates a large parameter in slices where a budget in bytes does not hold its whole update. Its state then stays
below and is no tensor of the trace. Rows of it come and go in the update's op, which takes them as transient bytes and lasts
longer.
"""

from __future__ import annotations

from dataclasses import replace

from tieroff.core.buckets import (
    BYTES_BELOW,
    ELEMENTWISE,
    SLICED_AT_LEAST_BYTES,
    SMALLEST_SLICED_BYTES,
    as_bytes_below,
    slice_bytes,
)
from tieroff.core.machine import Machine
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.units import NS_PER_S


def in_slices(trace: Trace, machine: Machine, limit_bytes: int | None, host_bytes: int) -> Trace:
    """Returns a trace in which the optimizer updates parameters in slices, those whose whole update is above a budget.

    Args:
        trace: of an optimizer that is known to be elementwise; any other is returned as it is.
        machine: whose links bring rows.
        limit_bytes: the device budget; None: the least that the step runs in.
        host_bytes: of host memory below; what it does not hold lies on NVMe.
    """
    if ELEMENTWISE not in trace.meta:
        return trace
    away: dict[int, list[int]] = {}
    for index, op in enumerate(trace.ops):
        state = _sliced_state(trace, op, limit_bytes)
        if state:
            away[index] = state
    gone = {tensor for state in away.values() for tensor in state}
    if not gone:
        return trace
    taken_bytes = sum(trace.tensors[tensor].size_bytes for tensor in gone)
    tier = Tier.HOST if taken_bytes <= host_bytes else Tier.NVME
    kept = [tensor for tensor in range(len(trace.tensors)) if tensor not in gone]
    place = {tensor: number for number, tensor in enumerate(kept)}
    ops = tuple(
        replace(
            _sliced(trace, op, away[index], _both_ways_ns(machine, tier)) if index in away else op,
            reads=tuple(place[tensor] for tensor in op.reads if tensor in place),
            writes=tuple(place[tensor] for tensor in op.writes if tensor in place),
        )
        for index, op in enumerate(trace.ops)
    )
    tensors = tuple(replace(trace.tensors[tensor], owner=place.get(trace.tensors[tensor].owner, -1)) for tensor in kept)
    return replace(trace, ops=ops, tensors=tensors, meta={**trace.meta, BYTES_BELOW: as_bytes_below({tier: taken_bytes})})


def _sliced_state(trace: Trace, op: Op, limit_bytes: int | None) -> list[int]:
    """Returns the state that stays below where the runtime makes this op in slices, else nothing."""
    if op.phase != "optimizer":
        return []
    touched = sorted({*op.reads, *op.writes})
    parameters = [trace.tensors[tensor] for tensor in touched if trace.tensors[tensor].kind is TensorClass.PARAMETER]
    if len(parameters) != 1:
        return []
    needed_bytes = sum(trace.tensors[tensor].size_bytes for tensor in touched) + op.transient_bytes
    size_bytes = parameters[0].size_bytes
    is_wanted = size_bytes >= SLICED_AT_LEAST_BYTES
    if limit_bytes is not None:
        is_wanted = size_bytes >= SMALLEST_SLICED_BYTES and needed_bytes > limit_bytes
    if not is_wanted or needed_bytes <= 2 * size_bytes:
        return []
    return [tensor for tensor in touched if trace.tensors[tensor].kind is TensorClass.OPTIMIZER]


def _sliced(trace: Trace, op: Op, state: list[int], both_ways_ns: float) -> Op:
    parameter = next(t for t in {*op.reads, *op.writes} if trace.tensors[t].kind is TensorClass.PARAMETER)
    size_bytes = trace.tensors[parameter].size_bytes
    state_bytes = sum(trace.tensors[tensor].size_bytes for tensor in state)
    own_bytes = (state_bytes + op.transient_bytes) * slice_bytes(size_bytes) // size_bytes
    return replace(op, transient_bytes=own_bytes, duration_ns=op.duration_ns + int(state_bytes * both_ways_ns))


def _both_ways_ns(machine: Machine, tier: Tier) -> float:
    """Returns what a byte takes to the device and back, one after the other."""
    if tier is Tier.HOST:
        rates = machine.h2d_bytes_per_s, machine.d2h_bytes_per_s
    else:
        rates = machine.nvme_read_bytes_per_s, machine.nvme_write_bytes_per_s
    return sum(NS_PER_S / rate for rate in rates if rate)
