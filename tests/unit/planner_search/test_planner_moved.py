"""What moves take, told without their plan, is what the plan takes."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import HealthCheck, given, settings

from tests.parity.late import release_at
from tests.property.test_activation_policies import problems
from tests.support.covering import examples
from tieroff.core.tensor import Tier
from tieroff.planner.auto.greedy import sweep_choices
from tieroff.planner.problem.assemble import Move, build_plan, last_dirty_writes
from tieroff.planner.problem.moved import NO_WRITE, dirty_writes, slot_columns, totals_of_moves
from tieroff.planner.problem.problem import Problem
from tieroff.planner.simulate.simulator import simulate_totals

_settings = settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)


def choices(problem: Problem) -> Iterator[tuple[list[Move], dict[int, Tier]]]:
    """Yields the moves of every choice, and those of all slots to one tier, with room for them or not."""
    yield [], {}
    for selection, _, moves in sweep_choices(problem):
        yield moves, selection.tier_of
    slots = [slot for unit in problem.units for slot in unit.slots if slot.is_boundary or slot.start < slot.stop]
    last = {slot: slot.stop if problem.capabilities.wraps else max(slot.stop, problem.op_count) for slot in slots}
    moves = [Move(slot, release_at(problem, slot), last[slot] if slot.is_boundary else slot.stop) for slot in slots]
    for tier in problem.tiers:
        yield moves, {slot.tensor: tier for slot in slots}


@_settings
@given(problem=problems())
def test_totals_of_moves_are_those_of_their_plan(problem: Problem) -> None:
    for moves, tier_of in choices(problem):
        plan = build_plan(problem, "hand", moves, tier_of)
        expected = None
        if all(plan.peak_bytes[tier] <= size for tier, size in problem.budget.items()):
            expected = simulate_totals(plan, problem.trace, problem.machine)
        assert totals_of_moves(problem, moves, tier_of) == expected


@_settings
@given(problem=problems())
def test_dirty_writes_of_many_tensors_are_those_of_each(problem: Problem) -> None:
    slots = sorted((slot for unit in problem.units for slot in unit.slots), key=lambda slot: (slot.tensor, slot.start))
    for chosen in (slots, slots[::2], slots[1::3], []):
        tensor, start, stop, *_ = slot_columns(chosen)
        expected = [
            write
            for own in dict.fromkeys(slot.tensor for slot in chosen)
            for write in last_dirty_writes(problem, [slot for slot in chosen if slot.tensor == own])
        ]
        found = dirty_writes(problem, tensor, start, stop).tolist()
        assert [None if write == NO_WRITE else write for write in found] == expected
