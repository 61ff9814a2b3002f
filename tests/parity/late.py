"""A policy that has all optimizer state leave in the next step, where the executor can do that."""

from __future__ import annotations

from tieroff.core.plan import Plan
from tieroff.core.tensor import Tier
from tieroff.planner.auto.floor import floor_selection
from tieroff.planner.policy import policy
from tieroff.planner.problem.assemble import Move, build_plan
from tieroff.planner.problem.problem import Problem, Slot

LATE = "tests.parity.late:plan_late"


@policy("late")
def plan_late(problem: Problem) -> Plan:
    """Returns a plan that moves all that can, each state away for another share of the step, and copied as early as can be."""
    selection = floor_selection(problem)
    moves = [Move(slot, release_at(problem, slot), slot.stop) for slot in selection.slots]
    return build_plan(problem, "late", moves, selection.tier_of, copies_early=True)


def release_at(problem: Problem, slot: Slot) -> int:
    """Returns the tick of a slot's release: for state one of those of the next step before it comes back."""
    last = slot.stop - problem.op_count - 1
    if not (slot.is_boundary and problem.may_leave_late[slot.tensor] and last > 0):
        return slot.start
    return problem.op_count + 1 + 7 * slot.tensor % last


def late_tensors(plan: Plan) -> set[int]:
    """Returns the moved tensors that a plan lets go in the next step."""
    moved = {r.tensor for r in plan.residencies if r.tier is not Tier.DEVICE}
    return {r.tensor for r in plan.residencies if r.tier is Tier.DEVICE and r.tensor in moved and r.stop > plan.op_count}
