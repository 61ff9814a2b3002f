"""Planned addresses of what a plan holds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.covering import examples
from tests.support.outside import published_trace
from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR, AllocationKind, Plan, Repeat, Residency, Transfer
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.errors import InfeasiblePlanError
from tieroff.planner.make_plan import make_plan
from tieroff.planner.problem.problem import live_bytes
from tieroff.study.policies.shared.addresses import overshoot_bytes, with_addresses

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME

_MACHINE = Machine(device_bytes=1 << 40, host_bytes=1 << 40, d2h_bytes_per_s=16 * 10**9, h2d_bytes_per_s=16 * 10**9)


@st.composite
def _traces(draw: st.DrawFn) -> Trace:
    """Returns a trace of which some tensors persist and some ops have transient bytes."""
    op_count = draw(st.integers(2, 10))
    op = st.integers(0, op_count - 1)
    tensors, uses = [], []
    for index in range(draw(st.integers(1, 8))):
        is_persistent = draw(st.booleans())
        kind = TensorClass.PARAMETER if is_persistent else TensorClass.ACTIVATION
        tensors.append(Tensor(f"t{index}", draw(st.integers(1, 60)), kind, is_persistent=is_persistent))
        uses.append(draw(st.sets(op, min_size=1, max_size=3)))
    ops = tuple(
        Op(
            f"op{i}",
            draw(st.integers(1, 50)),
            tuple(t for t, used in enumerate(uses) if i in used),
            tuple(t for t, used in enumerate(uses) if i in used and draw(st.booleans())),
            transient_bytes=draw(st.sampled_from((0, 0, 25))),
        )
        for i in range(op_count)
    )
    return Trace(ops, tuple(tensors), name="random")


@st.composite
def _held(draw: st.DrawFn) -> tuple[Trace, Plan]:
    """Returns a trace, and a plan with any residencies on its ring, of parts too; some wrap round."""
    trace = draw(_traces())
    n = len(trace.ops)
    residencies = []
    for tensor, t in enumerate(trace.tensors):
        for tier in draw(st.lists(st.sampled_from((DEVICE, DEVICE, HOST)), max_size=3)):
            start = draw(st.integers(0, n - 1))
            cut = draw(st.integers(0, t.size_bytes - 1))
            stop = start + draw(st.integers(1, n))
            residencies.append(Residency(tensor, tier, start, stop, cut if draw(st.booleans()) else 0))
    transfers = [
        Transfer(r.tensor, HOST, DEVICE, r.start, r.stop, rank, r.first_byte, r.stop_byte)
        for rank, r in enumerate(r for r in residencies if r.tier is HOST and draw(st.booleans()))
    ]
    repeats = tuple(Repeat(a, b) for a, b in draw(st.lists(st.tuples(*[st.integers(0, n - 1)] * 2), max_size=2)))
    budget = {DEVICE: draw(st.sampled_from((0, 200, 10_000))), HOST: 10_000, NVME: 0}
    peaks = {DEVICE: 0, HOST: 0, NVME: 0}
    plan = Plan("any", trace.digest, n, budget, peaks, tuple(residencies), tuple(transfers), repeats=repeats)
    return trace, plan


def _ops(residency: Residency, op_count: int) -> set[int]:
    return {op % op_count for op in range(residency.start, residency.stop)}


def _spans(plan: Plan, trace: Trace, offsets: tuple[int, ...], tier: Tier) -> list[tuple[set[int], int, int]]:
    """Returns ops, first and last byte of every residency in a tier, after looking at all pairs of them."""
    spans = []
    for r, offset in zip(plan.residencies, offsets, strict=True):
        assert (offset >= 0) == (r.tier is tier)
        if r.tier is tier:
            size = (r.stop_byte or trace.tensors[r.tensor].size_bytes) - r.first_byte
            spans.append((_ops(r, plan.op_count), offset, offset + size))
    for a, b in itertools.combinations(spans, 2):
        assert a[0].isdisjoint(b[0]) or a[2] <= b[1] or b[2] <= a[1]
    return spans


@given(case=_held(), alignment=st.sampled_from((1, 8)))
def test_addresses_never_overlap_on_the_ring_and_prove_the_peak(case: tuple[Trace, Plan], alignment: int) -> None:
    trace, plan = case
    placed = with_addresses(plan, trace, alignment)
    assert placed.allocation.kind is AllocationKind.ADDRESSES
    spans = _spans(placed, trace, placed.allocation.addresses, DEVICE)
    assert all(first % alignment == 0 for _, first, _ in spans)
    room, held = [], []
    for op in range(plan.op_count):
        runs = [op, *(repeat.op for repeat in plan.repeats if repeat.at == op)]
        transient = max(trace.ops[run].transient_bytes for run in runs)
        here = [(first, stop) for ops, first, stop in spans if op in ops]
        room.append(max((stop for _, stop in here), default=0) + transient)
        held.append(sum(stop - first for first, stop in here) + transient)
    assert placed.peak_bytes[DEVICE] == max(room) >= max(held)
    assert overshoot_bytes(placed) == max(0, max(room) - plan.budget_bytes[DEVICE])
    assert replace(placed, peak_bytes=plan.peak_bytes, allocation=plan.allocation) == plan
    assert placed == with_addresses(plan, trace, alignment)


@settings(max_examples=examples(60))
@given(trace=_traces(), share=st.integers(50, 100))
def test_plan_with_addresses_passes_the_checker_with_room_for_its_overshoot(trace: Trace, share: int) -> None:
    device_bytes = max(1, int(live_bytes(trace).max()) * share // 100)

    try:
        plan = make_plan(trace, _MACHINE, {DEVICE: device_bytes, HOST: 10_000, NVME: 0}, "greedy", capabilities=IDEAL_EXECUTOR)
    except InfeasiblePlanError:
        return
    plan = with_addresses(plan, trace, alignment_bytes=1)
    plan = replace(plan, budget_bytes={**plan.budget_bytes, DEVICE: device_bytes + overshoot_bytes(plan)})
    check(plan, trace, IDEAL_EXECUTOR)


@pytest.mark.parametrize(("name", "share"), [("BERT_Base-b256", 35), ("VIT-b1024", 100), ("VIT-b1024", 70)])
def test_addresses_of_published_traces_take_at_most_a_percent_more_than_the_sum(name: str, share: int) -> None:
    trace = published_trace(name)
    budget = {DEVICE: int(live_bytes(trace).max()) * share // 100, HOST: 1 << 40, NVME: 0}
    plan = make_plan(trace, _MACHINE, budget, "greedy", capabilities=IDEAL_EXECUTOR)
    placed = with_addresses(plan, trace)
    assert plan.peak_bytes[DEVICE] <= placed.peak_bytes[DEVICE] <= 1.01 * plan.peak_bytes[DEVICE]
    roomy = {**plan.budget_bytes, DEVICE: placed.peak_bytes[DEVICE]}
    check(replace(placed, budget_bytes=roomy), trace, IDEAL_EXECUTOR)
