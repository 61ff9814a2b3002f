"""From windows to plans: runs, merged pieces, and room below."""

from __future__ import annotations

from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR, Residency, Transfer
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.planner.problem.assemble import assemble
from tieroff.planner.problem.pieces import KEPT, Piece, Windows, make_windows
from tieroff.planner.problem.problem import Problem, make_problem
from tieroff.planner.problem.runs import draft, find_runs
from tieroff.planner.simulate.simulator import simulate

_MACHINE = Machine(d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9, nvme_write_bytes_per_s=10**8, nvme_read_bytes_per_s=10**8)


def _problem(host_bytes: int = 1000, nvme_bytes: int = 1000) -> Problem:
    """A parameter of 100 bytes that ops 0, 3 and 6 use and op 6 writes, and an activation of 100 of ops 1, 4 and 7."""
    tensors = (
        Tensor("weight", 100, TensorClass.PARAMETER, is_persistent=True),
        Tensor("activation", 100, TensorClass.ACTIVATION),
    )
    uses = {0: ((0,), ()), 1: ((), (1,)), 3: ((0,), ()), 4: ((1,), ()), 6: ((0,), (0,)), 7: ((1,), ())}
    trace = Trace(tuple(Op(f"op{i}", 50, *uses.get(i, ((), ()))) for i in range(8)), tensors)
    budget = {Tier.DEVICE: 200, Tier.HOST: host_bytes, Tier.NVME: nvme_bytes}
    return make_problem(trace, _MACHINE, budget, IDEAL_EXECUTOR)


def _windows(problem: Problem, weight: list[tuple[int, int, int]], activation: list[tuple[int, int, int]]) -> Windows:
    return make_windows(problem, [(Piece(0, 0, 100), weight), (Piece(1, 0, 100), activation)])


def test_gaps_with_no_write_between_share_one_copy() -> None:
    problem = _problem()
    runs = find_runs(problem, _windows(problem, [(1, 3, 0), (4, 6, 0), (7, 8, 0)], [(2, 4, 0), (5, 7, 0)]))
    # The weight's copy is made after op 6 and serves the gaps of the next step as well.
    assert runs.piece.tolist() == [0, 1]
    assert runs.of_gap.tolist() == [0, 0, 0, 1, 1]
    assert runs.is_copied.all()
    assert runs.copy_from.tolist() == [7, 2]
    assert runs.release.tolist() == [7, 2]
    assert runs.stop.tolist() == [8 + 6 + 1, 7 + 1]


def test_a_copy_that_is_never_written_is_never_made() -> None:
    problem = _problem()
    problem = make_problem(
        Trace(
            tuple(Op(op.name, 50, op.reads, () if i == 6 else op.writes) for i, op in enumerate(problem.trace.ops)),
            problem.trace.tensors,
        ),
        _MACHINE,
        problem.budget,
        IDEAL_EXECUTOR,
    )
    plan = assemble(problem, "test", _windows(problem, [(1, 3, 0), KEPT, (7, 8, 0)], [KEPT, KEPT]))
    assert plan is not None
    check(plan, problem.trace, IDEAL_EXECUTOR)
    assert {t.source for t in plan.transfers} == {Tier.HOST}
    assert Residency(0, Tier.HOST, 0, 8) in plan.residencies


def test_the_plan_of_windows_is_the_one_expected() -> None:
    problem = _problem()
    plan = assemble(problem, "test", _windows(problem, [KEPT, KEPT, KEPT], [(2, 4, 0), KEPT]))
    assert plan is not None
    check(plan, problem.trace, IDEAL_EXECUTOR)
    assert plan.transfers == (Transfer(1, Tier.DEVICE, Tier.HOST, 2, 2, 0), Transfer(1, Tier.HOST, Tier.DEVICE, 4, 4, 0))
    assert plan.peak_bytes == {Tier.DEVICE: 200, Tier.HOST: 100, Tier.NVME: 0}


def test_neighbouring_pieces_that_move_alike_become_one() -> None:
    problem = _problem()
    away = [(2, 4, 0), KEPT]
    pieces = [(Piece(1, 0, 30), away), (Piece(1, 30, 30), away), (Piece(1, 60, 40), [KEPT, KEPT])]
    drafted = draft(problem, make_windows(problem, pieces))
    assert drafted is not None
    assert drafted.windows.pieces == (Piece(1, 0, 60), Piece(1, 60, 40))
    assert drafted.windows.size_bytes.tolist() == [60, 60, 40, 40]


def test_what_the_host_has_no_room_for_goes_to_the_drive() -> None:
    problem = _problem(host_bytes=100)
    windows = _windows(problem, [(1, 3, 0), KEPT, (7, 8, 0)], [(2, 4, 0), KEPT])
    plan = assemble(problem, "test", windows)
    assert plan is not None
    check(plan, problem.trace, IDEAL_EXECUTOR)
    assert {r.tier for r in plan.residencies if r.tensor == 0} == {Tier.DEVICE, Tier.NVME}
    assert assemble(_problem(host_bytes=100, nvme_bytes=0), "test", windows) is None


def test_the_estimate_of_a_draft_is_near_the_simulated_step() -> None:
    problem = _problem()
    windows = _windows(problem, [(1, 3, 1), (4, 6, 1), (7, 8, 1)], [(2, 4, 0), (5, 7, 0)])
    drafted, plan = draft(problem, windows), assemble(problem, "test", windows)
    assert drafted is not None
    assert plan is not None
    step_ns = simulate(plan, problem.trace, _MACHINE).step_ns
    assert step_ns > problem.trace.ideal_ns
    assert abs(drafted.estimate_ns - step_ns) <= 0.05 * step_ns
