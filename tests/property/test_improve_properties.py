"""Recompute and the local search on random steps: every plan passes the checker, and nothing gets worse."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from tests.property.test_planner_properties import machines, traces
from tests.support.covering import examples
from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.planner.auto.floor import plan_floor
from tieroff.planner.auto.portfolio import plan_auto
from tieroff.planner.extended.improve import improve
from tieroff.planner.extended.recompute import find_candidates, remake
from tieroff.planner.problem.assemble import plan_of
from tieroff.planner.problem.pieces import KEPT, Piece, fit, make_windows
from tieroff.planner.problem.problem import Problem, live_bytes, make_problem
from tieroff.planner.problem.runs import draft
from tieroff.planner.simulate.simulator import simulate

_EXECUTOR = replace(IDEAL_EXECUTOR, updates_on_host=False)


@st.composite
def networks(draw: st.DrawFn) -> Trace:
    """Returns a forward and a backward through random layers: some write two tensors, some write in place."""
    depth = draw(st.integers(2, 7))
    size = st.integers(1, 60)
    tensors: list[Tensor] = []
    ops: list[Op] = []

    def add(name: str, kind: TensorClass, *, is_persistent: bool = False, is_movable: bool = True) -> int:
        tensors.append(Tensor(name, draw(size), kind, is_persistent=is_persistent, is_movable=is_movable))
        return len(tensors) - 1

    def run(name: str, reads: list[int], writes: list[int]) -> None:
        transient = draw(st.sampled_from((0, 0, 9)))
        ops.append(Op(name, draw(st.integers(0, 30)), tuple(sorted(set(reads))), tuple(sorted(set(writes))), transient))

    made = [add("x", draw(st.sampled_from((TensorClass.INPUT, TensorClass.ACTIVATION))))]
    run("load", [], [made[0]])
    layers: list[tuple[list[int], list[int]]] = []
    for layer in range(depth):
        reads = [made[-1], *draw(st.lists(st.sampled_from(made), max_size=1))]
        if draw(st.booleans()):
            reads.append(add(f"w{layer}", TensorClass.PARAMETER, is_persistent=True))
        writes = [add(f"a{layer}", TensorClass.ACTIVATION, is_movable=draw(st.integers(0, 7)) < 7)]
        if draw(st.integers(0, 3)) == 0:
            writes.append(add(f"mask{layer}", TensorClass.ACTIVATION))
        run(f"forward{layer}", reads, writes)
        if draw(st.integers(0, 4)) == 0:
            run(f"in place{layer}", [writes[0]], [writes[0]])
        made.append(writes[0])
        layers.append((reads, writes))
    gradient = add("loss", TensorClass.ACTIVATION)
    run("loss", [made[-1]], [gradient])
    for layer, (reads, writes) in reversed(list(enumerate(layers))):
        kept = draw(st.lists(st.sampled_from(reads + writes), max_size=3))
        following = add(f"g{layer}", TensorClass.ACTIVATION)
        run(f"backward{layer}", [gradient, *kept], [following])
        gradient = following
    for index, tensor in enumerate(tensors):
        if tensor.is_persistent and draw(st.booleans()):
            run(f"update{index}", [gradient, index], [index])
    return Trace(tuple(ops), tuple(tensors), name="network")


@st.composite
def problems(draw: st.DrawFn, trace: Trace, machine: Machine) -> Problem:
    live = live_bytes(trace)
    budget = {
        Tier.DEVICE: draw(st.integers(int(live.max()) // 3, int(live.max()))),
        Tier.HOST: draw(st.sampled_from((0, 60, 10_000))),
        Tier.NVME: draw(st.sampled_from((0, 10_000))),
    }
    executor = replace(_EXECUTOR, granule_bytes=draw(st.sampled_from((1, 1, 7))), min_bytes=draw(st.sampled_from((0, 0, 20))))
    return make_problem(trace, machine, budget, executor)


# Cases are small as they are, and to shrink them takes minutes.
_SETTINGS = settings(
    max_examples=examples(60),
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)


@_SETTINGS
@given(trace=networks(), machine=machines(), data=st.data())
def test_plans_with_repeats_pass_the_checker_and_take_what_the_remade_problem_says(
    trace: Trace, machine: Machine, data: st.DataObject
) -> None:
    machine = replace(machine, d2h_bytes_per_s=10**8, h2d_bytes_per_s=10**8)  # so slow that repeats are worth it
    # The largest of the drawn budgets that leaves something to make again; without one, nothing is.
    options = sorted((data.draw(problems(trace, machine)) for _ in range(4)), key=lambda problem: -problem.device_bytes)
    problem = next((option for option in options if find_candidates(option)), options[0])
    candidates = find_candidates(problem)
    chosen = data.draw(st.lists(st.sampled_from(candidates), min_size=1, unique=True)) if candidates else []
    remade = remake(problem, chosen)
    assert bool(remade.repeats) == bool(chosen)
    for policy in (plan_floor, plan_auto):
        inner = policy(remade.problem)
        plan = remade.plan(inner)
        assert plan.repeats == remade.repeats
        if any(plan.peak_bytes[tier] > size for tier, size in problem.budget.items()):
            continue
        check(plan, trace, problem.capabilities)
        timeline = simulate(plan, trace, machine)
        assert timeline.step_ns == simulate(inner, remade.problem.trace, machine).step_ns
        assert timeline.recompute_ns == sum(trace.ops[repeat.op].duration_ns for repeat in plan.repeats)


@_SETTINGS
@given(trace=st.one_of(networks(), traces()), machine=machines(), seed=st.integers(0, 2**32), data=st.data())
def test_the_local_search_gives_windows_that_fit_and_are_no_slower(
    trace: Trace, machine: Machine, seed: int, data: st.DataObject
) -> None:
    problem = data.draw(problems(trace, machine))
    assume(problem.units)
    chosen = []
    for tensor in sorted({slot.tensor for unit in problem.units for slot in unit.slots}):
        tier = data.draw(st.integers(0, len(problem.tiers) - 1)) + (problem.tiers[0] is Tier.NVME)
        gaps = trace.lifetimes[tensor].gaps
        aways = [(g.start, g.stop, tier) if data.draw(st.booleans()) else KEPT for g in gaps]
        chosen.append((Piece(tensor, 0, problem.size_bytes(tensor)), aways))
    fitted = fit(
        problem, make_windows(problem, chosen), repair="deepest", passes="LRlr", lead_ns=0, device_bytes=problem.device_bytes
    )
    first = draft(problem, fitted) if fitted is not None else None
    assume(first is not None)
    assert first is not None
    check(plan_of(problem, "random", first), trace, problem.capabilities)
    found = improve(problem, first.windows, seed=seed, work=200_000)
    again = improve(problem, first.windows, seed=seed, work=200_000)
    for name in ("away_start", "away_stop", "tier"):
        assert np.array_equal(getattr(found, name), getattr(again, name))
    better = draft(problem, found)
    assert better is not None
    assert better.estimate_ns <= first.estimate_ns + 1
    plan = plan_of(problem, "random", better)
    check(plan, trace, problem.capabilities)
    assert all(plan.peak_bytes[tier] <= size for tier, size in problem.budget.items())


@_SETTINGS
@given(trace=networks(), machine=machines(), data=st.data())
def test_auto_with_repeats_passes_the_checker_and_is_deterministic(trace: Trace, machine: Machine, data: st.DataObject) -> None:
    problem = data.draw(problems(trace, machine))
    plan = plan_auto(problem)
    assert plan == plan_auto(problem)
    if all(plan.peak_bytes[tier] <= size for tier, size in problem.budget.items()):
        check(plan, trace, problem.capabilities)


def test_the_strategies_reach_repeats() -> None:
    """A chain of one tensor that is dropped and made from another one that is dropped as well."""
    tensors = [Tensor(f"t{i}", 10, TensorClass.ACTIVATION) for i in range(6)]
    forward = [Op(f"f{i}", 1, (i - 1,) if i else (), (i,)) for i in range(5)]
    backward = [Op(f"b{i}", 1, (i,), (5,)) for i in reversed(range(5))]
    trace = Trace((*forward, *backward), tuple(tensors))
    machine = Machine(d2h_bytes_per_s=1, h2d_bytes_per_s=1)
    problem = make_problem(trace, machine, {Tier.DEVICE: 40, Tier.HOST: 100, Tier.NVME: 0}, _EXECUTOR)
    plan = plan_auto(problem)
    check(plan, trace, _EXECUTOR)
    assert plan.repeats
    assert not plan.transfers
    assert simulate(plan, trace, machine).step_ns == sum(op.duration_ns for op in trace.ops) + len(plan.repeats)
    assert all(a.at <= b.at for a, b in itertools.pairwise(plan.repeats))
