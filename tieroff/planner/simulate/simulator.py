"""The simulator: what a plan takes on a machine, in integer nanoseconds.

The native module does the work. `tests/support/oracles/simulate.py` does the same in plain Python: it defines every time,
its notes explain them, and tests hold the two to the last digit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tieroff.core.buckets import bytes_below
from tieroff.core.machine import LINK_NAMES, Machine
from tieroff.core.plan import AllocationKind, HostUpdate, Plan, Repeat, Transfer
from tieroff.core.tensor import Tier
from tieroff.core.timeline import OpSpan, RunSpan, Stall, Timeline, TransferSpan
from tieroff.core.trace import Queue, Trace
from tieroff.errors import ConfigError
from tieroff.planner.native import _native
from tieroff.planner.simulate.options import (
    SimulationOptions,
    memory_limits,
    move_compute_ns,
    prepare,
    share_millionths,
    size_of,
)
from tieroff.units import NS_PER_S

Rows = NDArray[np.int64]

_TIERS = {tier: index for index, tier in enumerate(Tier)}
_LINKS = ("d2h", "h2d", "nvme_write", "nvme_read")


class Totals(NamedTuple):
    """What a plan takes, in sums: the step, the bytes that each link moves in it, and in how many transfers."""

    step_ns: int
    moved_bytes: dict[str, int]
    transfer_count: int


def simulate(plan: Plan, trace: Trace, machine: Machine, options: SimulationOptions | None = None) -> Timeline:
    """Returns the predicted timeline of one step of a valid plan in the steady state, counted from the step's start.

    Steps are simulated until the state at a step's end repeats. `step_ns` is then the mean over the steps of that cycle,
    rounded up, and everything else is of its last step; without a repetition within `options.step_count_max` steps all
    is of the last one, and `is_periodic` is False. See [Note: time in the simulator] and [Note: links in the simulator].

    Raises:
        TraceMismatchError: the plan is for another trace.
        ConfigError: the plan uses a link that the machine does not have, or takes more than centuries on it.
        InvalidPlanError: an index, a tick or a range of bytes is out of range.
    """
    options = options or SimulationOptions()
    plan = prepare(plan, trace, machine, options)
    result = _run(plan, trace, machine, options)
    begun_ns = _moves_ns(_line(t.issue_at for t in plan.transfers), plan.repeats, trace, machine).tolist()
    transfers = result.transfers
    transfers = transfers[np.lexsort((transfers[:, 2], transfers[:, 1]))]
    return Timeline(
        ops=tuple(OpSpan(start + begun_ns[op], stop) for op, start, stop in result.ops.tolist()),
        transfers=tuple(_transfer_span(plan.transfers[index], trace, start, stop) for index, start, stop in transfers.tolist()),
        stalls=tuple(_stall(plan, trace, *row) for row in result.stalls.tolist()),
        memory=_with_slices(memory_per_op(plan, trace), trace),
        step_ns=result.step_ns,
        repeats=tuple(RunSpan(plan.repeats[i].op, start, stop) for i, start, stop in result.repeats.tolist()),
        host_updates=tuple(RunSpan(plan.host_updates[i].op, start, stop) for i, start, stop in result.updates.tolist()),
        recompute_ns=result.recompute_ns + trace.recompute_ns,
        engine_ns=sum(begun_ns),
        first_step_ns=result.first_step_ns,
        cycle=result.cycle,
        communication=trace.communication,
    )


def simulate_totals(plan: Plan, trace: Trace, machine: Machine) -> Totals:
    """Returns the totals of the timeline that `simulate` makes, without making it.

    A plan that is only weighed against others needs no more, and spans of all ops and transfers take most of the time.
    """
    options = SimulationOptions()
    plan = prepare(plan, trace, machine, options)
    step_ns = _run(plan, trace, machine, options, with_spans=False).step_ns
    moved = dict.fromkeys(_LINKS, 0)
    for transfer in plan.transfers:
        moved[LINK_NAMES[transfer.source, transfer.target]] += size_of(transfer, trace)
    return Totals(step_ns, moved, len(plan.transfers))


def simulate_rows(transfers: Rows, repeats: Sequence[Repeat], trace: Trace, machine: Machine) -> Totals:
    """Returns what `simulate_totals` does, for a plan of one step that is not made yet and updates nothing on the host.

    Args:
        transfers: a row each of source, target (0 device, 1 host, 2 nvme), issue_at, ready_by, rank and bytes.
        repeats: of the plan.
        trace, machine: as for the plan.
    """
    step_ns = _run_rows(transfers, (), repeats, trace, machine, SimulationOptions(), with_spans=False).step_ns
    moved = dict.fromkeys(_LINKS, 0)
    for (source, target), link in LINK_NAMES.items():
        if link in moved:
            is_mine = (transfers[:, 0] == _TIERS[source]) & (transfers[:, 1] == _TIERS[target])
            moved[link] += int(transfers[is_mine, 5].sum())
    return Totals(step_ns, moved, len(transfers))


def memory_per_op(plan: Plan, trace: Trace) -> dict[Tier, tuple[int, ...]]:
    """Returns the bytes that count at each op in each tier."""
    residencies = [(_TIERS[r.tier], r.start, r.stop, size_of(r, trace)) for r in plan.residencies]
    memory = _native.memory_per_op(
        _line(op.transient_bytes for op in trace.ops),
        _rows(residencies, 4),
        _rows([(r.op, r.at) for r in plan.repeats], 2),
        _line(plan.allocation.addresses if plan.allocation.kind is AllocationKind.ADDRESSES else ()),
    )
    return {tier: tuple(line.tolist()) for tier, line in zip(Tier, memory, strict=True)}


def _with_slices(memory: dict[Tier, tuple[int, ...]], trace: Trace) -> dict[Tier, tuple[int, ...]]:
    """Returns the bytes of each tier with those that lie there all the time and are no tensors of the trace."""
    for tier, own in bytes_below(trace.meta).items():
        memory[tier] = tuple(size_bytes + own for size_bytes in memory[tier])
    return memory


def _run(
    plan: Plan, trace: Trace, machine: Machine, options: SimulationOptions, *, with_spans: bool = True
) -> _native.SimulationResult:
    rows = [(_TIERS[t.source], _TIERS[t.target], t.issue_at, t.ready_by, t.rank, size_of(t, trace)) for t in plan.transfers]
    return _run_rows(_rows(rows, 6), plan.host_updates, plan.repeats, trace, machine, options, with_spans=with_spans)


def _run_rows(
    transfers: Rows,
    updates: Sequence[HostUpdate],
    repeats: Sequence[Repeat],
    trace: Trace,
    machine: Machine,
    options: SimulationOptions,
    *,
    with_spans: bool,
) -> _native.SimulationResult:
    on_cpu = {update.op for update in updates}
    links = [
        (int(getattr(machine, f"{name}_bytes_per_s")), round(getattr(machine, f"{name}_latency_s") * NS_PER_S))
        for name in _LINKS
    ]
    queues = {}
    if trace.communication:
        queues["queues"] = _rows([(op.queue is Queue.COMMUNICATION, op.awaits) for op in trace.ops], 2)
    op_ns = _line(0 if index in on_cpu else op.duration_ns for index, op in enumerate(trace.ops))
    try:
        return _native.simulate(
            op_ns=op_ns + _moves_ns(transfers[:, 2], repeats, trace, machine),
            transfers=transfers,
            updates=_rows([(u.issue_at, u.ready_by, u.duration_ns) for u in updates], 3),
            repeats=_rows([(r.op, r.at) for r in repeats], 2),
            links=_rows(links, 2),
            duplex_share_millionths=share_millionths(machine),
            nvme_shares_host_link=machine.nvme_shares_host_link,
            memory=_line(memory_limits(machine)),
            has_exclusive_link=options.has_exclusive_link,
            step_count_max=options.step_count_max,
            with_spans=with_spans,
            **queues,
        )
    except OverflowError as error:
        raise ConfigError(f"machine {machine.name!r} is too slow for trace {trace.name!r}: {error}") from error


def _moves_ns(issue_at: Rows, repeats: Sequence[Repeat], trace: Trace, machine: Machine) -> Rows:
    """Returns per op the compute that the transfers issued before it take; see [Note: time in the simulator]."""
    count = len(trace.ops)
    ops = issue_at % count
    if trace.communication:
        if len(trace.communication) == count:
            return np.zeros(count, np.int64)
        compute = np.setdiff1d(np.arange(count), trace.communication)
        ops = compute[np.searchsorted(compute, ops) % len(compute)]
    return np.bincount(ops, minlength=count) * move_compute_ns(machine, repeats)


def _line(values: Iterable[int]) -> Rows:
    return np.fromiter(values, np.int64)


def _rows(rows: Sequence[tuple[int, ...]], columns: int) -> Rows:
    return np.array(rows, np.int64).reshape(-1, columns)


def _transfer_span(transfer: Transfer, trace: Trace, start_ns: int, stop_ns: int) -> TransferSpan:
    size = size_of(transfer, trace)
    return TransferSpan(transfer.tensor, transfer.source, transfer.target, start_ns, stop_ns, size, transfer.first_byte)


def _stall(plan: Plan, trace: Trace, op: int, duration_ns: int, cause: int) -> Stall:
    if cause < 0:
        awaited = trace.ops[op].awaits if op < plan.op_count else trace.communication[-1]
        return Stall(op, duration_ns, -1, Tier.DEVICE, Tier.DEVICE, communication=awaited)
    if cause < len(plan.transfers):
        transfer = plan.transfers[cause]
        return Stall(op, duration_ns, transfer.tensor, transfer.source, transfer.target, transfer.first_byte)
    update = plan.host_updates[cause - len(plan.transfers)]
    return Stall(op, duration_ns, -1, Tier.HOST, Tier.HOST, update=update.op)
