"""Linear programs: minimise cost x with rows x <= limits and 0 <= x <= upper, solved by HiGHS."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Reals = npt.NDArray[np.float64]


def run_highs(model: Any, **options: bool | int | float | str) -> Any:
    """Returns the `highspy.Highs` that has solved a `highspy.HighsLp` under HiGHS's own options, silently."""
    import highspy  # here, since only planning for some executors needs it

    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in {"output_flag": False, **options}.items():
        solver.setOptionValue(name, value)
    solver.passModel(model)
    solver.run()
    return solver


@dataclass(slots=True)
class LinearProgram:
    """A program under construction; columns and rows are numbered in the order in which they are added.

    Coefficients should lie between 1e-6 and 1e6: HiGHS drops what is below 1e-9.
    """

    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    _starts: list[int] = field(default_factory=lambda: [0])
    _columns: list[int] = field(default_factory=list)
    _values: list[float] = field(default_factory=list)

    def add_column(self, upper: float = np.inf, cost: float = 0.0) -> int:
        """Returns the number of a new column."""
        self.upper.append(upper)
        self.cost.append(cost)
        return len(self.cost) - 1

    def add_row(self, terms: Iterable[tuple[int, float]], limit: float) -> int:
        """Returns the number of a new row: the sum of value * column is at most the limit.

        A column may be there several times: its values add up.
        """
        row: dict[int, float] = {}
        for column, value in terms:
            row[column] = row.get(column, 0.0) + value
        self._columns += row.keys()
        self._values += row.values()
        self._starts.append(len(self._columns))
        self.limits.append(limit)
        return len(self.limits) - 1

    def products(self, prices: Reals) -> Reals:
        """Returns, per column, the sum over rows of price times coefficient."""
        rows = np.repeat(np.arange(len(self.limits)), np.diff(self._starts))
        totals = np.zeros(len(self.cost))
        np.add.at(totals, np.array(self._columns, np.int64), prices[rows] * np.array(self._values))
        return totals

    def solve(self, tolerance: float, time_limit_s: float) -> Solution | None:
        """Returns an interior solution, near the optimum by the tolerance, or None when none was found in time."""
        import highspy

        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self.cost), len(self.limits)
        model.col_cost_ = np.array(self.cost)
        model.col_lower_ = np.zeros(len(self.cost))
        model.col_upper_ = np.where(np.isinf(self.upper), highspy.kHighsInf, self.upper)
        model.row_lower_ = np.full(len(self.limits), -highspy.kHighsInf)
        model.row_upper_ = np.array(self.limits)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array(self._starts, np.int32)
        model.a_matrix_.index_ = np.array(self._columns, np.int32)
        model.a_matrix_.value_ = np.array(self._values)
        solver = run_highs(
            model,
            solver="ipm",
            run_crossover="off",  # a vertex is of no use here and costs as much again
            ipm_optimality_tolerance=tolerance,
            time_limit=time_limit_s,
        )
        if solver.getModelStatus() not in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kUnknown):
            return None
        found = solver.getSolution()
        if len(found.col_value) != len(self.cost) or len(found.row_dual) != len(self.limits):
            return None
        values = np.clip(np.array(found.col_value), 0.0, np.array(self.upper))
        # HiGHS gives the change of the cost per unit of the limit: negative where a row binds.
        return Solution(values, np.maximum(0.0, -np.array(found.row_dual)))


@dataclass(frozen=True, slots=True)
class Solution:
    """One value per column and one price per row, both >= 0."""

    values: Reals
    prices: Reals
