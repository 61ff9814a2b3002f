"""The device budget that all ranks of a launch plan with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import is_

from tieroff.core.trace import Trace
from tieroff.errors import InfeasiblePlanError
from tieroff.session.ranks import Agreement, Need, agreement_here
from tieroff.units import format_bytes, parse_bytes, pasteable


@dataclass
class RankBudget:
    """What one model's ranks agree on; see [Note: agreement without a collective] in ranks.py.

    Attributes:
        rank: this process.
        first_trace: of the first step that this rank traced; None before that.
    """

    rank: int
    first_trace: Trace | None = None
    _agreement: Agreement | None = None
    _floor_bytes: int = 0

    def enter(self) -> None:
        """A step of this rank is about to be traced."""
        if self._agreement is None:
            self._agreement = agreement_here()

    @property
    def is_shared(self) -> bool:
        """True where several ranks agree."""
        return self._agreement is not None

    @property
    def is_due(self) -> bool:
        """True while this rank has not yet published what its first traced step needs."""
        return self._agreement is not None and self.first_trace is None

    @property
    def is_alone(self) -> bool:
        """True where there are no other ranks to agree with."""
        return self._agreement is None

    def publish(self, trace: Trace, budget_bytes: int, floor_bytes: int) -> None:
        """Publishes what the first traced step may use of the device, and its least need."""
        assert self._agreement is not None
        self.first_trace, self._floor_bytes = trace, floor_bytes
        self._agreement.publish(budget_bytes, floor_bytes)

    def leave(self) -> None:
        """Publishes that this rank's first step cannot be traced."""
        assert self._agreement is not None
        self._agreement.leave()

    def settle(self, trace: Trace, own_bytes: int, *, is_of_kind: bool, may_raise: bool) -> Need:
        """Returns the device budget that all ranks plan with, and whose it is.

        Args:
            trace: the step to plan.
            own_bytes: this rank's budget.
            is_of_kind: each kind of step has a budget of its own (a share, say): the agreement holds for the first kind only.
            may_raise: whether the budget of all ranks is raised to the need of the one that needs most.

        Raises:
            InfeasiblePlanError: the budget is enough for this rank and not for another one. That one raises too, so no rank
                is left waiting for it in a collective.
            StateError: a rank began to train and does not answer.
        """
        own = Need(own_bytes, self._floor_bytes, self.rank)
        agreed = self._agreement.settle() if self._agreement is not None else None
        is_first = self.first_trace is not None and _is_of_one_step(trace, self.first_trace)
        if agreed is None or (is_of_kind and not is_first):
            return own
        least = min(own, agreed.budget, key=lambda need: need.budget_bytes)
        if is_first and may_raise and agreed.floor.floor_bytes > least.budget_bytes:
            return replace(agreed.floor, budget_bytes=parse_bytes(pasteable(agreed.floor.floor_bytes)))
        if is_first and agreed.floor.floor_bytes > least.budget_bytes >= own.floor_bytes:
            raise InfeasiblePlanError(
                f"expected every op of every rank to fit in {format_bytes(least.budget_bytes)} of device memory, the least of "
                f"all ranks (rank {least.rank}'s), but rank {agreed.floor.rank} needs {format_bytes(agreed.floor.floor_bytes)} "
                f"with everything away that can be. A device budget of {agreed.floor.floor_bytes} bytes would do",
                needed_bytes=agreed.floor.floor_bytes,
                available_bytes=least.budget_bytes,
            )
        return least


def _is_of_one_step(trace: Trace, other: Trace) -> bool:
    """True for a trace that was made of another one, with other durations, or with tensors that were added."""
    return len(trace.tensors) >= len(other.tensors) and all(map(is_, trace.tensors, other.tensors))
