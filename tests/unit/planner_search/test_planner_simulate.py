"""Both simulators on cases that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.oracles.simulate import memory_per_op_reference, simulate_reference
from tieroff import _native
from tieroff.core.io.json_files import load_timeline, save_timeline
from tieroff.core.machine import Machine
from tieroff.core.plan import Allocation, AllocationKind, HostUpdate, Plan, Repeat, Residency, Transfer
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.timeline import RunSpan, Stall, Timeline, TransferSpan
from tieroff.core.trace import Op, Queue, Trace
from tieroff.errors import ConfigError, InvalidPlanError, TraceMismatchError
from tieroff.planner.simulate import simulator as fast
from tieroff.planner.simulate.options import SimulationOptions, with_blocking_evictions, with_clean_writes

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME
_GB = 10**9

Simulate = Callable[..., Timeline]


@pytest.fixture(params=[fast.simulate, simulate_reference], ids=["native", "reference"])
def simulate(request: pytest.FixtureRequest) -> Simulate:
    """Returns one of the two simulators."""
    return request.param


def _trace(op_count: int, *sizes: int) -> Trace:
    tensors = tuple(Tensor(f"t{i}", size, TensorClass.PARAMETER, is_persistent=True) for i, size in enumerate(sizes))
    return Trace(tuple(Op(f"op{i}", 100) for i in range(op_count)), tensors)


def _plan(trace: Trace, *transfers: Transfer, residencies: tuple[Residency, ...] = (), **more: Any) -> Plan:
    return Plan("hand", trace.digest, len(trace.ops), {}, {}, residencies, transfers, **more)


def _stops(timeline: Timeline) -> dict[int, int]:
    return {span.tensor: span.stop_ns for span in timeline.transfers}


def test_link_serves_one_transfer_at_a_time_in_order_of_rank(simulate: Simulate) -> None:
    trace = _trace(3, 70, 80)
    plan = _plan(trace, Transfer(0, DEVICE, HOST, 0, 1, 0), Transfer(1, DEVICE, HOST, 0, 2, 1))
    timeline = simulate(plan, trace, Machine(d2h_bytes_per_s=_GB, d2h_latency_s=5e-9))
    assert timeline.transfers == (TransferSpan(0, DEVICE, HOST, 0, 75, 70), TransferSpan(1, DEVICE, HOST, 75, 160, 80))
    assert timeline.step_ns == 300
    assert timeline.moved_bytes == {"d2h": 150, "h2d": 0, "nvme_write": 0, "nvme_read": 0}


def test_op_waits_for_its_load_and_the_stall_names_it(simulate: Simulate) -> None:
    trace = _trace(3, 150, 60)
    plan = _plan(trace, Transfer(0, HOST, DEVICE, 0, 1, 0), Transfer(1, HOST, DEVICE, 0, 2, 1))
    timeline = simulate(plan, trace, Machine(h2d_bytes_per_s=_GB))
    assert timeline.stalls == (Stall(1, 50, 0, HOST, DEVICE),)
    assert [op.start_ns for op in timeline.ops] == [0, 150, 250]
    assert timeline.step_ns == 350
    assert timeline.stall_ns == 50


def test_end_of_the_step_waits_for_copies_out(simulate: Simulate) -> None:
    trace = _trace(2, 30)
    timeline = simulate(_plan(trace, Transfer(0, DEVICE, HOST, 2, 2, 0)), trace, Machine(d2h_bytes_per_s=_GB))
    assert timeline.stalls == (Stall(2, 30, 0, DEVICE, HOST),)
    assert timeline.step_ns == 230


def test_duplex_share_slows_both_directions_while_both_are_busy(simulate: Simulate) -> None:
    trace = _trace(4, 100, 50)
    plan = _plan(trace, Transfer(0, DEVICE, HOST, 0, 4, 0), Transfer(1, HOST, DEVICE, 0, 4, 0))
    machine = Machine(d2h_bytes_per_s=_GB, h2d_bytes_per_s=_GB, duplex_share=0.5)
    assert _stops(simulate(plan, trace, machine)) == {
        1: 100,
        0: 150,
    }  # both at half rate for 100 ns, then 50 bytes left at the full rate


def test_nvme_fills_the_host_link_where_it_shares_it(simulate: Simulate) -> None:
    trace = _trace(4, 100, 50)
    transfers = (Transfer(0, DEVICE, HOST, 0, 4, 0), Transfer(1, DEVICE, NVME, 0, 4, 0))
    rates: dict[str, Any] = {"d2h_bytes_per_s": _GB, "nvme_write_bytes_per_s": _GB // 4}
    apart = simulate(_plan(trace, *transfers), trace, Machine(**rates))
    shared = simulate(_plan(trace, *transfers), trace, Machine(**rates, nvme_shares_host_link=True))
    assert _stops(apart) == {0: 100, 1: 200}
    assert _stops(shared) == {0: 134, 1: 200}


def test_steady_state_counts_a_transfer_that_crosses_the_end_of_the_step(simulate: Simulate) -> None:
    trace = _trace(2, 250)
    plan = _plan(trace, Transfer(0, DEVICE, HOST, 1, 3, 0), residencies=(Residency(0, DEVICE, 1, 3),))
    timeline = simulate(plan, trace, Machine(d2h_bytes_per_s=_GB))
    assert timeline.step_ns == 250  # issued at 100, awaited before op 1 of the next step
    assert timeline.stalls == (Stall(1, 50, 0, DEVICE, HOST),)


def test_simulate_refuses_another_trace_and_a_missing_link(simulate: Simulate) -> None:
    trace = _trace(2, 250)
    plan = _plan(trace, Transfer(0, DEVICE, HOST, 1, 1, 0))
    with pytest.raises(TraceMismatchError):
        simulate(plan, _trace(3, 250), Machine(d2h_bytes_per_s=_GB))
    with pytest.raises(ConfigError, match="d2h_bytes_per_s"):
        simulate(plan, trace, Machine())


def test_wait_for_several_is_charged_to_the_one_that_ends_last(simulate: Simulate) -> None:
    trace = _trace(2, 150, 160, 90)
    loads = (Transfer(0, HOST, DEVICE, 0, 1, 0), Transfer(1, NVME, DEVICE, 0, 1, 0), Transfer(2, HOST, DEVICE, 0, 1, 1))
    timeline = simulate(_plan(trace, *loads), trace, Machine(h2d_bytes_per_s=_GB, nvme_read_bytes_per_s=_GB // 2))
    assert timeline.stalls == (Stall(1, 220, 1, NVME, DEVICE),)


def test_transfer_of_a_part_takes_the_time_of_its_bytes(simulate: Simulate) -> None:
    trace = _trace(2, 100)
    parts = (Transfer(0, DEVICE, HOST, 0, 2, 0, 0, 30), Transfer(0, DEVICE, HOST, 0, 2, 1, 60))
    timeline = simulate(_plan(trace, *parts), trace, Machine(d2h_bytes_per_s=_GB))
    assert timeline.transfers == (
        TransferSpan(0, DEVICE, HOST, 0, 30, 30),
        TransferSpan(0, DEVICE, HOST, 30, 70, 40, first_byte=60),
    )


def test_latency_occupies_its_own_link_only(simulate: Simulate) -> None:
    trace = _trace(4, 100, 50)
    plan = _plan(trace, Transfer(0, DEVICE, HOST, 0, 4, 0), Transfer(1, HOST, DEVICE, 0, 4, 0))
    machine = Machine(d2h_bytes_per_s=_GB, h2d_bytes_per_s=_GB, h2d_latency_s=60e-9, duplex_share=0.5)
    # until 60 the copy out is alone; then both at half rate until its last 40 bytes are moved, at 140
    assert _stops(simulate(plan, trace, machine)) == {0: 140, 1: 150}


def test_exclusive_link_carries_one_transfer_at_a_time_in_order_of_issue(simulate: Simulate) -> None:
    trace = _trace(4, 100, 50, 20)
    transfers = (Transfer(0, DEVICE, HOST, 0, 4, 0), Transfer(1, HOST, DEVICE, 1, 4, 0), Transfer(2, DEVICE, HOST, 1, 4, 1))
    machine = Machine(d2h_bytes_per_s=_GB, h2d_bytes_per_s=_GB // 2, h2d_latency_s=7e-9, duplex_share=0.5)
    exclusive = SimulationOptions(has_exclusive_link=True)
    assert _stops(simulate(_plan(trace, *transfers), trace, machine, exclusive)) == {0: 100, 1: 207, 2: 227}


def test_moves_between_host_and_nvme_take_the_link_of_the_nvme_and_leave_the_host_link_alone(simulate: Simulate) -> None:
    trace = _trace(4, 100, 60, 30)
    transfers = (Transfer(0, DEVICE, HOST, 0, 4, 0), Transfer(1, HOST, NVME, 0, 4, 0), Transfer(2, DEVICE, NVME, 0, 4, 1))
    machine = Machine(d2h_bytes_per_s=_GB, nvme_write_bytes_per_s=_GB // 2, nvme_shares_host_link=True)
    timeline = simulate(_plan(trace, *transfers), trace, machine)
    assert _stops(timeline) == {0: 100, 1: 120, 2: 180}
    assert timeline.moved_bytes["nvme_write"] == 90


def test_move_from_nvme_to_host_is_awaited_before_what_is_issued_at_its_tick(simulate: Simulate) -> None:
    trace = _trace(3, 150, 10)
    plan = _plan(trace, Transfer(0, NVME, HOST, 0, 1, 0), Transfer(0, HOST, DEVICE, 1, 2, 0))
    timeline = simulate(plan, trace, Machine(nvme_read_bytes_per_s=_GB, h2d_bytes_per_s=_GB))
    assert timeline.stalls == (Stall(1, 50, 0, NVME, HOST), Stall(2, 50, 0, HOST, DEVICE))


def test_cpu_serves_updates_one_at_a_time_and_the_device_does_not_run_their_ops(simulate: Simulate) -> None:
    trace = _trace(4, 10)
    updates = (HostUpdate(1, 1, 3, 150), HostUpdate(2, 2, 4, 30))
    timeline = simulate(_plan(trace, host_updates=updates), trace, Machine())
    assert timeline.host_updates == (RunSpan(1, 100, 250), RunSpan(2, 250, 280))
    assert timeline.stalls == (Stall(3, 150, -1, HOST, HOST, update=1),)
    assert timeline.stalls[0].link == "cpu"
    assert timeline.compute_ns == 200
    assert timeline.step_ns == 350


def test_update_that_crosses_the_end_of_the_step_is_awaited_in_the_next_one(simulate: Simulate) -> None:
    trace = _trace(2, 10)
    timeline = simulate(_plan(trace, host_updates=(HostUpdate(1, 1, 3, 170),)), trace, Machine())
    assert timeline.stalls == (Stall(1, 70, -1, HOST, HOST, update=1),)
    assert (timeline.first_step_ns, timeline.step_ns, timeline.cycle) == (100, 170, 1)


def test_repeated_op_runs_after_the_loads_of_its_tick_and_counts_as_recompute(simulate: Simulate) -> None:
    trace = _trace(3, 130)
    plan = _plan(trace, Transfer(0, HOST, DEVICE, 0, 1, 0), repeats=(Repeat(1, 2), Repeat(0, 2)))
    timeline = simulate(plan, trace, Machine(h2d_bytes_per_s=_GB))
    assert timeline.repeats == (RunSpan(0, 230, 330), RunSpan(1, 330, 430))
    assert [op.start_ns for op in timeline.ops] == [0, 130, 430]
    assert (timeline.recompute_ns, timeline.stall_ns, timeline.step_ns) == (200, 30, 530)


def test_load_with_a_whole_ring_of_time_is_awaited_a_step_later(simulate: Simulate) -> None:
    trace = _trace(2, 150)
    timeline = simulate(_plan(trace, Transfer(0, HOST, DEVICE, 1, 3, 0)), trace, Machine(h2d_bytes_per_s=_GB))
    assert timeline.first_step_ns == 200  # nothing to wait for yet
    assert timeline.step_ns == 200  # issued at 100, done at 250, awaited at 300
    assert timeline.transfers == (TransferSpan(0, HOST, DEVICE, 100, 250, 150),)
    assert timeline.moved_bytes["h2d"] == 150


def _alternating() -> tuple[Plan, Trace, Machine]:
    """Both transfers are issued at tick 1 and awaited a step later, when the load still slows the next copy out.

    From 70 both run at half rate: the copy out is done at 110, the load at 170. The second step issues both again at
    150, and waits at tick 1 for the load's last 20 bytes, at half rate, until 190. It ends at 200 and the next load at
    270, as op 0 of the third step does: nothing to wait for, and the state of the first step again.
    """
    trace = Trace(
        (Op("op0", 70), Op("op1", 10)),
        tuple(Tensor(f"t{i}", size, TensorClass.PARAMETER, is_persistent=True) for i, size in enumerate((20, 80))),
    )
    plan = _plan(trace, Transfer(0, DEVICE, HOST, 1, 3, 0), Transfer(1, HOST, DEVICE, 1, 3, 0))
    return plan, trace, Machine(d2h_bytes_per_s=_GB, h2d_bytes_per_s=_GB, duplex_share=0.5)


def test_step_time_is_the_mean_over_the_steps_after_which_the_state_repeats(simulate: Simulate) -> None:
    timeline = simulate(*_alternating())
    assert (timeline.cycle, timeline.first_step_ns, timeline.step_ns) == (2, 80, 100)
    assert timeline.stalls == ()  # of the last step, the shorter one
    assert timeline.is_periodic


def test_without_a_repeated_state_the_last_step_stands_and_is_flagged(simulate: Simulate) -> None:
    timeline = simulate(*_alternating(), SimulationOptions(step_count_max=2))
    assert not timeline.is_periodic
    assert (timeline.first_step_ns, timeline.step_ns) == (80, 120)
    assert timeline.stalls == (Stall(1, 40, 1, HOST, DEVICE),)


def test_slower_than_a_byte_per_second_is_a_byte_per_second(simulate: Simulate) -> None:
    trace = _trace(2, 1, 3)
    plan = _plan(trace, Transfer(0, DEVICE, HOST, 0, 2, 0), Transfer(1, HOST, DEVICE, 0, 2, 0))
    machine = Machine(d2h_bytes_per_s=1, h2d_bytes_per_s=2, duplex_share=0.5)
    assert _stops(simulate(plan, trace, machine)) == {0: 10**9, 1: 2 * 10**9}


def test_faster_op_or_link_can_be_slower_where_links_share(simulate: Simulate) -> None:
    """A long load is issued at tick 2. It slows the copy out that tick 3 awaits, if that is still under way then.

    With 100 ns until op 1 runs, the copy out is done. With 10 ns it has 80 of its 100 bytes left, at half rate.
    """
    trace = Trace(
        tuple(Op(f"op{i}", duration) for i, duration in enumerate((0, 10, 10, 300))),
        tuple(Tensor(f"t{i}", size, TensorClass.PARAMETER, is_persistent=True) for i, size in enumerate((100, 200, 50))),
    )
    machine = Machine(d2h_bytes_per_s=_GB, h2d_bytes_per_s=_GB, nvme_read_bytes_per_s=_GB // 2, duplex_share=0.5)
    pair = Transfer(0, DEVICE, HOST, 0, 3, 0), Transfer(1, HOST, DEVICE, 2, 4, 0)
    plan = _plan(trace, *pair)
    assert simulate(plan, trace.with_durations([100, 10, 10, 300]), machine).step_ns == 420
    assert simulate(plan, trace.with_durations([10, 10, 10, 300]), machine).step_ns == 480
    plan = _plan(trace, *pair, Transfer(2, NVME, DEVICE, 0, 1, 0))
    assert simulate(plan, trace, machine).step_ns == 420
    assert simulate(plan, trace, replace(machine, nvme_read_bytes_per_s=5 * _GB)).step_ns == 480


def test_eviction_that_blocks_is_awaited_where_it_is_issued(simulate: Simulate) -> None:
    trace = _trace(3, 40, 60, 70)
    transfers = (Transfer(0, DEVICE, HOST, 1, 2, 0), Transfer(2, HOST, NVME, 1, 3, 0), Transfer(1, DEVICE, NVME, 1, 3, 1))
    plan = _plan(trace, *transfers)
    machine = Machine(d2h_bytes_per_s=_GB, nvme_write_bytes_per_s=_GB)
    assert simulate(plan, trace, machine).step_ns == 300
    timeline = simulate(plan, trace, machine, SimulationOptions(eviction_blocks=True))
    assert timeline.stalls == (Stall(1, 60, 1, DEVICE, NVME),)
    assert [(t.tensor, t.rank) for t in with_blocking_evictions(plan).transfers] == [(0, 0), (1, 0), (2, 1)]


def _clean() -> tuple[Plan, Trace]:
    """Tensor 0 is read at op 1, has copies below, and is dropped at tick 3 without a transfer."""
    trace = Trace(
        tuple(Op(f"op{i}", 100, reads=(0,) if i == 1 else ()) for i in range(5)),
        (Tensor("t0", 90, TensorClass.PARAMETER, is_persistent=True),),
    )
    residencies = (Residency(0, DEVICE, 0, 3), Residency(0, HOST, 0, 5, 0, 40), Residency(0, NVME, 0, 5))
    return _plan(trace, Transfer(0, NVME, DEVICE, 0, 1, 0), residencies=residencies), trace


def test_clean_copies_are_written_after_the_last_use_where_the_options_say_so(simulate: Simulate) -> None:
    plan, trace = _clean()
    machine = Machine(d2h_bytes_per_s=_GB, nvme_write_bytes_per_s=_GB, nvme_read_bytes_per_s=_GB)
    timeline = simulate(plan, trace, machine, SimulationOptions(writes_clean=True))
    assert timeline.transfers[1:] == (
        TransferSpan(0, DEVICE, HOST, 200, 240, 40),
        TransferSpan(0, DEVICE, NVME, 200, 250, 50, first_byte=40),
    )
    assert simulate(plan, trace, machine).moved_bytes == {"d2h": 0, "h2d": 0, "nvme_write": 0, "nvme_read": 90}


def test_clean_write_of_a_drop_in_the_next_step_is_issued_there() -> None:
    plan, trace = _clean()
    plan = replace(plan, residencies=(Residency(0, DEVICE, 4, 8), *plan.residencies[1:]), transfers=())
    assert with_clean_writes(plan, trace).transfers == (
        Transfer(0, DEVICE, HOST, 2, 3, 0, 0, 40),
        Transfer(0, DEVICE, NVME, 2, 3, 0, 40, 90),
    )


@pytest.mark.parametrize(
    ("residencies", "transfers"),
    [
        ((Residency(0, DEVICE, 0, 3), Residency(0, HOST, 1, 5)), (Transfer(0, DEVICE, HOST, 2, 3, 0),)),  # written
        ((Residency(0, DEVICE, 0, 5), Residency(0, HOST, 0, 5)), ()),  # never dropped
        ((Residency(0, DEVICE, 0, 3), Residency(0, HOST, 0, 3)), ()),  # nothing keeps it
    ],
)
def test_clean_writes_leave_alone_what_is_no_drop_of_a_clean_copy(
    residencies: tuple[Residency, ...], transfers: tuple[Transfer, ...]
) -> None:
    plan, trace = _clean()
    plan = replace(plan, residencies=residencies, transfers=transfers)
    assert with_clean_writes(plan, trace) == plan


def test_clean_writes_take_the_end_of_a_life_for_no_drop() -> None:
    trace = Trace(
        tuple(Op(f"op{i}", 100, reads=(0,) if i == 1 else ()) for i in range(4)), (Tensor("t0", 90, TensorClass.ACTIVATION),)
    )
    plan = _plan(trace, residencies=(Residency(0, DEVICE, 1, 2), Residency(0, HOST, 1, 4)))
    assert with_clean_writes(plan, trace) == plan


@pytest.mark.parametrize("memory_per_op", [fast.memory_per_op, memory_per_op_reference])
@pytest.mark.parametrize(
    ("allocation", "device"),
    [
        (Allocation(), (30 + 7, 30, 50 + 5, 20)),
        (Allocation(AllocationKind.ADDRESSES, addresses=(0, 64, -1, 16)), (30 + 7, 30, 84 + 5, 84)),
    ],
)
def test_memory_counts_bytes_as_the_allocation_says(
    memory_per_op: Callable[[Plan, Trace], dict[Tier, tuple[int, ...]]], allocation: Allocation, device: tuple[int, ...]
) -> None:
    trace = Trace(
        tuple(Op(f"op{i}", 1, transient_bytes=extra) for i, extra in enumerate((7, 0, 5, 0))),
        (Tensor("a", 30, TensorClass.PARAMETER), Tensor("b", 20, TensorClass.PARAMETER, is_persistent=True)),
    )
    residencies = (Residency(0, DEVICE, 0, 3), Residency(1, DEVICE, 2, 4), Residency(1, HOST, 3, 6, 4, 14))
    plan = _plan(trace, residencies=residencies, allocation=allocation)
    if allocation.addresses:
        plan = replace(plan, residencies=(*residencies, Residency(0, DEVICE, 0, 1, 0, 1)))
    assert memory_per_op(plan, trace) == {DEVICE: device, HOST: (10, 10, 0, 10), NVME: (0, 0, 0, 0)}


@pytest.mark.parametrize("memory_per_op", [fast.memory_per_op, memory_per_op_reference])
def test_memory_counts_the_most_transient_bytes_of_an_op_and_its_repeats(
    memory_per_op: Callable[[Plan, Trace], dict[Tier, tuple[int, ...]]],
) -> None:
    trace = Trace(tuple(Op(f"op{i}", 1, transient_bytes=extra) for i, extra in enumerate((9, 7, 2, 8))), ())
    plan = _plan(trace, repeats=(Repeat(0, 2), Repeat(1, 2), Repeat(1, 3)))
    assert memory_per_op(plan, trace)[DEVICE] == (9, 7, 9, 8)


def test_communication_runs_beside_compute_and_a_wait_for_it_is_a_stall(simulate: Simulate) -> None:
    """The gather ends 150 ns after the step began, the reduction waits for its queue, and the copy for the reduction."""
    tensors = (Tensor("reduced", 60, TensorClass.GRADIENT, is_persistent=True),)
    ops = (
        Op("gather", 150, queue=Queue.COMMUNICATION),
        Op("reduce", 70, (), (0,), queue=Queue.COMMUNICATION),
        Op("first", 100),
        Op("second", 10, awaits=0),
        Op("third", 10),
    )
    trace = Trace(ops, tensors)
    plan = _plan(trace, Transfer(0, DEVICE, HOST, 5, 5, 0))
    timeline = simulate(plan, trace, Machine(d2h_bytes_per_s=_GB))
    assert [(op.start_ns, op.stop_ns) for op in timeline.ops] == [(0, 150), (150, 220), (0, 100), (150, 160), (160, 170)]
    assert timeline.stalls == (
        Stall(3, 50, -1, DEVICE, DEVICE, communication=0),
        Stall(5, 50, -1, DEVICE, DEVICE, communication=1),
        Stall(5, 60, 0, DEVICE, HOST),
    )
    assert (timeline.step_ns, timeline.compute_ns, timeline.stall_ns) == (280, 120, 160)
    assert [stall.link for stall in timeline.stalls] == ["peers", "peers", "d2h"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"transfers": (Transfer(0, DEVICE, HOST, 2, 1, 0),)}, "issue_at <= ready_by"),
        ({"transfers": (Transfer(0, DEVICE, HOST, 0, 4, 0),)}, "ready_by <= issue_at"),
        ({"transfers": (Transfer(0, DEVICE, DEVICE, 0, 1, 0),)}, "two different tiers"),
        ({"transfers": (Transfer(1, DEVICE, HOST, 0, 1, 0),)}, "a tensor of the trace"),
        ({"transfers": (Transfer(0, DEVICE, HOST, 0, 1, 0, 5, 31),)}, "bytes of a tensor"),
        ({"residencies": (Residency(0, DEVICE, 3, 4),)}, "0 <= start < n"),
        ({"host_updates": (HostUpdate(3, 3, 3, 5),)}, "0 <= op < n"),
        ({"repeats": (Repeat(1, 1),)}, "op < at"),
        ({"allocation": Allocation(AllocationKind.ADDRESSES, addresses=(1,))}, "one address per residency"),
        ({"op_count": 6}, "expected 3 ops"),
    ],
)
def test_simulate_refuses_what_is_out_of_range(simulate: Simulate, change: dict[str, Any], told: str) -> None:
    trace = _trace(3, 30)
    with pytest.raises(InvalidPlanError, match=told):
        simulate(replace(_plan(trace), **change), trace, Machine(d2h_bytes_per_s=_GB))


def test_simulate_refuses_a_machine_on_which_the_step_takes_centuries() -> None:
    trace = _trace(2, 2**62)
    plan = _plan(trace, Transfer(0, DEVICE, HOST, 0, 1, 0))
    with pytest.raises(ConfigError, match="machine 'snail' is too slow"):
        fast.simulate(plan, trace, Machine(name="snail", d2h_bytes_per_s=1000))


def test_native_simulator_refuses_arrays_that_say_nothing() -> None:
    def run(**change: Any) -> None:
        line, rows = np.array([5, 5]), {name: np.empty((0, width), np.int64) for name, width in _WIDTHS.items()}
        values: dict[str, Any] = {"op_ns": line, **rows, "links": np.array([[_GB, 0]] * 4), **_SCALARS, **change}
        _native.simulate(**values)

    run()
    for change, told in (
        ({"op_ns": np.array([5, -1])}, "duration >= 0, which op 1 breaks"),
        ({"transfers": np.array([[0, 1, 0, 9, 0, 5]])}, "which transfer 0 breaks"),
        ({"transfers": np.array([[0, 3, 0, 1, 0, 5]])}, "a tier 0 to 2"),
        ({"transfers": np.array([[0, 1, 0, 1, 0, 0]])}, "a size > 0"),
        ({"transfers": np.array([[0, 1, 0, 1, 0]])}, "6 columns"),
        ({"transfers": np.array([[0, 1, 0, 1, 2**40, 5]])}, "32 bits"),
        ({"transfers": np.array([[0, 1, 0, 1, 0, 5]]), "links": np.zeros((4, 2), np.int64)}, "a bandwidth > 0"),
        ({"updates": np.array([[0, 1, -1]])}, "which update 0 breaks"),
        ({"repeats": np.array([[0, 2]])}, "which repeat 0 breaks"),
        ({"queues": np.array([[0, -1]])}, "a queue for each op or for none"),
        ({"queues": np.array([[0, -1], [0, 0]])}, "an op of communication before it, which op 1 breaks"),
        ({"step_count_max": 0}, "step_count_max"),
        ({"memory": np.array([-1, 0, 1, 0])}, "rates and passes of the host's memory >= 0"),
    ):
        with pytest.raises(ValueError, match=told):
            run(**change)


_WIDTHS = {"transfers": 6, "updates": 3, "repeats": 2}
_SCALARS = {
    "duplex_share_millionths": 10**6,
    "nvme_shares_host_link": False,
    "memory": np.array([0, 0, 1, 0]),
    "has_exclusive_link": False,
    "step_count_max": 16,
    "with_spans": True,
}


def test_timeline_of_everything_survives_a_file(tmp_path: Any) -> None:
    trace = _trace(3, 30)
    plan = _plan(
        trace,
        Transfer(0, DEVICE, HOST, 0, 1, 0, 2, 20),
        residencies=(Residency(0, DEVICE, 0, 3),),
        repeats=(Repeat(0, 1),),
        host_updates=(HostUpdate(1, 1, 2, 500),),
    )
    timeline = fast.simulate(plan, trace, Machine(d2h_bytes_per_s=_GB))
    assert timeline.stalls and timeline.repeats and timeline.host_updates
    save_timeline(timeline, tmp_path / "timeline.json")
    assert load_timeline(tmp_path / "timeline.json") == timeline
