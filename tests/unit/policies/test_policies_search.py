"""The policies that score or search: AutoSwap, SwapAdvisor and AutoTM."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.property.test_planner_properties import cases, machines
from tests.support.outside import published_trace
from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR, RUNTIME_EXECUTOR, Capabilities, Plan
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.planner.problem.problem import Problem, make_problem
from tieroff.planner.simulate.simulator import simulate
from tieroff.study.policies.search import autoswap, autotm, swapadvisor
from tieroff.study.policies.shared.classes import Pool
from tieroff.units import GIB

sys.path.insert(0, str(Path(__file__).parent.parent / "property"))

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME
MIB = 2**20

_POLICIES: dict[str, Callable[[Problem], Plan]] = {
    "autoswap-doa": autoswap.plan_autoswap_doa,
    "autoswap-aoa": autoswap.plan_autoswap_aoa,
    "autoswap-wdoa": autoswap.plan_autoswap_wdoa,
    "autoswap-swdoa": autoswap.plan_autoswap_swdoa,
    "autoswap": autoswap.plan_autoswap,
    "swapadvisor": swapadvisor.plan_swapadvisor,
    "autotm-static": autotm.plan_autotm_static,
    "autotm-sync": autotm.plan_autotm_sync,
}

_MACHINE = Machine(d2h_bytes_per_s=10**6 * MIB, h2d_bytes_per_s=10**6 * MIB)  # a MiB takes 1 us


def _trace(durations_us: list[int], transient_mib: list[int], tensors: Sequence[tuple[int, int, tuple[int, ...]]]) -> Trace:
    """Tensors are (MiB, op that writes it, ops that read it)."""
    reads = [tuple(t for t, (_, _, uses) in enumerate(tensors) if op in uses) for op in range(len(durations_us))]
    writes = [tuple(t for t, (_, born, _) in enumerate(tensors) if op == born) for op in range(len(durations_us))]
    ops = tuple(
        Op(f"op{i}", us * 1000, reads[i], writes[i], transient_bytes=mib * MIB)
        for i, (us, mib) in enumerate(zip(durations_us, transient_mib, strict=True))
    )
    named = tuple(Tensor(f"a{i}", size * MIB, TensorClass.ACTIVATION) for i, (size, _, _) in enumerate(tensors))
    return Trace(ops, named)


# MiB live at ops 0 to 9: 140 240 320 350 350 320 240 300 240 90. Over 330 at ops 3 and 4, by 20; the peak is op 3.
_TEN_OPS = _trace(
    [100, 200, 20, 100, 50, 200, 200, 200, 50, 100],
    [30, 30, 60, 30, 30, 0, 0, 60, 0, 60],
    [(20, 1, (8,)), (30, 0, (2, 9)), (50, 2, (8,)), (80, 0, (1, 5)), (60, 3, (7, 8)), (80, 1, (5, 8))],
)

_FOUR_EQUAL = [(30, 1, (6,)), (30, 2, (7,)), (30, 3, (8,)), (30, 2, (7,))]


def _problem(trace: Trace, device_mib: int) -> Problem:
    return make_problem(trace, _MACHINE, {DEVICE: device_mib * MIB, HOST: 10_000 * MIB}, IDEAL_EXECUTOR)


def _copied_out(plan: Plan) -> set[tuple[int, int]]:
    """Returns the tensors that are copied out, each with the tick at which the copy begins."""
    return {(t.tensor, t.issue_at) for t in plan.transfers if t.source is DEVICE}


@pytest.mark.parametrize(
    ("name", "copied"),
    [
        # Absences over op 3: a0 [2,8) 770 us, a1 [3,9) 800, a2 [3,8) 750, a3 and a5 [2,5) 170; a4 begins at 4.
        ("autoswap-doa", {(1, 3)}),
        # (time - 2 x copy) x MiB: a0 730 x 20, a1 740 x 30, a2 650 x 50, a3 and a5 10 x 80.
        ("autoswap-aoa", {(2, 3)}),
        # Load - 330 at ops 2 to 8: -10 20 20 -10 -90 -30 -90. a3 and a5 sum to 30, all others to less than 0.
        ("autoswap-wdoa", {(3, 2)}),
        # What is over 330 sums to 40 for all of them: the first.
        ("autoswap-swdoa", {(0, 2)}),
        # Bytes need a0 alone, but its addresses do not fit. With all limits at 297, 23 MiB have to leave at op 2: a3, as
        # fewer copies than a5; then 23 at op 5 and 3 at op 7: a1, the least time that does. Its first gap is [1, 2).
        ("autotm-sync", {(3, 2), (1, 3)}),
        ("autotm-static", {(3, 2), (1, 1)}),
    ],
)
def test_ten_ops_each_rule_picks_its_own_tensors(name: str, copied: set[tuple[int, int]]) -> None:
    problem = _problem(_TEN_OPS, 330)
    plan = _POLICIES[name](problem)
    check(plan, _TEN_OPS, IDEAL_EXECUTOR)
    assert _copied_out(plan) == copied
    assert plan.peak_bytes[DEVICE] <= 330 * MIB


@pytest.mark.parametrize("name", ["autotm-sync", "autotm-static"])
def test_autotm_plans_without_the_solver_where_its_program_is_too_large(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotm, "run_highs", lambda *_, **__: pytest.fail("the program was solved"))
    monkeypatch.setattr(autotm, "ENTRIES_AT_MOST", 3)
    plan = _POLICIES[name](_problem(_TEN_OPS, 330))
    check(plan, _TEN_OPS, IDEAL_EXECUTOR)
    assert plan.peak_bytes[DEVICE] <= 330 * MIB


def test_autoswap_takes_the_fastest_of_its_mixes() -> None:
    problem = _problem(_TEN_OPS, 330)
    steps = [
        simulate(_POLICIES[name](problem), _TEN_OPS, _MACHINE, autoswap.OPTIONS).step_ns
        for name in ("autoswap-doa", "autoswap-aoa", "autoswap-wdoa", "autoswap-swdoa")
    ]
    mixed = simulate(autoswap.plan_autoswap(problem), _TEN_OPS, _MACHINE, autoswap.OPTIONS).step_ns
    assert mixed == min(steps) < max(steps)


def test_autoswap_sticks_to_the_limit() -> None:
    """a1 leaves for 30 us from op 3 on: at once, as op 3 has no room; it returns in the 30 us before op 9, in op 8."""
    plan = autoswap.plan_autoswap_doa(_problem(_TEN_OPS, 330))
    assert {(r.start, r.stop) for r in plan.residencies if r.tensor == 1 and r.tier is DEVICE} == {(0, 3), (8, 10)}
    assert [(t.issue_at, t.ready_by) for t in plan.transfers] == [(3, 3), (8, 9)]


def test_autoswap_swdoa_passes_over_what_an_earlier_choice_has_made_useless() -> None:
    """Over 120 MiB by 10 30 40 30 30 10 at ops 2 to 7; b [2,6), c [3,7), d [4,8) and e [3,7) have 30 MiB each.

    c and e score 130, b and d 110. With c away, e would help op 4 alone, by 10: less than b and then d.
    """
    trace = _trace([100] * 10, [0, 30, 40, 30, 40, 30, 30, 40, 0, 0], _FOUR_EQUAL)
    problem = _problem(trace, 120)
    assert {t for t, _ in _copied_out(autoswap.plan_autoswap_wdoa(problem))} == {0, 1, 2, 3}
    assert {t for t, _ in _copied_out(autoswap.plan_autoswap_swdoa(problem))} == {0, 1, 2}


def test_autoswap_moves_only_what_crosses_the_peak_and_nothing_small() -> None:
    """Ops 2 and 7 are over 90 MiB; the first has the peak, and no move of b, which is idle at 7, would help there."""
    tensors = [(40, 0, (4,)), (40, 5, (9,))]
    trace = _trace([100] * 10, [0, 0, 60, 0, 0, 0, 0, 55, 0, 0], tensors)
    plan = autoswap.plan_autoswap(_problem(trace, 90))
    assert _copied_out(plan) == {(0, 1)}
    assert plan.peak_bytes[DEVICE] == 95 * MIB
    small = replace(trace, tensors=tuple(replace(t, size_bytes=MIB - 1) for t in trace.tensors))
    assert autoswap.plan_autoswap(_problem(small, 60)).moves_nothing


def test_swapadvisor_evicts_what_is_needed_furthest_in_the_future_within_a_class() -> None:
    """Four objects of 80 MiB hold a1, a3, a0, a5 after op 1. Op 2 takes that of a0 (next use 8), op 3 that of a1 (9).

    a3 dies at op 5 and leaves its object to a0 from op 6 on. a1 finds one when op 8 is over.
    """
    plan = Pool(_problem(_TEN_OPS, 330)).plan("swapadvisor", ((80 * MIB, 4),))
    held = {t: {(r.start, r.stop) for r in plan.residencies if r.tensor == t and r.tier is DEVICE} for t in range(6)}
    assert held == {0: {(1, 2), (6, 9)}, 1: {(0, 3), (9, 10)}, 2: {(2, 9)}, 3: {(0, 6)}, 4: {(3, 9)}, 5: {(1, 9)}}


def test_swapadvisor_gives_classes_what_ops_need_and_then_what_is_left() -> None:
    """Ops need two of 80 MiB at once; of four of 30 MiB two, beside at most 40 that are in no class."""
    pool = Pool(_problem(_TEN_OPS, 330))
    assert [size // MIB for size in pool.sizes] == [20, 30, 50, 60, 80]
    assert pool.bytes == 270 * MIB
    classes = pool.classes((True,) * 5, (1.0,) * 5)
    assert [(size // MIB, count) for size, count in classes] == [(20, 1), (30, 1), (50, 1), (60, 1), (80, 2)]
    equal = _trace([100] * 10, [0, 30, 40, 30, 40, 30, 30, 40, 0, 0], _FOUR_EQUAL)
    assert Pool(_problem(equal, 150)).classes((True,), (1.0,)) == ((30 * MIB, 3),)
    assert Pool(_problem(equal, 120)).classes((True,), (1.0,)) == ((30 * MIB, 2),)
    plan = swapadvisor.plan_swapadvisor(_problem(_TEN_OPS, 330))
    check(plan, _TEN_OPS, IDEAL_EXECUTOR)
    assert _copied_out(plan) == {(0, 2), (1, 3)}


_settings = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)


@pytest.mark.parametrize("name", _POLICIES)
@pytest.mark.parametrize("capabilities", [IDEAL_EXECUTOR, RUNTIME_EXECUTOR], ids=["ideal", "runtime"])
@_settings
@given(case=cases(), machine=machines(), share=st.integers(0, 100))
def test_plan_is_valid_or_over_the_devices_budget_only(
    name: str, capabilities: Capabilities, case: tuple[Trace, dict[Tier, int]], machine: Machine, share: int
) -> None:
    trace, budget = _in_mib(*case)
    problem = make_problem(trace, machine, budget, capabilities)
    least, most = int(problem.base.max()), int(problem.live.max())
    device_bytes = max(1, least + (most - least) * share // 100)
    problem = make_problem(trace, machine, {**budget, DEVICE: device_bytes}, capabilities)
    plan = _POLICIES[name](problem)
    assert plan == _POLICIES[name](problem)
    assert plan.moves_nothing or not problem.fits
    memory = simulate(plan, trace, machine).memory
    assert {tier: max(line) for tier, line in memory.items()} == plan.peak_bytes
    assert all(plan.peak_bytes[tier] <= problem.budget[tier] for tier in (HOST, NVME))
    allowed = max(device_bytes, plan.peak_bytes[DEVICE])
    check(replace(plan, budget_bytes={**plan.budget_bytes, DEVICE: allowed}), trace, capabilities)


def _in_mib(trace: Trace, budget: dict[Tier, int]) -> tuple[Trace, dict[Tier, int]]:
    """AutoSwap moves no tensor below 1 MiB."""
    tensors = tuple(replace(t, size_bytes=t.size_bytes * MIB) for t in trace.tensors)
    ops = tuple(replace(op, duration_ns=op.duration_ns * MIB, transient_bytes=op.transient_bytes * MIB) for op in trace.ops)
    return replace(trace, ops=ops, tensors=tensors), {tier: size * MIB for tier, size in budget.items()}


_G10_RATE = round(15.754 * GIB)
_G10_MACHINE = Machine(
    name="g10",
    d2h_bytes_per_s=_G10_RATE,
    h2d_bytes_per_s=_G10_RATE,
    nvme_write_bytes_per_s=round(3.2 * GIB),
    nvme_read_bytes_per_s=round(3.2 * GIB),
    nvme_shares_host_link=True,
)
_DEMAND_S = 14.9723  # published for paging on demand


@pytest.mark.parametrize("name", _POLICIES)
def test_published_trace_lies_between_ideal_and_paging_on_demand(name: str) -> None:
    trace = published_trace("VIT-b1024")
    budget = {DEVICE: 40 * GIB, HOST: 128 * GIB, NVME: 0}
    plan = _POLICIES[name](make_problem(trace, _G10_MACHINE, budget, IDEAL_EXECUTOR))
    check(plan, trace, IDEAL_EXECUTOR)
    step_s = simulate(plan, trace, _G10_MACHINE).step_ns / 1e9
    assert trace.ideal_ns / 1e9 <= step_s < _DEMAND_S / 3
    assert plan.transfers
