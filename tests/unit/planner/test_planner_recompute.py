"""Recompute of single ops: what can be made again, from what, and the problem that is left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR, Repeat
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.planner.auto.portfolio import GENERATORS, plan_auto, plan_with
from tieroff.planner.extended.recompute import find_candidates, remade_problems, remake
from tieroff.planner.problem.problem import Problem, make_problem
from tieroff.planner.simulate.simulator import simulate

_MACHINE = Machine(d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9)


def _trace(*ops: tuple[tuple[int, ...], tuple[int, ...]], duration_ns: int = 3, kinds: str = "aaaaaa") -> Trace:
    """Tensors of 10 bytes: a is an activation, p a parameter, i an input."""
    kind = {"a": TensorClass.ACTIVATION, "p": TensorClass.PARAMETER, "i": TensorClass.INPUT}
    count = 1 + max(t for reads, writes in ops for t in (*reads, *writes))
    tensors = [Tensor(f"t{i}", 10, kind[kinds[i]], is_persistent=kinds[i] == "p") for i in range(count)]
    return Trace(tuple(Op(f"op{i}", duration_ns, *uses) for i, uses in enumerate(ops)), tuple(tensors))


def _problem(trace: Trace, device_bytes: int) -> Problem:
    budget = {Tier.DEVICE: device_bytes, Tier.HOST: 1000, Tier.NVME: 0}
    return make_problem(trace, _MACHINE, budget, IDEAL_EXECUTOR)


# op 1 makes tensor 1 from tensor 0, which op 5 and op 6 need as well; 2 and 3 fill the device meanwhile.
_CASE = _trace(((), (0,)), ((0,), (1,)), ((), (2,)), ((2,), (3,)), ((3,), (2,)), ((1, 0), (4,)), ((0, 4), (5,)))


def test_a_gap_whose_producer_is_cheap_is_a_candidate() -> None:
    candidates = find_candidates(_problem(_CASE, 35))
    assert [(c.gap.tensor, c.gap.start, c.gap.stop, c.duration_ns) for c in candidates] == [(0, 2, 5, 3), (1, 2, 5, 3)]


def test_what_takes_longer_than_its_transfers_is_no_candidate() -> None:
    trace = _trace(*[(op.reads, op.writes) for op in _CASE.ops], duration_ns=100)
    assert find_candidates(_problem(trace, 35)) == []


def test_a_gap_that_is_not_over_the_budget_is_no_candidate() -> None:
    assert find_candidates(_problem(_CASE, 40)) == []


@pytest.mark.parametrize(
    ("trace", "reason"),
    [
        (_trace(((), (0,)), ((0,), (0, 1)), ((), (2,)), ((2,), (3,)), ((1, 0), (4,))), "works in place"),
        (_trace(((), (0,)), ((0,), (1,)), ((0,), (0,)), ((2,), (3,)), ((1, 0), (4,))), "its input is written since"),
        (_trace(((), (0,)), ((0,), (1,)), ((1,), (1,)), ((2,), (3,)), ((1, 0), (4,))), "two ops wrote it"),
        (_trace(((1,), (0,)), ((0,), (1,)), ((2,), (2,)), ((2,), (3,)), ((1, 0), (4,)), kinds="apaaa"), "it is persistent"),
        (_trace(((), (0,)), ((0,), (1,)), ((2,), (2,)), ((2,), (3,)), ((1, 0), (4,)), kinds="aiaaa"), "it is an input"),
    ],
)
def test_what_cannot_be_made_again_is_no_candidate(trace: Trace, reason: str) -> None:
    assert 1 not in {candidate.gap.tensor for candidate in find_candidates(_problem(trace, 25))}, reason


def test_a_remade_problem_holds_less_and_takes_the_repeats_time() -> None:
    problem = _problem(_CASE, 35)
    remade = remake(problem, find_candidates(problem)[1:])
    assert remade.repeats == (Repeat(op=1, at=5),)
    assert problem.live.tolist() == [10, 20, 30, 40, 40, 30, 30]
    assert remade.problem.live.tolist() == [10, 20, 20, 30, 30, 30, 30]
    assert remade.problem.starts_ns[-1] == problem.starts_ns[-1] + 3
    assert remade.origin == (0, 1, 2, 3, 4, 5, 1)
    assert not remade.problem.capabilities.repeats_ops


def test_an_input_that_is_gone_is_made_again_first() -> None:
    trace = _trace(((), (0,)), ((0,), (1,)), ((), (2,)), ((2,), (3,)), ((2, 3), (5,)), ((1,), (4,)))
    problem = _problem(trace, 35)
    remade = remake(problem, find_candidates(problem))
    assert remade.repeats == (Repeat(op=0, at=5), Repeat(op=1, at=5))
    assert remade.problem.live.tolist()[5] == 30  # the input is there for the repeat


def test_auto_repeats_where_transfers_would_stall_and_does_not_with_the_switch_off() -> None:
    problem = _problem(_CASE, 35)
    plan = plan_auto(problem)
    check(plan, _CASE, IDEAL_EXECUTOR)
    assert len(plan.repeats) == 1
    assert not plan.transfers
    timeline = simulate(plan, _CASE, _MACHINE)
    assert timeline.step_ns == _CASE.ideal_ns + 3
    assert timeline.recompute_ns == 3
    moved = plan_with(problem, GENERATORS - {"recomputed"})
    check(moved, _CASE, IDEAL_EXECUTOR)
    assert not moved.repeats
    assert simulate(moved, _CASE, _MACHINE).step_ns > timeline.step_ns


def test_nothing_is_repeated_for_an_executor_that_cannot() -> None:
    executor = replace(IDEAL_EXECUTOR, repeats_ops=False)
    problem = make_problem(_CASE, _MACHINE, {Tier.DEVICE: 35, Tier.HOST: 1000, Tier.NVME: 0}, executor)
    assert not list(remade_problems(problem, 6))
    assert not plan_auto(problem).repeats


@pytest.mark.parametrize(("hold", "candidates"), [((1, 4), [0, 1]), ((1, 6), [0])])
def test_an_op_is_not_run_again_while_what_it_wrote_is_held(hold: tuple[int, int], candidates: list[int]) -> None:
    trace = _trace(*[(op.reads, (*op.writes, 6) if 1 in op.writes else op.writes) for op in _CASE.ops], kinds="aaaaaaa")
    trace = replace(trace, tensors=(*trace.tensors[:6], replace(trace.tensors[6], holds=(hold,))))
    assert [c.gap.tensor for c in find_candidates(_problem(trace, 45))] == candidates
