"""The two simulators on random traces, machines and plans: equal to the last digit, and what any simulation must hold.

The plans move data in ways that make no sense; only their ticks and ranges are right. That is all a simulator asks for.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.property.test_planner_properties import capabilities
from tests.property.test_planner_properties import cases as feasible_cases
from tests.property.test_planner_properties import machines as planner_machines
from tests.support.covering import examples
from tests.support.oracles.simulate import simulate_reference
from tieroff.core.check.plan import check
from tieroff.core.machine import LINK_NAMES, Machine
from tieroff.core.plan import Allocation, AllocationKind, Capabilities, HostUpdate, Plan, Repeat, Residency, Transfer
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Queue, Trace
from tieroff.errors import InfeasiblePlanError
from tieroff.planner.make_plan import make_plan
from tieroff.planner.simulate.options import SimulationOptions, with_blocking_evictions, with_clean_writes
from tieroff.planner.simulate.simulator import simulate

_TIERS = tuple(Tier)
_LINK_ENDS = tuple(LINK_NAMES)
_settings = settings(
    max_examples=examples(400),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)


@st.composite
def traces(draw: st.DrawFn, *, is_large: bool) -> Trace:
    """Returns a trace; a large one has tensors of many gigabytes, whose work needs more than 64 bits."""
    op_count = draw(st.integers(1, 10))
    sizes = st.integers(10**6, 10**11) if is_large else st.integers(1, 100)
    durations = st.integers(0, 10**10) if is_large else st.integers(0, 60)
    tensors = tuple(
        Tensor(f"t{i}", draw(sizes), TensorClass.PARAMETER, is_persistent=draw(st.booleans()))
        for i in range(draw(st.integers(1, 5)))
    )
    index = st.integers(0, len(tensors) - 1)
    ops: list[Op] = []
    has_communication = draw(st.booleans())
    for i in range(op_count):
        beside = [number for number, op in enumerate(ops) if op.queue is Queue.COMMUNICATION]
        op = Op(f"op{i}", draw(durations), reads=tuple(sorted(draw(st.sets(index, max_size=2)))))
        if has_communication and draw(st.booleans()):
            op = replace(op, queue=Queue.COMMUNICATION)
        else:
            awaits = draw(st.sampled_from([-1, *beside]))
            op = replace(op, transient_bytes=draw(st.integers(0, 20)), awaits=awaits)
        ops.append(op)
    return Trace(tuple(ops), tensors)


@st.composite
def byte_ranges(draw: st.DrawFn, size_bytes: int) -> tuple[int, int]:
    """Returns `first_byte` and `stop_byte` of an item."""
    if draw(st.booleans()):
        return 0, 0
    first = draw(st.integers(0, size_bytes - 1))
    return first, draw(st.integers(first + 1, size_bytes))


@st.composite
def windows(draw: st.DrawFn, op_count: int) -> tuple[int, int]:
    """Returns `issue_at` and `ready_by`, more often close to each other."""
    issue = draw(st.integers(0, op_count))
    return issue, issue + draw(st.integers(0, op_count) | st.integers(0, min(2, op_count)))


@st.composite
def plans(draw: st.DrawFn, trace: Trace) -> Plan:
    """Returns a plan whose ticks and ranges are right."""
    n = len(trace.ops)
    tensor = st.integers(0, len(trace.tensors) - 1)
    transfers = []
    for _ in range(draw(st.integers(0, 14) | st.integers(8, 14))):
        index = draw(tensor)
        window, ends = draw(windows(n)), draw(st.sampled_from(_LINK_ENDS))
        first, stop = draw(byte_ranges(trace.tensors[index].size_bytes))
        transfers.append(Transfer(index, *ends, *window, 0, first, stop))
    residencies = []
    for _ in range(draw(st.integers(0, 8))):
        index, start = draw(tensor), draw(st.integers(0, n - 1))
        span = draw(st.integers(1, n))
        bytes_ = draw(byte_ranges(trace.tensors[index].size_bytes))
        residencies.append(Residency(index, draw(st.sampled_from(_TIERS)), start, start + span, *bytes_))
    longest = max(op.duration_ns for op in trace.ops) + 50
    updates = [
        HostUpdate(op, *draw(windows(n)), draw(st.integers(0, longest)))
        for op in draw(st.sets(st.integers(0, n - 1), max_size=3))
    ]
    repeats = []
    for _ in range(draw(st.integers(0, 2)) if n > 1 else 0):
        op = draw(st.integers(0, n - 2))
        repeats.append(Repeat(op, draw(st.integers(op + 1, n - 1))))
    allocation = Allocation(draw(st.sampled_from(tuple(AllocationKind))), tuple(draw(st.integers(0, 200)) for _ in residencies))
    return Plan(
        "random",
        trace.digest,
        n,
        {},
        {},
        tuple(residencies),
        ranked(transfers),
        repeats=tuple(repeats),
        host_updates=tuple(updates),
        allocation=allocation,
    )


def ranked(transfers: list[Transfer]) -> tuple[Transfer, ...]:
    """Returns transfers with ranks per link in the order of issue."""
    counts: dict[str, int] = defaultdict(int)
    result = []
    for t in sorted(transfers, key=lambda t: (t.issue_at, t.target is Tier.DEVICE or t.issue_at < t.ready_by)):
        link = LINK_NAMES[t.source, t.target]
        result.append(replace(t, rank=counts[link]))
        counts[link] += 1
    return tuple(result)


@st.composite
def machines(draw: st.DrawFn, *, is_plain: bool = False) -> Machine:
    """Returns a machine whose links and ops take about as long as each other; one that is plain shares nothing."""
    rate = st.integers(10**9, 50 * 10**9)
    latency = st.integers(0, 5) | st.integers(0, 10**6)
    memory = st.just(0) if is_plain else st.just(0) | rate | st.integers(10**7, 10**8)
    return Machine(
        name="random",
        d2h_bytes_per_s=draw(rate),
        h2d_bytes_per_s=draw(rate),
        nvme_write_bytes_per_s=draw(rate),
        nvme_read_bytes_per_s=draw(rate),
        d2h_latency_s=draw(latency) * 1e-9,
        h2d_latency_s=draw(latency) * 1e-9,
        nvme_write_latency_s=draw(latency) * 1e-9,
        nvme_read_latency_s=draw(latency) * 1e-9,
        duplex_share=1.0 if is_plain else draw(st.sampled_from((1.0, 0.7, 0.5, 1 / 3))),
        nvme_shares_host_link=False if is_plain else draw(st.booleans()),
        host_memory_bytes_per_s=draw(memory),
        cpu_update_bytes_per_s=draw(st.just(0) | rate),
        device_type=draw(st.sampled_from(("", "cpu"))),
        move_compute_s=draw(st.sampled_from((0.0, 0.0, 3e-9, 1e-5))),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, Trace]:
    """Returns a plan and its trace."""
    trace = draw(traces(is_large=draw(st.booleans())))
    return draw(plans(trace)), trace


_options = st.builds(
    SimulationOptions,
    has_exclusive_link=st.booleans(),
    writes_clean=st.booleans(),
    eviction_blocks=st.booleans(),
    step_count_max=st.sampled_from((16, 16, 1, 3)),
)


@settings(_settings, max_examples=examples(1000))
@given(case=cases(), machine=machines(), options=_options)
def test_both_simulators_give_the_same_timeline(case: tuple[Plan, Trace], machine: Machine, options: SimulationOptions) -> None:
    plan, trace = case
    timeline = simulate(plan, trace, machine, options)
    event(f"cycle {timeline.cycle}")
    assert timeline == simulate_reference(plan, trace, machine, options)


@_settings
@given(case=cases(), machine=machines(), ranks=st.randoms(use_true_random=False))
def test_both_simulators_agree_whatever_the_ranks(case: tuple[Plan, Trace], machine: Machine, ranks: object) -> None:
    plan, trace = case
    transfers = list(plan.transfers)
    ranks.shuffle(transfers)  # type: ignore[attr-defined]
    shuffled = tuple(replace(t, rank=7 * i - 3) for i, t in enumerate(transfers))
    plan = replace(plan, transfers=shuffled)
    assert simulate(plan, trace, machine) == simulate_reference(plan, trace, machine)


@_settings
@given(case=cases(), machine=machines(), options=_options)
def test_a_step_is_its_compute_recompute_and_stalls(
    case: tuple[Plan, Trace], machine: Machine, options: SimulationOptions
) -> None:
    plan, trace = case
    timeline = simulate(plan, trace, machine, options)
    own_ns = timeline.compute_ns + timeline.recompute_ns + timeline.engine_ns
    on_cpu = {update.op for update in plan.host_updates}
    ops = trace.ops
    assert timeline.compute_ns == sum(ns for i, ns in enumerate(trace.compute_ns) if i not in on_cpu)
    is_counted = not plan.repeats and any(op.queue is Queue.COMPUTE for op in ops)
    issued = len((with_clean_writes(plan, trace) if options.writes_clean else plan).transfers)
    assert timeline.engine_ns == issued * round(machine.move_compute_s * 1e9) * is_counted
    assert timeline.recompute_ns == sum(ops[r.op].duration_ns for r in plan.repeats if r.op not in on_cpu)
    assert timeline.step_ns >= own_ns
    assert timeline.first_step_ns >= own_ns
    if timeline.cycle in (0, 1):
        assert timeline.step_ns == own_ns + timeline.stall_ns


@_settings
@given(case=cases(), machine=machines(), options=_options)
def test_transfers_of_a_link_are_served_one_at_a_time_in_order_of_rank(
    case: tuple[Plan, Trace], machine: Machine, options: SimulationOptions
) -> None:
    plan, trace = case
    timeline = simulate(plan, trace, machine, options)
    by_link: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for span in timeline.transfers:
        link = "host" if options.has_exclusive_link and span.link in ("d2h", "h2d") else span.link
        by_link[link].append((span.start_ns, span.stop_ns))
    for spans in by_link.values():
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    if options == SimulationOptions(step_count_max=options.step_count_max):
        for link in LINK_NAMES.values():
            in_order = sorted((t for t in plan.transfers if LINK_NAMES[t.source, t.target] == link), key=lambda t: t.rank)
            served = [(s.tensor, s.source, s.target, s.first_byte) for s in timeline.transfers if s.link == link]
            assert served == [(t.tensor, t.source, t.target, t.first_byte) for t in in_order]
    cpu = [(span.start_ns, span.stop_ns) for span in timeline.host_updates]
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(cpu))


@_settings
@given(case=cases(), machine=machines(), options=st.builds(SimulationOptions, has_exclusive_link=st.booleans()))
def test_each_transfer_is_done_before_the_op_that_awaits_it_runs(
    case: tuple[Plan, Trace], machine: Machine, options: SimulationOptions
) -> None:
    plan, trace = case
    timeline = simulate(plan, trace, machine, options)
    starts = [op.start_ns for op in timeline.ops]
    ends = defaultdict(list)
    for span in timeline.transfers:
        ends[span.tensor, span.source, span.target, span.first_byte, span.size_bytes].append(span.stop_ns)
    sizes = [t.size_bytes for t in trace.tensors]
    for t in plan.transfers:
        size = (t.stop_byte or sizes[t.tensor]) - t.first_byte
        if t.ready_by < plan.op_count:
            assert min(ends[t.tensor, t.source, t.target, t.first_byte, size]) <= starts[t.ready_by]


@_settings
@given(case=cases(), machine=machines(is_plain=True), options=_options, factor=st.integers(2, 8), data=st.data())
def test_a_faster_link_or_op_is_never_slower_where_links_share_nothing(
    case: tuple[Plan, Trace], machine: Machine, options: SimulationOptions, factor: int, data: st.DataObject
) -> None:
    plan, trace = case
    before = simulate(plan, trace, machine, options)
    what = data.draw(st.sampled_from((*sorted(set(LINK_NAMES.values())), "latency", "op", "cpu")))
    if what == "latency":
        machine = replace(machine, d2h_latency_s=0.0, h2d_latency_s=0.0, nvme_write_latency_s=0.0)
    elif what == "op":
        index = data.draw(st.integers(0, len(trace.ops) - 1))
        durations = [op.duration_ns for op in trace.ops]
        durations[index] //= factor
        trace = trace.with_durations(durations)
    elif what == "cpu":
        updates = tuple(replace(u, duration_ns=u.duration_ns // factor) for u in plan.host_updates)
        plan = replace(plan, host_updates=updates)
    else:
        machine = replace(machine, **{f"{what}_bytes_per_s": getattr(machine, f"{what}_bytes_per_s") * factor})
    after = simulate(plan, trace, machine, options)
    assert after.first_step_ns <= before.first_step_ns
    if before.is_periodic and after.is_periodic:
        assert after.step_ns <= before.step_ns


@_settings
@given(case=feasible_cases(), machine=planner_machines(), caps=capabilities())
def test_what_the_options_make_of_a_plan_is_a_valid_plan(
    case: tuple[Trace, dict[Tier, int]], machine: Machine, caps: Capabilities
) -> None:
    trace, budget = case
    try:
        plan = make_plan(trace, machine, budget, "floor", capabilities=caps)
    except InfeasiblePlanError:
        return
    written = with_clean_writes(plan, trace)
    event("writes more" if written is not plan else "writes the same")
    check(written, trace, caps)
    check(with_blocking_evictions(written), trace, caps)
