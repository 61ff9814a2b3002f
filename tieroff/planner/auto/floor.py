"""`floor`: everything that can leaves between any two uses, and comes back only when it is wanted.

Every transfer is synchronous, so no op ever holds more than what it requires: the policy is feasible whenever each op
fits and the lower tiers have room. It is the slowest plan and the reference for what can be reached at all.
"""

from __future__ import annotations

from collections.abc import Iterator

from tieroff.core.plan import Plan
from tieroff.planner.auto.select import Score, Selection, Selector, pressure_order
from tieroff.planner.policy import policy
from tieroff.planner.problem.assemble import Move, build_plan
from tieroff.planner.problem.problem import LowerRoom, Problem, Unit


def floor_selection(problem: Problem, *, mixes_tiers: bool = False) -> Selection:
    """Returns all slots whose tensors find room below, and the tier of each tensor.

    The host comes before the NVMe; with `mixes_tiers` every second tensor asks the NVMe first. Where the room below
    is too small for all, several orders of asking are tried, and the one with the lowest peak is taken unless an
    earlier one fits the device's budget.
    """
    best: Selection | None = None
    for units in _orders(problem):
        selection = _place(problem, units, mixes_tiers)
        if best is None or selection.usage.max(initial=0) < best.usage.max(initial=0):
            best = selection
        if best.usage.max(initial=0) <= problem.device_bytes:
            break
    return best if best is not None else Selection((), {}, problem.live)


def _orders(problem: Problem) -> Iterator[list[Unit]]:
    """Yields orders in which units ask for room: those that relieve the device most, and greedy choices first."""
    yield pressure_order(problem)
    if not problem.units:
        return
    selector = Selector(problem)
    for score in Score:
        choice = selector.choose(score, problem.device_bytes, problem.tiers)
        if choice is not None:
            chosen = set(choice[0])
            yield choice[0] + [unit for unit in problem.units if unit not in chosen]


def _place(problem: Problem, units: list[Unit], mixes_tiers: bool) -> Selection:
    room = LowerRoom(problem)
    placed: list[Unit] = []
    for unit in units:
        is_reversed = mixes_tiers and unit.tensors[0] % 2 == 1
        if room.place(unit.tensors, problem.tiers[::-1] if is_reversed else problem.tiers):
            placed.append(unit)
    usage = problem.live.copy()
    slots = tuple(slot for unit in placed for slot in unit.slots)
    for slot in slots:
        for start, stop in slot.pieces(problem.op_count):
            usage[start:stop] -= problem.size_bytes(slot.tensor)
    return Selection(slots, room.tier_of, usage)


@policy("floor")
def plan_floor(problem: Problem) -> Plan:
    """Returns the floor plan; it may be over the device's budget, which the caller checks."""
    return _plan(problem, mixes_tiers=False)


@policy("floor_mixed")
def plan_floor_mixed(problem: Problem) -> Plan:
    """Returns the floor plan with every second tensor in the NVMe tier, for tests of both lower tiers at once."""
    return _plan(problem, mixes_tiers=True)


def _plan(problem: Problem, *, mixes_tiers: bool) -> Plan:
    selection = floor_selection(problem, mixes_tiers=mixes_tiers)
    moves = [Move(slot, slot.start, slot.stop) for slot in selection.slots]
    return build_plan(problem, "floor", moves, selection.tier_of, copies_early=False)
