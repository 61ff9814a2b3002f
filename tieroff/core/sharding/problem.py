"""The choice of one strategy per node of a graph, as data: a problem and a plan.

A node is an operator or a tensor, a strategy a way to split it over devices. A strategy costs something (time, or bytes on
the wire) and holds bytes on each device while the node lives; an edge costs what it takes to bring one node's split into
the other's. Wanted are the strategies of least cost whose bytes stay within a limit at every time. Costs and bytes are
whole numbers, times are op indices and intervals are half-open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tieroff.errors import ConfigError

FORBIDDEN_COST = 10**18
"""The cost of what cannot be chosen. Costs from a tenth of it on are no choice."""

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ShardingNode:
    """One node: per strategy its cost and the bytes that it holds on each device over [start, stop)."""

    costs: Sequence[int]
    usages: Sequence[int]
    start: int = 0
    stop: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class ShardingEdge:
    """One edge: a cost per pair of strategies, row by row of the source's."""

    source: int
    target: int
    costs: Sequence[int]


@dataclass(frozen=True, eq=False)
class ShardingProblem:
    """Nodes, edges and a limit, in flat arrays.

    Attributes:
        name: which problem.
        first_strategy: (n + 1,) where each node's strategies begin in `cost` and `usage`.
        cost, usage: (strategies,) cost, and bytes on each device.
        start, stop: (n,) when each node's bytes are held.
        source, target: (e,) the ends of each edge.
        first_entry: (e + 1,) where each edge's matrix begins in `entry`, row by row of its source's strategies.
        entry: (entries,) costs of pairs.
        usage_limit: bytes of one device.
        node_names: (n,) names, or empty.
    """

    name: str
    first_strategy: Integers
    cost: Integers
    usage: Integers
    start: Integers
    stop: Integers
    source: Integers
    target: Integers
    first_entry: Integers
    entry: Integers
    usage_limit: int
    node_names: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        sizes = np.diff(self.first_strategy)
        nodes = len(sizes)
        self._expect(len(self.start) == len(self.stop) == nodes, "an interval for every node")
        self._expect(bool((sizes > 0).all()), "at least one strategy for every node")
        self._expect(len(self.cost) == len(self.usage) == self.first_strategy[-1], "a cost and a usage for every strategy")
        self._expect(bool((self.usage >= 0).all()), "usages at or above 0")
        ends = np.concatenate((self.source, self.target))
        self._expect(len(self.source) == len(self.target), "two ends for every edge")
        self._expect(not len(ends) or bool(((ends >= 0) & (ends < nodes)).all()), "edges between nodes that are there")
        entries = sizes[self.source] * sizes[self.target]
        self._expect(bool((np.diff(self.first_entry) == entries).all()), "a cost for every pair of an edge's strategies")

    def _expect(self, is_met: bool, what: str) -> None:
        if not is_met:
            raise ConfigError(f"problem {self.name!r}: expected {what}")

    @property
    def node_count(self) -> int:
        """Nodes of the graph."""
        return len(self.start)

    def strategies_of(self, node: int) -> int:
        """Returns how many strategies a node has."""
        return int(self.first_strategy[node + 1] - self.first_strategy[node])


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """One strategy per node.

    Attributes:
        strategies: an index per node; empty when nothing within the limit was found.
        cost: of all nodes and edges; None without strategies.
        bound: no choice within the limit costs less; None when it is proven that there is no such choice.
        is_feasible: the strategies keep the limit.
    """

    strategies: tuple[int, ...]
    cost: int | None
    bound: float | None
    is_feasible: bool


def build_problem(
    nodes: Sequence[ShardingNode], edges: Sequence[ShardingEdge], usage_limit: int, name: str = ""
) -> ShardingProblem:
    """Returns the problem of these nodes and edges.

    Raises:
        ConfigError: a node without strategies, or lists whose lengths do not agree.
    """
    for index, node in enumerate(nodes):
        if len(node.costs) != len(node.usages):
            raise ConfigError(
                f"node {node.name or index}: expected a usage for each of {len(node.costs)} strategies, got {len(node.usages)}"
            )
    return ShardingProblem(
        name=name,
        first_strategy=_starts([len(node.costs) for node in nodes]),
        cost=_flat([node.costs for node in nodes]),
        usage=_flat([node.usages for node in nodes]),
        start=np.array([node.start for node in nodes], np.int64),
        stop=np.array([node.stop for node in nodes], np.int64),
        source=np.array([edge.source for edge in edges], np.int64),
        target=np.array([edge.target for edge in edges], np.int64),
        first_entry=_starts([len(edge.costs) for edge in edges]),
        entry=_flat([edge.costs for edge in edges]),
        usage_limit=usage_limit,
        node_names=tuple(node.name for node in nodes),
    )


def _starts(lengths: Sequence[int]) -> Integers:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int64)


def _flat(lists: Sequence[Sequence[int]]) -> Integers:
    return np.fromiter((value for values in lists for value in values), np.int64)
