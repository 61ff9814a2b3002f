"""Communication in a recorded step: which of its events begin ops of that queue, and which ops wait for them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from enum import StrEnum

from tieroff.core.tensor import Tensor, TensorClass
from tieroff.core.trace import Queue, Trace


class Kind(StrEnum):
    """A collective; with the number of its group, the key of the event that begins it."""

    GATHER = "gather"
    REDUCE = "reduce"


OVER = "after"
BESIDE = "beside"
"""With the collective's kind and number, the key of the event at which it is over, or compute goes on beside it."""


def with_communication(trace: Trace, keys: Sequence[Hashable]) -> tuple[Trace, dict[Hashable, int]]:
    """Returns the trace with its collectives in the queue of communication, and keys of tensors that are new in it.

    An op of communication has no transient bytes. What is there besides tensors where it begins is a tensor of its own that
    does not move; what is there later counts in the ops beside it.
    """
    if not any(isinstance(key, tuple) and isinstance(key[0], Kind) for key in keys):
        return trace, {}
    ops, tensors, index = list(trace.ops), list(trace.tensors), dict[Hashable, int]()
    begun = dict[Hashable, int]()
    over = {f"{OVER} {kind}": kind for kind in Kind}
    for at, key in enumerate(keys):
        if not isinstance(key, tuple):
            continue
        if isinstance(key[0], Kind):
            begun[key] = at
            size_bytes, name = ops[at].transient_bytes, f"memory beside {ops[at].name} (op {at})"
            ops[at] = replace(ops[at], queue=Queue.COMMUNICATION, transient_bytes=0, made_by="")
            if size_bytes:
                index["communication", at] = len(tensors)
                held = Tensor(name, size_bytes, TensorClass.ACTIVATION, is_movable=False, holds=((at, at + 1),))
                tensors.append(held)
        elif key[0] in over:
            ops[at] = replace(ops[at], awaits=begun.pop((over[key[0]], key[1]), -1))
    return replace(trace, ops=tuple(ops), tensors=tuple(tensors)), index
