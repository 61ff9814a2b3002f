"""The best of many plans: the fastest by simulation; among equals the one that writes least to the drive, then moves least."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tieroff.core.plan import Plan
from tieroff.core.tensor import Tier
from tieroff.planner.problem.assemble import Move, build_plan
from tieroff.planner.problem.moved import totals_of_moves
from tieroff.planner.problem.problem import Problem
from tieroff.planner.simulate.simulator import Totals, simulate_totals

_TRANSFER_BYTES = 256 << 10
"""What a link moves while the host starts a transfer: 13 us at 20 GB/s."""


class Best:
    """Keeps the best plan offered so far.

    With a tolerance, plans that take at most that share longer than the fastest count as equals, and the one of them that
    moves least, in few transfers, is the best: less than a prediction is worth is no reason to move more.
    """

    def __init__(self, problem: Problem, tolerance: float = 0.0) -> None:
        self._problem = problem
        self._tolerance = tolerance
        self._equals: list[tuple[tuple[int, int, int], Callable[[], Plan | None]]] = []

    @property
    def plan(self) -> Plan | None:
        """The best plan with its step time, made now where it was not yet; None before the first offer that fits."""
        if not self._equals:
            return None
        (step_ns, *_), make = min(self._equals, key=lambda offer: (*offer[0][1:], offer[0][0]))
        plan = make()
        return None if plan is None else replace(plan, step_ns=step_ns)

    @property
    def step_ns(self) -> int | None:
        """Step time of the fastest plan."""
        return min((key[0] for key, _ in self._equals), default=None)

    def offer(self, plan: Plan | None) -> int | None:
        """Takes a plan if it fits the budget and is better than all before it.

        Returns:
            Its step time; None of one that does not fit.
        """
        if plan is None or any(plan.peak_bytes[tier] > size for tier, size in self._problem.budget.items()):
            return None
        totals = simulate_totals(plan, self._problem.trace, self._problem.machine)
        self.weigh(totals, lambda: plan)
        return totals.step_ns

    def offer_moves(self, policy: str, moves: list[Move], tier_of: dict[int, Tier]) -> int | None:
        """As `offer`, of the plan that `build_plan` makes of moves; it is made when it is asked for."""
        totals = totals_of_moves(self._problem, moves, tier_of)
        if totals is None:
            return None
        self.weigh(totals, partial(build_plan, self._problem, policy, moves, tier_of))
        return totals.step_ns

    def weigh(self, totals: Totals, make: Callable[[], Plan | None]) -> None:
        """Takes a plan that fits the budget, but is not made yet, if it is better than all before it.

        Args:
            totals: of it.
            make: returns the plan.
        """
        step_ns, moved_bytes, transfer_count = totals
        # A plan that is any faster is better without a tolerance; among equals, transfers take the host's time too.
        as_bytes = transfer_count * _TRANSFER_BYTES if self._tolerance else 0
        key = step_ns, moved_bytes["nvme_write"], sum(moved_bytes.values()) + as_bytes
        fastest = min(step_ns, self.step_ns or step_ns)
        self._equals.append((key, make))
        self._equals = [offer for offer in self._equals if offer[0][0] <= fastest * (1.0 + self._tolerance)]

    def is_within(self, bound_ns: int, tolerance: float) -> bool:
        """True when the fastest plan takes at most this share longer than a bound."""
        return self.step_ns is not None and self.step_ns <= bound_ns * (1.0 + tolerance)
