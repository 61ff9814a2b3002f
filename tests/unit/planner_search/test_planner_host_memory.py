"""The host's memory as copies and updates share it: in both simulators, in bounds and in plans, by hand-made arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.oracles.simulate import simulate_reference
from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR, HostUpdate, Plan, Transfer
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.timeline import RunSpan, Timeline
from tieroff.core.trace import Op, Trace
from tieroff.planner.bounds.bounds import lower_bound_ns, relaxed_bound_ns
from tieroff.planner.make_plan import make_plan
from tieroff.planner.problem.problem import make_problem
from tieroff.planner.simulate import simulator as fast

DEVICE, HOST, NVME = Tier
_GB = 10**9
_LINKS: dict[str, Any] = {f"{link}_bytes_per_s": _GB for link in ("d2h", "h2d", "nvme_write", "nvme_read")}
# While it has the memory to itself, an update moves 7 GB/s there: 3.5 bytes per byte of state.
_MACHINE = Machine(**_LINKS, cpu_update_bytes_per_s=2 * _GB, host_memory_bytes_per_s=4 * _GB)

Simulate = Callable[..., Timeline]


@pytest.fixture(params=[fast.simulate, simulate_reference], ids=["native", "reference"])
def simulate(request: pytest.FixtureRequest) -> Simulate:
    """Returns one of the two simulators."""
    return request.param


def _trace(*sizes: int) -> Trace:
    tensors = tuple(Tensor(f"t{i}", size, TensorClass.PARAMETER, is_persistent=True) for i, size in enumerate(sizes))
    return Trace(tuple(Op(f"op{i}", 0) for i in range(2)), tensors)


def _plan(trace: Trace, *transfers: Transfer, update_ns: int = 0) -> Plan:
    updates = (HostUpdate(0, 0, 2, update_ns),) if update_ns else ()
    return Plan("hand", trace.digest, 2, {}, {}, (), transfers, host_updates=updates)


def test_a_copy_and_an_update_slow_down_to_what_the_memory_has(simulate: Simulate) -> None:
    trace = _trace(100)
    plan = _plan(trace, Transfer(0, DEVICE, HOST, 0, 2, 0), update_ns=140)
    free = simulate(plan, trace, replace(_MACHINE, host_memory_bytes_per_s=0))
    assert (free.step_ns, free.transfers[0].stop_ns, free.host_updates[0].stop_ns) == (140, 100, 140)
    # Together they want 1 + 7 of 4 GB/s: half of all that for 200 ns, in which the copy ends and the update does 100 ns of its
    # work. The 40 ns that are left take 70, since alone it wants 7 of 4.
    timeline = simulate(plan, trace, _MACHINE)
    assert (timeline.transfers[0].stop_ns, timeline.host_updates) == (200, (RunSpan(0, 0, 270),))
    assert timeline.step_ns == 270


def test_copies_both_ways_share_the_memory_with_each_other(simulate: Simulate) -> None:
    trace = _trace(100, 100)
    plan = _plan(trace, Transfer(0, DEVICE, HOST, 0, 2, 0), Transfer(1, HOST, DEVICE, 0, 2, 0))
    slow = replace(_MACHINE, host_memory_bytes_per_s=_GB)
    assert simulate(plan, trace, slow).step_ns == 200
    assert simulate(plan, trace, replace(slow, host_memory_bytes_per_s=2 * _GB)).step_ns == 100
    # On the CPU backend both ends of a copy lie there.
    assert simulate(plan, trace, replace(slow, device_type="cpu")).step_ns == 400


@pytest.mark.parametrize(
    ("source", "machine", "expected_ns"),
    [
        (HOST, Machine(), 200),
        (DEVICE, Machine(), 100),
        (DEVICE, Machine(nvme_shares_host_link=True), 400),
        (DEVICE, Machine(device_type="cpu"), 200),
    ],
    ids=["from the host", "by a path of its own", "through the host", "of the CPU backend"],
)
def test_a_write_to_a_drive_passes_the_memory_where_it_comes_by(
    simulate: Simulate, source: Tier, machine: Machine, expected_ns: int
) -> None:
    trace = _trace(100)
    machine = replace(machine, **_LINKS, host_memory_bytes_per_s=_GB // 2)
    assert simulate(_plan(trace, Transfer(0, source, NVME, 0, 2, 0)), trace, machine).step_ns == expected_ns


def test_a_latency_takes_nothing_of_the_memory(simulate: Simulate) -> None:
    trace = _trace(100)
    plan = _plan(trace, Transfer(0, DEVICE, HOST, 0, 2, 0), update_ns=100)
    machine = replace(_MACHINE, host_memory_bytes_per_s=7 * _GB, d2h_latency_s=100e-9)
    timeline = simulate(plan, trace, machine)
    assert (timeline.host_updates[0].stop_ns, timeline.transfers[0].stop_ns) == (100, 200)


def test_an_update_of_no_time_ends_at_once_where_the_memory_is_full(simulate: Simulate) -> None:
    trace = _trace(100)
    plan = replace(_plan(trace, Transfer(0, DEVICE, HOST, 0, 2, 0)), host_updates=(HostUpdate(0, 0, 1, 0),))
    timeline = simulate(plan, trace, replace(_MACHINE, host_memory_bytes_per_s=_GB // 2))
    assert (timeline.host_updates, timeline.transfers[0].stop_ns) == ((RunSpan(0, 0, 0),), 200)


def test_the_rate_beside_copies_is_a_share_of_the_memory() -> None:
    assert _MACHINE.update_bytes_per_s == int(2 * _GB * 4 / 9)  # 7 and 1 each way want 9 of 4 GB/s
    assert replace(_MACHINE, duplex_share=0.5).update_bytes_per_s == _GB
    assert replace(_MACHINE, host_memory_bytes_per_s=9 * _GB).update_bytes_per_s == 2 * _GB
    assert replace(_MACHINE, host_memory_bytes_per_s=0).update_bytes_per_s == 2 * _GB


def test_a_bound_counts_what_goes_out_and_what_comes_back_in_the_same_memory() -> None:
    tensors = (Tensor("a", 100, TensorClass.ACTIVATION), Tensor("b", 100, TensorClass.ACTIVATION))
    ops = (Op("makes a", 10, (), (0,)), Op("makes and uses b", 10, (), (1,)), Op("uses a", 10, (0,), ()))
    trace = Trace(ops, tensors)
    budget = {DEVICE: 100, HOST: 1000, NVME: 0}
    machine = replace(_MACHINE, host_memory_bytes_per_s=_GB // 10)
    bounds, steps = [], []
    for memory in (0, machine.host_memory_bytes_per_s):
        problem = make_problem(trace, replace(machine, host_memory_bytes_per_s=memory), budget, IDEAL_EXECUTOR)
        bounds.append((lower_bound_ns(problem), relaxed_bound_ns(problem)))
        plan = make_plan(trace, problem.machine, budget, capabilities=IDEAL_EXECUTOR)
        steps.append(fast.simulate(plan, trace, problem.machine).step_ns)
    assert steps == [30 + 100 + 100, 30 + 1000 + 1000]
    assert bounds[1][0] > 1990  # of 200 bytes at a tenth of a byte per ns
    assert all(max(bound) <= step for bound, step in zip(bounds, steps, strict=True))
    assert bounds[1][1] > bounds[0][1] + 1700
