"""Exact least cost over a graph of discrete variables, by eliminating one variable after the other.

A factor is a table of costs over a few variables. A variable is eliminated by adding all tables that name it and keeping the
least over its values (bucket elimination: Dechter, Artificial Intelligence 113, 1999). On a chain this is the dynamic
program of Tofu (EuroSys 2019, 5.2); on any other graph it is exact too, as long as the tables stay small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tieroff.errors import ConfigError

ENTRIES_MAX = 40_000_000


@dataclass(frozen=True, slots=True)
class Factor:
    """Costs over the values of variables: an axis of `table` per variable, inf for what is forbidden."""

    variables: tuple[int, ...]
    table: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Assignment:
    """A value per variable, and their cost."""

    values: tuple[int, ...]
    cost: float


def eliminate(sizes: Sequence[int], factors: Sequence[Factor], entries_max: int = ENTRIES_MAX) -> Assignment:
    """Returns values of least cost; the variable whose table is smallest goes first.

    Raises:
        ConfigError: a table would need more than `entries_max` entries.
    """
    return _Elimination(sizes, factors, entries_max).solve()


class _Elimination:
    def __init__(self, sizes: Sequence[int], factors: Sequence[Factor], entries_max: int) -> None:
        self._sizes = sizes
        self._entries_max = entries_max
        self._factors = dict(enumerate(factors))
        self._next = len(factors)
        self._of: list[set[int]] = [set() for _ in sizes]
        for index, factor in self._factors.items():
            for variable in factor.variables:
                self._of[variable].add(index)

    def solve(self) -> Assignment:
        left = set(range(len(self._sizes)))
        entries = {variable: self._entries(variable) for variable in left}
        answers: list[tuple[int, list[int], NDArray[np.intp]]] = []
        cost = 0.0
        while left:
            variable = min(left, key=lambda v: (entries[v], v))
            if entries[variable] > self._entries_max:
                raise ConfigError(
                    f"expected tables of at most {self._entries_max} entries, but variable {variable} needs "
                    f"{entries[variable]}: the graph is too dense to be solved exactly"
                )
            others = sorted(self._neighbours(variable))
            table = self._sum(variable, others)
            answers.append((variable, others, table.argmin(0)))
            left.discard(variable)
            cost += self._replace(others, table.min(0))
            for other in {near for o in others for near in self._neighbours(o)} | set(others):
                entries[other] = self._entries(other)
        values = [0] * len(self._sizes)
        for variable, others, answer in reversed(answers):
            values[variable] = int(answer[tuple(values[other] for other in others)])
        return Assignment(tuple(values), cost)

    def _neighbours(self, variable: int) -> set[int]:
        return {other for index in self._of[variable] for other in self._factors[index].variables} - {variable}

    def _entries(self, variable: int) -> int:
        return math.prod(self._sizes[other] for other in self._neighbours(variable) | {variable})

    def _sum(self, variable: int, others: list[int]) -> NDArray[np.float64]:
        """Returns the sum of all tables that name a variable, which is the first axis, and takes them away."""
        axes = [variable, *others]
        place = {name: axis for axis, name in enumerate(axes)}
        table = np.zeros([self._sizes[name] for name in axes])
        for index in sorted(self._of[variable]):
            factor = self._factors.pop(index)
            order = sorted(range(len(factor.variables)), key=lambda axis: place[factor.variables[axis]])
            shape = [1] * len(axes)
            for axis in order:
                shape[place[factor.variables[axis]]] = self._sizes[factor.variables[axis]]
            table += factor.table.transpose(order).reshape(shape)
            for name in factor.variables:
                self._of[name].discard(index)
        return table

    def _replace(self, others: list[int], least: NDArray[np.float64]) -> float:
        """Adds what is left of an eliminated variable as a factor; returns it when it is a constant."""
        if not others:
            return float(least)
        self._factors[self._next] = Factor(tuple(others), least)
        for other in others:
            self._of[other].add(self._next)
        self._next += 1
        return 0.0
