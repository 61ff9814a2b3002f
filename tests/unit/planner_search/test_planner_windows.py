"""Windows of whole tensors, where a gradient follows its parameter and nothing crosses the end of the step."""

from __future__ import annotations

import pytest

from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.plan import Capabilities
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.planner.auto.select import Score, Selection, Selector
from tieroff.planner.auto.windows import make_moves
from tieroff.planner.make_plan import make_plan
from tieroff.planner.problem.assemble import Move, build_plan
from tieroff.planner.problem.problem import Problem, Slot, make_problem

# What leaves is copied until the step ends, what comes back is there at once.
_MACHINE = Machine(d2h_bytes_per_s=10**8, h2d_bytes_per_s=10**10, nvme_write_bytes_per_s=10**8, nvme_read_bytes_per_s=10**8)
_EXECUTOR = Capabilities(gradient_follows_parameter=True)
_WEIGHT, _GRADIENT, _OPS = 0, 1, 8


def _problem(used: tuple[int, ...], made: int, device_bytes: int, transient: dict[int, int] | None = None) -> Problem:
    """A weight of 100 bytes that ops use, the last of them its update, and its gradient, as large, from `made` to there."""
    tensors = (
        Tensor("weight", 100, TensorClass.PARAMETER, is_persistent=True),
        Tensor("gradient", 100, TensorClass.GRADIENT, owner=_WEIGHT),
    )
    reads: dict[int, tuple[int, ...]] = {**dict.fromkeys(used, (_WEIGHT,)), used[-1]: (_WEIGHT, _GRADIENT)}
    writes = {made: (_GRADIENT,), used[-1]: (_WEIGHT,)}
    transient = transient or {}
    ops = (Op(f"op{i}", 50, reads.get(i, ()), writes.get(i, ()), transient.get(i, 0)) for i in range(_OPS))
    budget = {Tier.DEVICE: device_bytes, Tier.HOST: 1000, Tier.NVME: 0}
    return make_problem(Trace(tuple(ops), tensors, origin="step"), _MACHINE, budget, _EXECUTOR)


def _moves(problem: Problem, slots: tuple[Slot, ...]) -> dict[int, list[Move]]:
    """Returns the windows of slots by tensor, loaded as early as they fit; their plan passes the checker."""
    usage = problem.live.copy()
    for slot in slots:
        for start, stop in slot.pieces(problem.op_count):
            usage[start:stop] -= problem.size_bytes(slot.tensor)
    tier_of = {slot.tensor: Tier.HOST for slot in slots}
    moves = make_moves(problem, Selection(slots, tier_of, usage), lead_ns=10**6)
    check(build_plan(problem, "windows", moves, tier_of), problem.trace, _EXECUTOR)
    return {tensor: [move for move in moves if move.slot.tensor == tensor] for tensor in (_WEIGHT, _GRADIENT)}


@pytest.mark.parametrize(
    ("used", "made", "boundary", "away"),
    [
        ((2, 4, 6), 3, (7, 10), (8, 9)),  # idle in one op before the end and in two after it
        ((2, 6), 4, (7, 10), (8, 9)),
        ((0, 1, 3), 1, (4, 8), (7, 8)),  # in four before the end and in none after it
        ((3,), 0, (4, 11), (7, 8)),  # idle nowhere else
    ],
)
def test_weight_whose_gaps_all_fit_leaves_for_one_op_at_the_end_as_its_gradient_follows(
    used: tuple[int, ...], made: int, boundary: tuple[int, int], away: tuple[int, int]
) -> None:
    problem = _problem(used, made, device_bytes=1000)
    moves = _moves(problem, problem.units[0].slots)
    assert moves[_WEIGHT] == [Move(Slot(_WEIGHT, *boundary, is_boundary=True), *away)]
    assert len(moves[_GRADIENT]) == 1


def test_weight_that_the_first_op_and_the_last_use_leaves_in_its_longest_gap_as_its_gradient_follows() -> None:
    problem = _problem((0, 2, 7), 2, device_bytes=1000)
    boundary, gradient = Slot(_WEIGHT, 8, 8, is_boundary=True), Slot(_GRADIENT, 3, 7, is_boundary=False)
    moves = _moves(problem, (boundary, gradient))
    assert [move.slot for move in moves[_WEIGHT]] == [Slot(_WEIGHT, 3, 7, is_boundary=False), boundary]
    assert len(moves[_GRADIENT]) == 1


def _rounds(device_bytes: int) -> Problem:
    """A weight and its gradient over two rounds: the gradient is made, idle for ten ops, added to, idle for one, and used."""
    used = {0: (_WEIGHT,), 12: (_WEIGHT,), 14: (_WEIGHT, _GRADIENT)}
    written = {1: (_GRADIENT,), 12: (_GRADIENT,), 14: (_WEIGHT,)}
    ops = tuple(
        Op(f"op{i}", 50, used.get(i, ()), written.get(i, ()), transient_bytes=100 if i == 6 else 0) for i in range(_OPS * 2)
    )
    trace = Trace(ops, _problem((0,), 0, 1).trace.tensors, origin="step")
    return make_problem(trace, _MACHINE, {Tier.DEVICE: device_bytes, Tier.HOST: 1000, Tier.NVME: 0}, _EXECUTOR)


def test_gradient_of_two_rounds_leaves_in_its_long_gap_alone() -> None:
    """One that also left between its sum and its update would be copied twice for nothing, and loads queue up behind it."""
    problem = _rounds(device_bytes=200)
    selection = Selector(problem).select(Score.TIME, problem.device_bytes, problem.tiers)
    assert selection is not None
    assert [(s.start, s.stop) for s in selection.slots if s.tensor == _GRADIENT] == [(2, 12)]
    plan = make_plan(problem.trace, _MACHINE, problem.budget, capabilities=_EXECUTOR)
    assert sum(t.tensor == _GRADIENT for t in plan.transfers) == 2  # down once, up once


def test_windows_of_a_gradient_keep_one_of_several_that_fit() -> None:
    problem = _rounds(device_bytes=1000)
    moves = _moves(problem, problem.units[0].slots)
    assert len(moves[_GRADIENT]) == 1


@pytest.mark.parametrize("policy", ["auto", "greedy", "relaxed", "teraio"])
@pytest.mark.parametrize("used", [(0, 2, 7), (0, 2, 6), (1, 2, 6)])
def test_plan_in_which_only_the_gradient_has_no_room_passes_the_checker(policy: str, used: tuple[int, ...]) -> None:
    problem = _problem(used, 2, device_bytes=300, transient={4: 200})
    plan = make_plan(problem.trace, _MACHINE, problem.budget, policy, capabilities=_EXECUTOR)
    assert {transfer.tensor for transfer in plan.transfers} == {_WEIGHT, _GRADIENT}
