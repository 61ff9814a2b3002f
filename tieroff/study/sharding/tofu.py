"""Tofu's recursion (Wang, Huang, Li: Supporting Very Large Models using Automatic Dataflow Graph Partitioning, EuroSys 2019).

The devices are halved level by level (2, 4, 8). On each level every tensor is cut in two along one dimension, and the cuts
are chosen together so that the fewest bytes are exchanged: an operator whose operands lie otherwise than one of its splits
wants fetches what it has not, and what it makes is brought where its tensor lies. A level is solved exactly by elimination
(the paper's dynamic program over a coarsened chain of groups is the same minimum, found on chains only).

With a `Rule` the same search is held to the splits of others: data parallelism, ZeRO-3, tensor parallelism.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tieroff.core.sharding.exchange import exchanged_shares
from tieroff.core.sharding.graph import REPLICATED, OpSplit, ShardedOp, StepGraph
from tieroff.core.sharding.placements import Placements
from tieroff.errors import ConfigError
from tieroff.study.sharding.elimination import Factor, eliminate

TWICE_SHARE = 1e-3
"""Of a result's bytes: what an op costs besides that runs whole in both groups, so that ties go to ops that are split."""

_PRODUCTS = ("mm", "convolution", "attention")
"""Parts of the names of ops that are most of a step's work."""

Rule = Callable[[StepGraph, int, list[int]], list[int]]
"""From a graph, a tensor and the dimensions that it can be cut along, to the placements that are left to it."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way to split a step that a search is held to.

    Attributes:
        name: for people.
        rule: what placements each tensor may have.
        computes_twice: products may run whole in every group where that exchanges less.
    """

    name: str
    rule: Rule
    computes_twice: bool = True


@dataclass(frozen=True, slots=True)
class Level:
    """One halving of the devices: a placement per tensor, and a split per op."""

    placements: tuple[int, ...]
    splits: tuple[OpSplit, ...]


@dataclass(frozen=True)
class Partition:
    """A step over `2 ** len(levels)` devices, outermost level first."""

    graph: StepGraph
    levels: tuple[Level, ...]

    @property
    def device_count(self) -> int:
        """How many devices there are."""
        return 1 << len(self.levels)

    @functools.cached_property
    def op_bytes(self) -> tuple[tuple[int, ...], ...]:
        """Bytes that all devices exchange around each op of the step, and at last for the update; each by level."""
        rows = []
        for position, op in enumerate(self.graph.ops):
            pairs = [(t, self.placements(t), want) for t, want in zip(op.inputs, self.reads(position), strict=True)]
            made = zip(op.outputs, self.makes(position), strict=True)
            rows.append(self._sum([*pairs, *((t, make, self.placements(t)) for t, make in made)]))
        owned = [(i, self.placements(i), self.placements(t.owner)) for i, t in enumerate(self.graph.tensors) if t.owner >= 0]
        return (*rows, self._sum(owned))

    def _sum(self, moves: Sequence[tuple[int, Placements, Placements]]) -> tuple[int, ...]:
        shares = [exchanged_shares(source, target) for _, source, target in moves]
        sizes = [self.graph.tensors[tensor].size_bytes for tensor, _, _ in moves]
        return tuple(
            round(sum(share[level] * size for share, size in zip(shares, sizes, strict=True)))
            for level in range(len(self.levels))
        )

    @property
    def level_bytes(self) -> tuple[int, ...]:
        """Bytes that all devices exchange in a step, by level."""
        return tuple(sum(row[level] for row in self.op_bytes) for level in range(len(self.levels)))

    @property
    def exchanged_bytes(self) -> int:
        """Bytes that all devices exchange in a step."""
        return sum(self.level_bytes)

    def reads(self, op: int) -> tuple[Placements, ...]:
        """Returns where each input of an op is brought for it."""
        return tuple(zip(*(level.splits[op].inputs for level in self.levels), strict=True)) or ((),) * len(
            self.graph.ops[op].inputs
        )

    def makes(self, op: int) -> tuple[Placements, ...]:
        """Returns where each output of an op comes to lie."""
        return tuple(zip(*(level.splits[op].outputs for level in self.levels), strict=True)) or ((),) * len(
            self.graph.ops[op].outputs
        )

    def placements(self, tensor: int) -> Placements:
        """Returns a tensor's placement on each level."""
        return tuple(level.placements[tensor] for level in self.levels)

    def local_bytes(self, tensor: int) -> int:
        """Returns what one device holds of a tensor."""
        cuts = sum(placement >= 0 for placement in self.placements(tensor))
        return self.graph.tensors[tensor].size_bytes >> cuts

    def held_share(self) -> float:
        """Returns what one device holds of all parameters, as a share of their bytes."""
        chosen = [i for i, tensor in enumerate(self.graph.tensors) if tensor.kind == "parameter"]
        whole = sum(self.graph.tensors[i].size_bytes for i in chosen)
        return sum(self.local_bytes(i) for i in chosen) / whole if whole else 1.0


def partition_step(graph: StepGraph, device_count: int, scheme: Scheme | None = None) -> Partition:
    """Returns Tofu's partition, or the best of the same recursion under another scheme.

    Tofu's recursion runs under ZeRO-3's rule too, and the better one is taken: each level is the best for itself, but the
    sum of several greedy levels need not be.

    Raises:
        ConfigError: the number of devices is no power of two.
    """
    if device_count < 1 or device_count & (device_count - 1):
        raise ConfigError(f"expected 1, 2, 4, 8 … devices, got {device_count}")
    found = _recurse(graph, device_count, scheme or TOFU)
    if (scheme is not None and scheme is not TOFU) or device_count <= 2:
        return found
    return min(found, _recurse(graph, device_count, ZERO3), key=lambda partition: partition.exchanged_bytes)


def _recurse(graph: StepGraph, device_count: int, scheme: Scheme) -> Partition:
    partition = Partition(graph, ())
    while partition.device_count < device_count:
        partition = Partition(graph, (*partition.levels, _Halving(partition, scheme).solve()))
    return partition


class _Halving:
    """One more level: a variable per tensor (its placement) and per op (its split), and a table per op and operand.

    A table holds what is exchanged on all levels together, for what a level moves depends on how the others lie.
    """

    def __init__(self, above: Partition, scheme: Scheme) -> None:
        self._above, self._graph, self._scheme = above, above.graph, scheme
        self._placed = [above.placements(tensor) for tensor in range(len(self._graph.tensors))]
        whole = {tensor for op in self._graph.ops if not op.is_run for tensor in op.outputs}
        written = {op.inputs[place] for op in self._graph.ops for place in op.written}
        self._domains: list[list[int]] = []
        for index, (tensor, placed) in enumerate(zip(self._graph.tensors, self._placed, strict=True)):
            dims = [dim for dim in range(len(tensor.shape)) if self._is_even(index, placed, dim)]
            allowed = [REPLICATED] if index in whole else scheme.rule(self._graph, index, dims)
            if index in written and REPLICATED not in allowed:  # ops that write it may have to have it whole
                allowed = [*allowed, REPLICATED]
            self._domains.append(allowed)

    def _is_even(self, tensor: int, above: Placements, placement: int) -> bool:
        if placement < 0:
            return True
        return self._graph.tensors[tensor].shape[placement] % (2 << above.count(placement)) == 0

    def solve(self) -> Level:
        tensors = len(self._domains)
        sizes = [len(domain) for domain in self._domains]
        splits_of = [self._splits(position, op) for position, op in enumerate(self._graph.ops)]
        factors: list[Factor] = []
        for position, (op, splits) in enumerate(zip(self._graph.ops, splits_of, strict=True)):
            variable = len(sizes)
            sizes.append(len(splits))
            factors.append(Factor((variable,), np.array([self._twice(op, split) for split in splits])))
            factors += [Factor((variable, t), table) for t, table in self._tables(position, op, splits)]
        for index, tensor in enumerate(self._graph.tensors):
            if tensor.owner >= 0:  # the update wants the gradient where the parameter is
                factors.append(Factor((index, tensor.owner), self._moves(index, tensor.owner)))
        found = eliminate(sizes, factors)
        if not math.isfinite(found.cost):
            raise ConfigError("expected a way to split every operator, but some rule leaves none")
        placements = tuple(domain[v] for domain, v in zip(self._domains, found.values[:tensors], strict=True))
        return Level(placements, tuple(splits[v] for splits, v in zip(splits_of, found.values[tensors:], strict=True)))

    def _splits(self, position: int, op: ShardedOp) -> list[OpSplit]:
        """Returns the splits whose operands can be cut so; under some schemes no product is computed twice."""
        operands = (*op.inputs, *op.outputs)
        above = (*self._above.reads(position), *self._above.makes(position))
        even = [s for s in op.splits if all(map(self._is_even, operands, above, (*s.inputs, *s.outputs)))]
        if self._scheme.computes_twice or not any(part in op.name for part in _PRODUCTS):
            return even
        once = [s for s in even if set(s.outputs) != {REPLICATED}]
        return once or even

    def _twice(self, op: ShardedOp, split: OpSplit) -> float:
        whole = [t for t, placement in zip(op.outputs, split.outputs, strict=True) if placement == REPLICATED]
        return TWICE_SHARE * sum(self._graph.tensors[t].size_bytes for t in whole)

    def _tables(self, position: int, op: ShardedOp, splits: Sequence[OpSplit]) -> list[tuple[int, NDArray[np.float64]]]:
        """Returns per operand the bytes by split and placement; an operand that is read twice is fetched for each."""
        tables: list[tuple[int, NDArray[np.float64]]] = []
        for place, (tensor, above) in enumerate(zip(op.inputs, self._above.reads(position), strict=True)):
            wanted = [(*above, split.inputs[place]) for split in splits]
            rows = [[self._bytes(tensor, (*self._placed[tensor], p), w) for p in self._domains[tensor]] for w in wanted]
            table = np.array(rows)
            if place in op.written:
                stays = [[(*self._placed[tensor], p) == w for p in self._domains[tensor]] for w in wanted]
                table[~np.array(stays)] = np.inf
            tables.append((tensor, table))
        for place, (tensor, above) in enumerate(zip(op.outputs, self._above.makes(position), strict=True)):
            made = [(*above, split.outputs[place]) for split in splits]
            rows = [[self._bytes(tensor, m, (*self._placed[tensor], p)) for p in self._domains[tensor]] for m in made]
            tables.append((tensor, np.array(rows)))
        return tables

    def _bytes(self, tensor: int, source: Placements, target: Placements) -> float:
        return self._graph.tensors[tensor].size_bytes * sum(exchanged_shares(source, target))

    def _moves(self, source: int, target: int) -> NDArray[np.float64]:
        placed, wanted = self._placed[source], self._placed[target]
        return np.array(
            [[self._bytes(source, (*placed, p), (*wanted, q)) for q in self._domains[target]] for p in self._domains[source]]
        )


@functools.lru_cache(maxsize=4)
def _batch_tensors(graph: StepGraph) -> frozenset[int]:
    """Returns the tensors whose first dimension is the batch's, or the batch's and the sequence's as one.

    They follow from an input, and their first dimension is that of the first input, or the product of its first two.
    """
    inputs = [i for i, tensor in enumerate(graph.tensors) if tensor.name.startswith("input.")]
    shape = next((graph.tensors[i].shape for i in inputs if graph.tensors[i].shape), ())
    if not shape:
        return frozenset()
    sizes = {shape[0], shape[0] * (shape[1] if len(shape) > 1 else 1)}
    follows = set(inputs)
    for op in graph.ops:
        if follows.intersection(op.inputs):
            follows.update(op.outputs)
    kinds = ("input", "activation")
    return frozenset(
        i for i in follows if graph.tensors[i].kind in kinds and graph.tensors[i].shape and graph.tensors[i].shape[0] in sizes
    )


def _cut_all(graph: StepGraph, tensor: int, dims: list[int]) -> list[int]:
    return dims or [REPLICATED]


def _cut_batch(graph: StepGraph, tensor: int, dims: list[int]) -> list[int]:
    if tensor in _batch_tensors(graph) and 0 in dims:
        return [0]
    return dims or [REPLICATED]


def _keep_parameters(graph: StepGraph, tensor: int, dims: list[int]) -> list[int]:
    if tensor in _batch_tensors(graph) and 0 in dims:
        return [0]
    return [REPLICATED] if graph.tensors[tensor].kind in ("parameter", "gradient") else [*dims, REPLICATED]


def _keep_batch(graph: StepGraph, tensor: int, dims: list[int]) -> list[int]:
    if graph.tensors[tensor].kind == "input":
        return [REPLICATED]
    if tensor in _batch_tensors(graph):
        return [REPLICATED, *(dim for dim in dims if dim > 0)]
    return dims or [REPLICATED]


TOFU = Scheme("tofu", _cut_all)
"""Every tensor is cut along one dimension per level."""
ZERO3 = Scheme("zero-3", _cut_batch)
"""What has the batch is cut by it, parameters and the rest along any dimension."""
DATA_PARALLEL = Scheme("data parallel", _keep_parameters)
"""What has the batch is cut by it, parameters and gradients are whole everywhere."""
TENSOR_PARALLEL = Scheme("tensor parallel", _keep_batch, computes_twice=False)
"""As in Megatron: inputs are whole everywhere, nothing is cut by the batch, no product is computed twice."""
SCHEMES = (TOFU, ZERO3, TENSOR_PARALLEL, DATA_PARALLEL)
