"""Updates on the host on random steps: every plan passes the checker, and none is slower than without them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.property.test_planner_properties import machines, traces
from tests.support.covering import examples
from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR, Capabilities
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace, validate
from tieroff.planner.auto.floor import plan_floor
from tieroff.planner.auto.greedy import plan_greedy
from tieroff.planner.auto.portfolio import GENERATORS, plan_auto, plan_with
from tieroff.planner.auto.relaxed import plan_relaxed
from tieroff.planner.bounds.bounds import lower_bound_ns, scope_of
from tieroff.planner.extended.buckets import find_buckets
from tieroff.planner.extended.host_updates import update, updated_problems
from tieroff.planner.extended.recompute import find_candidates, remake
from tieroff.planner.problem.problem import live_bytes, make_problem
from tieroff.planner.simulate.simulator import simulate

_Budget = dict[Tier, int]

_UNIT = 4 * 2**20  # bytes; parts of tensors are 8 MiB at least


@st.composite
def steps(draw: st.DrawFn) -> Trace:
    """Returns a forward, a backward and an optimizer over random layers, with holds and ends that are hard to serve."""
    depth = draw(st.integers(1, 5))
    tensors: list[Tensor] = []
    ops: list[tuple[str, set[int], set[int]]] = []

    def add(name: str, kind: TensorClass, *, most: int = 60, lasts: bool = False) -> int:
        lasts = lasts or kind in (TensorClass.PARAMETER, TensorClass.OPTIMIZER)
        is_movable = draw(st.integers(0, 19)) < 19
        tensors.append(Tensor(name, draw(st.integers(1, most)), kind, is_persistent=lasts, is_movable=is_movable))
        return len(tensors) - 1

    parameters = [add(f"w{i}", TensorClass.PARAMETER) for i in range(depth)]
    made: list[int] = []
    for layer, parameter in enumerate(parameters):
        reads = {parameter, *made[-1:], *draw(st.sets(st.sampled_from(parameters), max_size=1))}
        made.append(add(f"a{layer}", TensorClass.ACTIVATION, most=100))
        ops.append(("forward", reads, {made[-1]}))
    gradients: dict[int, int] = {}
    outlive = draw(st.booleans())  # gradients that the program writes in place
    for layer in reversed(range(depth)):
        gradients[layer] = add(f"g{layer}", TensorClass.GRADIENT, lasts=outlive and draw(st.booleans()))
        ops.append(("backward", {made[layer], parameters[layer]}, {gradients[layer]}))
        if draw(st.integers(0, 3)) == 0:  # updated in backward
            moments = add(f"m{len(tensors)}", TensorClass.OPTIMIZER)
            ops.append(("optimizer", {parameters[layer], gradients.pop(layer), moments}, {parameters[layer], moments}))
    is_read = draw(st.booleans())
    if is_read and gradients:
        ops.append(("", set(gradients.values()), set(draw(st.lists(st.sampled_from(sorted(gradients.values())), max_size=2)))))
    order = draw(st.permutations(sorted(gradients)))
    while order:
        group, order = order[: draw(st.integers(1, 2))], order[2:]
        state = {add(f"m{len(tensors)}", TensorClass.OPTIMIZER) for _ in group}
        written = {parameters[i] for i in group} if draw(st.integers(0, 7)) else set()
        own = {parameters[i] for i in group} | {gradients[i] for i in group} | state
        changed = {gradients[i] for i in group} if draw(st.integers(0, 3)) == 0 else set()
        ops.append(("optimizer", own, written | state | changed))
        if draw(st.integers(0, 3)) == 0:
            ops.append(("", set(draw(st.lists(st.sampled_from(parameters), max_size=1))), set()))
    trace = Trace(
        tuple(
            Op(f"op{i}", draw(st.integers(0, 40)), tuple(sorted(r)), tuple(sorted(w)), draw(st.sampled_from((0, 0, 9))), phase)
            for i, (phase, r, w) in enumerate(ops)
        ),
        tuple(tensors),
        name="random",
    )
    return _held(draw, trace)


def _held(draw: st.DrawFn, trace: Trace) -> Trace:
    """Returns the trace with some tensors held or alive for longer, as recorded ones are."""
    count = len(trace.ops)
    tensors = list(trace.tensors)
    for index in draw(st.sets(st.sampled_from(range(len(tensors))), max_size=4)):
        life = trace.lifetimes[index]
        start = draw(st.sampled_from((life.birth, *(a for a, _ in life.required))))
        stop = draw(st.integers(start + 1, count))
        tensors[index] = replace(tensors[index], holds=((start, stop),))
    for index in draw(st.sets(st.sampled_from(range(len(tensors))), max_size=2)):
        tensors[index] = replace(tensors[index], lives_until=draw(st.integers(0, count)))
    for index, op in enumerate(trace.ops):  # as the recorder does: an op holds what it touches
        for tensor in op.writes if op.phase == "optimizer" else ():
            if not tensors[tensor].holds:
                tensors[tensor] = replace(tensors[tensor], holds=((index, index + 1),))
    return replace(trace, tensors=tuple(tensors))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Trace, _Budget, Machine]:
    """Returns a step or anything else with ops called updates, budgets, and a machine with a CPU."""
    if draw(st.integers(0, 3)):
        trace = draw(steps())
    else:
        trace = draw(traces())
        phases = draw(st.lists(st.sampled_from(("", "optimizer")), min_size=len(trace.ops), max_size=len(trace.ops)))
        trace = replace(trace, ops=tuple(replace(op, phase=phase) for op, phase in zip(trace.ops, phases, strict=True)))
    validate(trace)
    budget = {
        Tier.DEVICE: max(1, int(live_bytes(trace).max()) * draw(st.integers(30, 100)) // 100),
        Tier.HOST: draw(st.sampled_from((10_000, 10_000, 300, 100))),
        Tier.NVME: draw(st.sampled_from((10_000, 200, 0))),
    }
    machine = replace(draw(machines()), cpu_update_bytes_per_s=draw(st.integers(10**9, 10**11)))
    return trace, budget, machine


def _scaled(trace: Trace, budget: _Budget, machine: Machine) -> tuple[Trace, _Budget, Machine]:
    """Returns the same case with tensors large enough to move in parts."""
    tensors = tuple(replace(tensor, size_bytes=tensor.size_bytes * _UNIT) for tensor in trace.tensors)
    ops = tuple(replace(op, transient_bytes=op.transient_bytes * _UNIT) for op in trace.ops)
    rates = ("d2h", "h2d", "nvme_write", "nvme_read", "cpu_update", "host_memory")
    faster = {f"{rate}_bytes_per_s": getattr(machine, f"{rate}_bytes_per_s") * _UNIT for rate in rates}
    return (
        replace(trace, ops=ops, tensors=tensors),
        {tier: size * _UNIT for tier, size in budget.items()},
        replace(machine, **faster),
    )


def _settings(count: int) -> settings:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    return settings(max_examples=examples(count), deadline=None, suppress_health_check=checks, print_blob=True)


@_settings(100)
@given(
    case=cases() | cases().map(lambda case: _scaled(*case)),
    caps=st.sampled_from(
        (
            IDEAL_EXECUTOR,
            replace(IDEAL_EXECUTOR, splits=False, min_bytes=10),
            replace(IDEAL_EXECUTOR, updates_cross=False),
            replace(IDEAL_EXECUTOR, updates_early=False),
            replace(IDEAL_EXECUTOR, wraps=False, splits=False, gradient_follows_parameter=True),
        )
    ),
)
def test_every_plan_of_an_updated_problem_is_one_of_the_first(case: tuple[Trace, _Budget, Machine], caps: Capabilities) -> None:
    trace, budget, machine = case
    problem = make_problem(trace, machine, budget, caps)
    assume(find_buckets(problem))
    for updated in updated_problems(problem, 3):
        rest = updated.problem
        remade = remake(rest, find_candidates(rest))
        plans = [make(rest) for make in (plan_floor, plan_greedy, plan_relaxed)]
        plans += [remade.plan(make(remade.problem)) for make in (plan_greedy, plan_relaxed)]
        for drafted in plans:
            plan = updated.plan(drafted)
            if plan is None:
                assert drafted.repeats
                continue
            limit = max(budget[Tier.DEVICE], plan.peak_bytes[Tier.DEVICE])  # the floor may be over it
            plan = replace(plan, budget_bytes={**plan.budget_bytes, Tier.DEVICE: limit})
            check(plan, trace, caps)
            assert plan.peak_bytes[Tier.DEVICE] <= drafted.peak_bytes[Tier.DEVICE]
            assert plan.peak_bytes[Tier.HOST] <= budget[Tier.HOST]
            assert {u.op for u in plan.host_updates} == {b.op for b in updated.buckets}


@_settings(50)
@given(case=cases())
def test_no_plan_is_slower_than_without_updates(case: tuple[Trace, _Budget, Machine]) -> None:
    trace, budget, machine = case
    problem = make_problem(trace, machine, budget, IDEAL_EXECUTOR)
    with_them, without = plan_auto(problem), plan_with(problem, GENERATORS - {"updated"})
    fits = [plan.peak_bytes[Tier.DEVICE] <= budget[Tier.DEVICE] for plan in (with_them, without)]
    assert fits[0] == fits[1]
    if not fits[0]:
        return
    check(with_them, trace, IDEAL_EXECUTOR)
    took = simulate(with_them, trace, machine).step_ns
    assert took <= simulate(without, trace, machine).step_ns
    assert took >= lower_bound_ns(problem, scope_of(with_them))
    assert plan_auto(problem) == with_them


@_settings(50)
@given(case=cases())
def test_updates_of_one_bucket_after_the_other_hold(case: tuple[Trace, _Budget, Machine]) -> None:
    """Any choice of buckets is right, not only those that are made."""
    trace, budget, machine = case
    problem = make_problem(trace, machine, {**budget, Tier.HOST: 10**5}, IDEAL_EXECUTOR)
    buckets = find_buckets(problem)
    assume(buckets)
    for chosen in ([buckets[-1]], buckets[1:], buckets[::2]):
        updated = update(problem, chosen)
        plan = updated.plan(plan_greedy(updated.problem))
        assert plan is not None
        limit = max(budget[Tier.DEVICE], plan.peak_bytes[Tier.DEVICE])
        check(replace(plan, budget_bytes={**plan.budget_bytes, Tier.DEVICE: limit}), trace, IDEAL_EXECUTOR)
