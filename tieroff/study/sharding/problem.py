"""The choice of one strategy per node of a graph, as data: a problem and a plan.

A node is an operator or a tensor, a strategy a way to split it over devices. A strategy costs something (time, or bytes on
the wire) and holds bytes on each device while the node lives; an edge costs what it takes to bring one node's split into
the other's. Wanted are the strategies of least cost whose bytes stay within a limit at every time. Costs and bytes are
whole numbers, times are op indices and intervals are half-open.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tieroff.errors import ConfigError

FORBIDDEN_COST = 10**18
"""The cost of what cannot be chosen. Costs from a tenth of it on are no choice."""

Integers = NDArray[np.int64]


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
