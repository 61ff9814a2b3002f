"""What user code does to gradients between backward and update, and its largest call, as uses that a plan provides for.

[Note: gradients below] A gradient that was moved lies below when backward ends, as a tensor that user code may touch. Clipping
them there reads and writes all of them page by page through the file's mapping, which takes longer than loading them. The
update needs them on the device next, too. So a gradient that user code touched in the recorded step counts as used on the
device, as far as there is room; the others are touched where they lie.

[Note: the largest call]
What user code uses comes up for the call, and what the plan moves makes way, so a plan needs nothing for it. A call that
needs more than any op does (all weights in one) is another matter: the budget has to hold it, and what a plan keeps
because the ops leave room for it never makes way. So its tensors are uses of its op where the budget holds them beside what the
op needs itself. Where it does not, the op has room for the call in place of what it uses itself, which makes way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tieroff.core.lifetime import Lifetime
from tieroff.core.tensor import Tensor
from tieroff.core.trace import Trace, largest_call

# Of what is free in that op; the rest is for what comes next, which should arrive meanwhile.
_SHARE = 0.8


def bring_back(trace: Trace, op: int, used: Mapping[int, bool], budget_bytes: int, min_bytes: int) -> Trace:
    """Returns the trace with uses of these tensors in an op, for as many as find room.

    Args:
        trace: of a step.
        op: in which user code runs.
        used: tensors that it uses, and whether it writes them.
        budget_bytes: of the device.
        min_bytes: smaller tensors are always on the device while they live.
    """
    pairs = zip(trace.tensors, trace.lifetimes, strict=True)
    needed_bytes = sum(tensor.size_bytes for tensor, life in pairs if _stays(tensor, life, op, min_bytes))
    room_bytes = int(_SHARE * (budget_bytes - trace.ops[op].transient_bytes - needed_bytes))
    chosen: set[int] = set()
    for tensor in sorted(used, key=lambda tensor: _next_use(trace.lifetimes[tensor], op)):
        life, size_bytes = trace.lifetimes[tensor], trace.tensors[tensor].size_bytes
        if not life.birth <= op < life.death or _stays(trace.tensors[tensor], life, op, min_bytes) or size_bytes > room_bytes:
            continue
        room_bytes -= size_bytes
        chosen.add(tensor)
    if not chosen:
        return trace
    there = trace.ops[op]
    written = {tensor for tensor in chosen if used[tensor]}
    reads, writes = sorted({*there.reads, *chosen}), sorted({*there.writes, *written})
    ops = [*trace.ops]
    ops[op] = replace(there, reads=tuple(reads), writes=tuple(writes))
    return trace.rewritten(tuple(ops), trace.tensors, chosen)


def with_room(trace: Trace, needed_bytes: int, min_bytes: int) -> Trace:
    """Returns the trace with room for the largest call of user code in its op, where that needs more than any op.

    Args:
        trace: of a step.
        needed_bytes: by the op that needs most.
        min_bytes: smaller tensors are always on the device while they live.
    """
    call = largest_call(trace.meta)
    if call is None or call.size_bytes <= needed_bytes:
        return trace
    pairs = enumerate(zip(trace.tensors, trace.lifetimes, strict=True))
    makes_way = sum(
        tensor.size_bytes
        for index, (tensor, life) in pairs
        if index not in call.tensors and _is_used(life, call.op) and tensor.is_movable and tensor.size_bytes >= min_bytes
    )
    return _with_transient(trace, call.op, call.size_bytes - makes_way)


def with_call(trace: Trace, needed_bytes: int) -> Trace:
    """Returns the trace with the tensors of its largest call as uses of that op, where the call needs more than any op."""
    call = largest_call(trace.meta)
    if call is None or call.size_bytes <= needed_bytes:
        return trace
    there = trace.ops[call.op]
    alive = {t for t in call.tensors if trace.lifetimes[t].birth <= call.op < trace.lifetimes[t].death}
    beside_bytes = call.size_bytes - sum(trace.tensors[tensor].size_bytes for tensor in call.tensors)
    ops = [*trace.ops]
    ops[call.op] = replace(there, reads=tuple(sorted({*there.reads, *alive})))
    return _with_transient(trace.rewritten(tuple(ops), trace.tensors, alive), call.op, beside_bytes)


def _with_transient(trace: Trace, op: int, size_bytes: int) -> Trace:
    ops = [*trace.ops]
    ops[op] = replace(ops[op], transient_bytes=max(ops[op].transient_bytes, size_bytes))
    return trace.rewritten(tuple(ops), trace.tensors, set())


def _is_used(life: Lifetime, op: int) -> bool:
    return any(start <= op < stop for start, stop in life.required)


def _stays(tensor: Tensor, life: Lifetime, op: int, min_bytes: int) -> bool:
    """True for a tensor that is on the device in that op whatever the plan."""
    if not life.birth <= op < life.death:
        return False
    is_required = not life.required or _is_used(life, op)
    return is_required or not tensor.is_movable or tensor.size_bytes < min_bytes


def _next_use(life: Lifetime, op: int) -> int:
    return min((start for start, _ in life.required if start > op), default=life.death)
