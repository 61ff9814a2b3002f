"""The simulator on cases that can be worked out by hand."""

from __future__ import annotations

import pytest

from tieroff.core.machine import Machine
from tieroff.core.plan import Plan, Residency, Transfer
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.timeline import Stall, TransferSpan
from tieroff.core.trace import Op, Trace
from tieroff.errors import ConfigError, TraceMismatchError
from tieroff.planner.simulate import simulate

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME
_GB = 10**9


def _trace(op_count: int, *sizes: int) -> Trace:
    tensors = tuple(Tensor(f"t{i}", size, TensorClass.PARAMETER, is_persistent=True) for i, size in enumerate(sizes))
    return Trace(tuple(Op(f"op{i}", 100) for i in range(op_count)), tensors)


def _plan(trace: Trace, *transfers: Transfer, residencies: tuple[Residency, ...] = ()) -> Plan:
    return Plan("hand", trace.digest, len(trace.ops), {}, {}, residencies, transfers)


def test_link_serves_one_transfer_at_a_time_in_order_of_rank() -> None:
    trace = _trace(3, 70, 80)
    plan = _plan(trace, Transfer(0, DEVICE, HOST, 0, 1, 0), Transfer(1, DEVICE, HOST, 0, 2, 1))
    timeline = simulate(plan, trace, Machine(d2h_bytes_per_s=_GB, d2h_latency_s=5e-9))
    assert timeline.transfers == (
        TransferSpan(0, DEVICE, HOST, 0, 75, 70),
        TransferSpan(1, DEVICE, HOST, 75, 160, 80),
    )
    assert timeline.step_ns == 300
    assert timeline.moved_bytes == {"d2h": 150, "h2d": 0, "nvme_write": 0, "nvme_read": 0}


def test_op_waits_for_its_load_and_the_stall_names_it() -> None:
    trace = _trace(3, 150, 60)
    plan = _plan(trace, Transfer(0, HOST, DEVICE, 0, 1, 0), Transfer(1, HOST, DEVICE, 0, 2, 1))
    timeline = simulate(plan, trace, Machine(h2d_bytes_per_s=_GB))
    assert timeline.stalls == (Stall(1, 50, 0, HOST, DEVICE),)
    assert [op.start_ns for op in timeline.ops] == [0, 150, 250]
    assert timeline.step_ns == 350
    assert timeline.stall_ns == 50


def test_end_of_the_step_waits_for_copies_out() -> None:
    trace = _trace(2, 30)
    timeline = simulate(_plan(trace, Transfer(0, DEVICE, HOST, 2, 2, 0)), trace, Machine(d2h_bytes_per_s=_GB))
    assert timeline.stalls == (Stall(2, 30, 0, DEVICE, HOST),)
    assert timeline.step_ns == 230


def test_duplex_share_slows_both_directions_while_both_are_busy() -> None:
    trace = _trace(4, 100, 50)
    plan = _plan(trace, Transfer(0, DEVICE, HOST, 0, 4, 0), Transfer(1, HOST, DEVICE, 0, 4, 0))
    machine = Machine(d2h_bytes_per_s=_GB, h2d_bytes_per_s=_GB, duplex_share=0.5)
    spans = {span.tensor: span.stop_ns for span in simulate(plan, trace, machine).transfers}
    assert spans == {1: 100, 0: 150}  # both at half rate for 100 ns, then 50 bytes left at the full rate


def test_nvme_fills_the_host_link_where_it_shares_it() -> None:
    trace = _trace(4, 100, 50)
    transfers = (Transfer(0, DEVICE, HOST, 0, 4, 0), Transfer(1, DEVICE, NVME, 0, 4, 0))
    rates = {"d2h_bytes_per_s": _GB, "nvme_write_bytes_per_s": _GB // 4}
    apart = simulate(_plan(trace, *transfers), trace, Machine(**rates))
    shared = simulate(_plan(trace, *transfers), trace, Machine(**rates, nvme_shares_host_link=True))
    assert {s.tensor: s.stop_ns for s in apart.transfers} == {0: 100, 1: 200}
    assert {s.tensor: s.stop_ns for s in shared.transfers} == {0: 134, 1: 200}


def test_steady_state_counts_a_transfer_that_crosses_the_end_of_the_step() -> None:
    trace = _trace(2, 250)
    plan = _plan(trace, Transfer(0, DEVICE, HOST, 1, 3, 0), residencies=(Residency(0, DEVICE, 1, 3),))
    timeline = simulate(plan, trace, Machine(d2h_bytes_per_s=_GB))
    assert timeline.step_ns == 250  # issued at 100, awaited before op 1 of the next step
    assert timeline.stalls == (Stall(1, 50, 0, DEVICE, HOST),)


def test_simulate_refuses_another_trace_and_a_missing_link() -> None:
    trace = _trace(2, 250)
    plan = _plan(trace, Transfer(0, DEVICE, HOST, 1, 1, 0))
    with pytest.raises(TraceMismatchError):
        simulate(plan, _trace(3, 250), Machine(d2h_bytes_per_s=_GB))
    with pytest.raises(ConfigError, match="d2h_bytes_per_s"):
        simulate(plan, trace, Machine())
