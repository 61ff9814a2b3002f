"""A training step as a graph of operators and tensors, each operator with the ways in which it can be split in two.

A placement says how a tensor lies on the groups of one mesh dimension: split along a dimension, whole in each, or as terms
that have yet to be summed. It is a whole number: the dimension, or one of two names below 0.
"""

from __future__ import annotations

from dataclasses import dataclass

REPLICATED = -1
"""Whole in each group."""
PARTIAL = -2
"""Each group has a term of the sum."""


@dataclass(frozen=True, slots=True)
class OpSplit:
    """One way to run an operator on the groups of a mesh dimension: a placement per input and per output."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor of the step.

    Attributes:
        name: of a parameter or input that of the model, else of the op that makes it.
        shape: of the whole tensor.
        size_bytes: of the whole tensor.
        kind: "parameter", "input", "gradient" (of a parameter) or "activation".
        owner: for a gradient the index of its parameter, else -1.
        birth, death: ops between which it lives, half-open; what lives as long as the model from 0 to the end.
        root: the first tensor with the same memory; itself where it is no view.
    """

    name: str
    shape: tuple[int, ...]
    size_bytes: int
    kind: str
    owner: int = -1
    birth: int = 0
    death: int = 0
    root: int = -1


@dataclass(frozen=True, slots=True)
class ShardedOp:
    """An operator: the tensors it reads and makes, in the order of its splits' placements.

    Attributes:
        duration_ns: on one device, whole.
        is_known: False where nobody gives ways to split it: its only split is replicated.
        written: places of the inputs that it writes: they are read where they lie, for a copy would take the write.
        is_direct: each device runs it on its parts as they are, without DTensor's rules.
        is_run: False for what runs on whole tensors on every device, outside the model, and is here for its price.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    splits: tuple[OpSplit, ...]
    duration_ns: int = 0
    is_known: bool = True
    written: tuple[int, ...] = ()
    is_direct: bool = False
    is_run: bool = True


@dataclass(frozen=True, eq=False)
class StepGraph:
    """A step: ops in order, tensors by index.

    Attributes:
        state_share: bytes of the optimizer's state per byte of a parameter: 2 for AdamW.
        first_backward: index of the first op of the model's backward.
        outputs_of: per module (dotted path) the tensor that its last call returned, where it returned one.
    """

    name: str
    ops: tuple[ShardedOp, ...]
    tensors: tuple[ShardedTensor, ...]
    state_share: int = 2
    outputs_of: tuple[tuple[str, int], ...] = ()
    first_backward: int = 0

    @property
    def unknown_ops(self) -> tuple[str, ...]:
        """Names of the operators that nobody gives ways to split, each once."""
        return tuple(dict.fromkeys(op.name for op in self.ops if not op.is_known))


def moved_bytes(size_bytes: float, source: int, target: int) -> float:
    """Returns the bytes that two groups exchange, in all, to bring a tensor of that size from one placement to another.

    A group fetches the half it has not (all-gather), each group half of the other's terms (reduce-scatter: together the
    whole tensor), both (all-reduce), or a quarter each (all-to-all: together half). As in Tofu (EuroSys 2019, 5.1), what is
    whole is cut for nothing, and is a term of a sum whose others are zero.
    """
    if source in (target, REPLICATED):
        return 0.0
    if source == PARTIAL:
        return 2 * size_bytes if target == REPLICATED else size_bytes
    return size_bytes if target in (REPLICATED, PARTIAL) else size_bytes / 2
