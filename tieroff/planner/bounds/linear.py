"""Linear programs: minimise cost x with rows x <= limits and 0 <= x <= upper, solved by HiGHS."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Reals = npt.NDArray[np.float64]

ITERATIONS_AT_MOST = 200
"""Of the interior-point method; it takes about 20 for a model's step."""
_TIME_LIMIT_S = 600.0
_logger = logging.getLogger(__name__)


def run_highs(model: Any, **options: bool | int | float | str) -> Any:
    """Returns the `highspy.Highs` that has solved a `highspy.HighsLp` under HiGHS's own options, silently.

    The caller bounds the work by iterations, nodes or the size of the model, so that plans do not depend on how busy the
    machine is. The clock only ends what would run for ten minutes, with a warning.
    """
    import highspy  # here, since only planning for some executors needs it

    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in {"output_flag": False, "time_limit": _TIME_LIMIT_S, **options}.items():
        solver.setOptionValue(name, value)
    solver.passModel(model)
    solver.run()
    if solver.getModelStatus() == highspy.HighsModelStatus.kTimeLimit:
        _logger.warning(
            "HiGHS was ended after %.0f s on %d columns and %d rows: the plan depends on how busy this machine is",
            solver.getRunTime(),
            model.num_col_,
            model.num_row_,
        )
    return solver


def make_model(cost: Reals, upper: Reals, row_lower: Reals, row_upper: Reals, rows: SparseRows) -> Any:
    """Returns the `highspy.HighsLp` that minimises cost x with 0 <= x <= upper and row_lower <= rows x <= row_upper."""
    import highspy

    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(cost), len(row_lower)
    model.col_cost_ = cost
    model.col_lower_, model.col_upper_ = np.zeros(len(cost)), upper
    model.row_lower_, model.row_upper_ = row_lower, row_upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.array(rows.starts, np.int32)
    model.a_matrix_.index_ = np.array(rows.columns, np.int32)
    model.a_matrix_.value_ = np.array(rows.values)
    return model


@dataclass(slots=True)
class SparseRows:
    """Rows of a sparse matrix: the entries of row r are those from `starts[r]` to `starts[r + 1]`."""

    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, columns: Iterable[int], values: Iterable[float]) -> None:
        """Adds a row."""
        self.columns += columns
        self.values += values
        self.starts.append(len(self.columns))


@dataclass(slots=True)
class LinearProgram:
    """A program under construction; columns and rows are numbered in the order in which they are added.

    Coefficients should lie between 1e-6 and 1e6: HiGHS drops what is below 1e-9.
    """

    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    _rows: SparseRows = field(default_factory=SparseRows)

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
        self._rows.add(row.keys(), row.values())
        self.limits.append(limit)
        return len(self.limits) - 1

    def products(self, prices: Reals) -> Reals:
        """Returns, per column, the sum over rows of price times coefficient."""
        rows = np.repeat(np.arange(len(self.limits)), np.diff(self._rows.starts))
        totals = np.zeros(len(self.cost))
        np.add.at(totals, np.array(self._rows.columns, np.int64), prices[rows] * np.array(self._rows.values))
        return totals

    def solve(self, tolerance: float) -> Solution | None:
        """Returns an interior solution, near the optimum by the tolerance, or None when none was found."""
        import highspy

        limits = np.array(self.limits)
        solver = run_highs(
            make_model(np.array(self.cost), np.array(self.upper), np.full(len(limits), -np.inf), limits, self._rows),
            solver="ipm",
            run_crossover="off",  # a vertex is of no use here and costs as much again
            ipm_optimality_tolerance=tolerance,
            ipm_iteration_limit=ITERATIONS_AT_MOST,
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
