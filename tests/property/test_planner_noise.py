"""A plan runs whatever its ops take: it never waits for what cannot come, and never holds more than was planned."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.property.test_planner_properties import capabilities, cases, machines
from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR, Capabilities, Plan
from tieroff.core.tensor import Tier
from tieroff.core.trace import Trace
from tieroff.errors import InfeasiblePlanError
from tieroff.planner.make_plan import make_plan
from tieroff.study.compare.sweep import replay, sweep, with_noise

_SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 1.0)
_settings = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)


def _plan(trace: Trace, machine: Machine, budget: dict[Tier, int], policy: str, caps: Capabilities) -> Plan | None:
    try:
        return make_plan(trace, machine, budget, policy, capabilities=caps)
    except InfeasiblePlanError:
        return None


@_settings
@given(
    case=cases(),
    machine=machines(is_plain=True),
    caps=st.just(IDEAL_EXECUTOR) | capabilities(),
    policy=st.sampled_from(("auto", "greedy", "floor_mixed")),
    share=st.sampled_from(_SHARES),
    seed=st.integers(0, 2**32),
)
def test_plan_ends_within_its_budget_whatever_its_ops_take(
    case: tuple[Trace, dict[Tier, int]], machine: Machine, caps: Capabilities, policy: str, share: float, seed: int
) -> None:
    trace, budget = case
    plan = _plan(trace, machine, budget, policy, caps)
    if plan is None:
        return
    timeline = replay(plan, trace, machine, share, seed)
    compute_ns = with_noise(trace, share, seed).ideal_ns - sum(
        with_noise(trace, share, seed).ops[update.op].duration_ns for update in plan.host_updates
    )
    alone_ns = sum(
        machine.link(t.source, t.target).transfer_ns(trace.tensors[t.tensor].part_bytes(t.first_byte, t.stop_byte))
        for t in plan.transfers
    )
    updates_ns = sum(update.duration_ns for update in plan.host_updates)
    assert compute_ns + timeline.recompute_ns <= timeline.step_ns
    # Something is always under way, so a step never takes longer than everything it does, one after the other.
    assert timeline.step_ns <= compute_ns + timeline.recompute_ns + alone_ns + updates_ns
    for tier, size in budget.items():
        assert max(timeline.memory[tier]) <= size
        assert max(timeline.memory[tier]) == plan.peak_bytes[tier]


@settings(_settings, max_examples=25)
@given(case=cases(), machine=machines(), caps=st.just(IDEAL_EXECUTOR) | capabilities(), data=st.data())
def test_more_memory_is_never_slower_within_a_sweep(
    case: tuple[Trace, dict[Tier, int]], machine: Machine, caps: Capabilities, data: st.DataObject
) -> None:
    trace, budget = case
    budgets = [
        {tier: size * data.draw(st.integers(50, 150), label=tier.value) // 100 for tier, size in budget.items()}
        for _ in range(3)
    ]
    found = sweep(trace, machine, budgets, capabilities=caps)
    for small, row in zip(budgets, (result.row for result in found), strict=True):
        for large, other in zip(budgets, (result.row for result in found), strict=True):
            if all(small[tier] <= large[tier] for tier in Tier) and row.step_s is not None:
                assert other.step_s is not None
                assert other.bound_s is not None
                assert other.bound_s <= other.step_s <= row.step_s
