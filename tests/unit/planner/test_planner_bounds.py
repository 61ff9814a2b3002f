"""Bounds whose value can be worked out by hand, and what plans they hold for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR, HostUpdate, Plan, Repeat
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Queue, Trace
from tieroff.planner.bounds.bounds import MOVES_ONLY, Scope, best_bound_ns, lower_bound_ns, relaxed_bound_ns, scope_of
from tieroff.planner.bounds.linear import LinearProgram, SparseRows, make_model, run_highs
from tieroff.planner.bounds.relaxation import duplex_factors
from tieroff.planner.make_plan import make_plan
from tieroff.planner.problem.problem import Problem, make_problem

# One byte per ns on every link.
_MACHINE = Machine(
    name="unit", d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9, nvme_write_bytes_per_s=10**9, nvme_read_bytes_per_s=10**9
)


def _activation(name: str, size_bytes: int, **more: Any) -> Tensor:
    return Tensor(name, size_bytes, TensorClass.ACTIVATION, **more)


def _parameter(name: str, size_bytes: int) -> Tensor:
    return Tensor(name, size_bytes, TensorClass.PARAMETER, is_persistent=True)


def _problem(trace: Trace, device: int, host: int = 10**6, nvme: int = 0, machine: Machine = _MACHINE) -> Problem:
    return make_problem(trace, machine, {Tier.DEVICE: device, Tier.HOST: host, Tier.NVME: nvme}, IDEAL_EXECUTOR)


def _out_and_back() -> Trace:
    """An activation of 100 bytes has to be away while the second op runs."""
    ops = (Op("a", 10, writes=(0,)), Op("b", 20, writes=(1,)), Op("c", 30, reads=(0,)))
    return Trace(ops, (_activation("x", 100), _activation("y", 100)))


def test_bound_is_the_compute_where_everything_fits() -> None:
    problem = _problem(_out_and_back(), 200)
    assert lower_bound_ns(problem) == relaxed_bound_ns(problem) == best_bound_ns(problem, "high") == 60


def test_bound_counts_what_goes_out_before_an_op_and_comes_back_after_it() -> None:
    problem = _problem(_out_and_back(), 100)
    # 100 ns out beside the 10 before the second op, 100 ns back beside the 50 from its start on: 90 and 50 of stall.
    assert lower_bound_ns(problem) == pytest.approx(60 + 90 + 50, abs=3)
    assert make_plan(problem.trace, _MACHINE, problem.budget, capabilities=IDEAL_EXECUTOR).step_ns == 60 + 100 + 100
    # With every op a check point the loads have the 20 ns of the second op only, and still no more than 10 go out before.
    assert relaxed_bound_ns(problem, slot_counts=(3,)) == pytest.approx(60 + 90 + 80, abs=3)


def test_relaxation_counts_communication_that_is_awaited_at_once_and_none_beside_compute() -> None:
    moved = _out_and_back()
    for awaits, waited_ns in ((3, 25), (-1, 0)):
        ops = (*moved.ops, Op("gather", 25, queue=Queue.COMMUNICATION), Op("d", 0, awaits=awaits), Op("e", 30))
        problem = _problem(replace(moved, ops=ops), 100)
        assert problem.trace.blocks(3) == (awaits == 3)
        # As above, with the 30 ns of the last op.
        assert relaxed_bound_ns(problem, slot_counts=(6,)) == pytest.approx(60 + 90 + 80 + 30 + waited_ns, abs=3)


def test_bound_is_below_a_plan_that_repeats_and_says_so() -> None:
    problem = _problem(_out_and_back(), 100)
    scope = Scope(repeats=True)
    # Op "a" makes x again in 10 ns: at best part of the bytes go that way while the link carries the rest.
    best_ns = 60 + 10
    for bound in (lower_bound_ns(problem, scope), relaxed_bound_ns(problem, scope, slot_counts=(3,))):
        assert 60 < bound <= best_ns
    assert best_bound_ns(problem, "high", scope) < lower_bound_ns(problem)


def test_bound_grants_updates_on_the_host_for_nothing() -> None:
    ops = (Op("f", 10, reads=(0,)), Op("o", 40, reads=(0, 1), writes=(0, 1), phase="optimizer"))
    problem = _problem(Trace(ops, (_parameter("w", 10), _parameter("m", 100))), 110)
    tight = replace(problem, budget={**problem.budget, Tier.DEVICE: 60})
    assert lower_bound_ns(tight, Scope(host_updates=True)) == 10
    assert lower_bound_ns(tight) >= 50


def test_bound_leaves_out_tensors_that_no_op_uses() -> None:
    trace = _out_and_back()
    idle = replace(trace, tensors=(*trace.tensors, _parameter("idle", 1000)))
    assert lower_bound_ns(_problem(idle, 200)) == 60
    assert relaxed_bound_ns(_problem(idle, 200)) == 60
    assert lower_bound_ns(_problem(idle, 100)) == lower_bound_ns(_problem(trace, 100))


def test_bound_counts_moves_below_once() -> None:
    """The host holds half of the bytes: moving these on to the NVMe does not bring the other half out of the device."""
    shared = replace(_MACHINE, nvme_shares_host_link=True)
    problem = _problem(_out_and_back(), 100, host=50, nvme=10**6, machine=shared)
    assert relaxed_bound_ns(problem, slot_counts=(3,)) == pytest.approx(60 + 90 + 80, abs=3)


def test_bound_counts_what_comes_back_by_way_of_the_host_on_the_drives_link_too() -> None:
    """90 of 100 bytes lie on the NVMe, which reads a byte in 10 ns, also when they go to the host first and on from there."""
    ops = (Op("a", 10, writes=(0,)), Op("b", 20, writes=(1,)), Op("idle", 10), Op("c", 30, reads=(0,)))
    trace = Trace(ops, (_activation("x", 100), _activation("y", 100)))
    problem = _problem(trace, 100, host=10, nvme=10**6, machine=replace(_MACHINE, nvme_read_bytes_per_s=10**8))
    step_ns = make_plan(trace, problem.machine, problem.budget, capabilities=IDEAL_EXECUTOR).step_ns
    assert 900 <= relaxed_bound_ns(problem, slot_counts=(4,)) <= step_ns


def test_relaxed_bound_sees_loads_that_do_not_fit_beside_each_op() -> None:
    """Two parameters take turns: each op of 10 ns has a load of 100 before it, which the cut at one op cannot see."""
    trace = Trace((Op("a", 10, (0,)), Op("b", 10, (1,))), (_parameter("v", 100), _parameter("w", 100)))
    problem = _problem(trace, 100)
    assert lower_bound_ns(problem) == 100
    assert relaxed_bound_ns(problem, slot_counts=(2,)) == pytest.approx(200, abs=3)
    assert make_plan(trace, _MACHINE, problem.budget, capabilities=IDEAL_EXECUTOR).step_ns == 220


def test_one_check_point_is_enough_for_a_program() -> None:
    trace = Trace((Op("a", 10, (0,)), Op("b", 10, (1,))), (_parameter("v", 100), _parameter("w", 100)))
    assert 20 <= relaxed_bound_ns(_problem(trace, 100), slot_counts=(1,)) <= 220


def test_scope_is_what_a_plan_does_besides_moving() -> None:
    plan = Plan("p", "", 1, {}, {}, (), ())
    assert scope_of(plan) == MOVES_ONLY
    assert scope_of(replace(plan, repeats=(Repeat(0, 1),))) == Scope(repeats=True)
    assert scope_of(replace(plan, recompute=("block",))) == Scope(repeats=True)
    assert scope_of(replace(plan, host_updates=(HostUpdate(0, 0, 1, 5),))) == Scope(host_updates=True)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.51, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("fill", [0.05, 0.2, 0.5, 0.8, 1.0, 3.0])
def test_duplex_factors_admit_whatever_the_links_carry(share: float, fill: float) -> None:
    """Every mixture of what can move at once, at the rates of the simulator, as shares of the host link."""
    of_nvme, of_other = duplex_factors(share, fill)
    for out, back, nvme_out, nvme_back in np.ndindex(2, 2, 2, 2):
        u = nvme_out * min(fill, 0.5 if out else 1.0)
        x = out * (1.0 - (u if nvme_out else 0.0)) * (share if back else 1.0)
        v = nvme_back * min(fill, 0.5 if back else 1.0)
        y = back * (1.0 - v) * (share if out else 1.0)
        assert x + of_nvme * u + of_other * y <= 1.0 + 1e-12
        assert x + u <= 1.0 + 1e-12


def test_program_adds_up_a_column_that_is_there_twice() -> None:
    program = LinearProgram()
    column = program.add_column(cost=-1.0)
    program.add_row([(column, 1.0), (column, 1.0)], 6.0)
    solution = program.solve(1e-8)
    assert solution is not None
    assert solution.values[column] == pytest.approx(3.0, rel=1e-4)
    assert program.products(np.array([2.0]))[column] == 4.0


def test_a_program_that_the_clock_ended_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    rows = SparseRows()
    rows.add((0, 1), (1.0, 1.0))
    one = np.ones(2)
    model = make_model(one, one, np.array([1.5]), np.array([np.inf]), rows)
    run_highs(model, presolve="off")
    assert not caplog.records
    run_highs(model, presolve="off", time_limit=0.0)
    assert "on 2 columns and 1 rows: the plan depends on how busy this machine is" in caplog.text
