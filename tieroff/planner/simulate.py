"""The reference simulator: what a plan takes on a machine, in integer nanoseconds.

[Note: links in the simulator]
A link serves its transfers one at a time, in order of rank, each after its latency. Rates are constant between events:
* a direction of the host link has its full bandwidth while the other direction is idle, and `duplex_share` of it while
  both are busy;
* with `nvme_shares_host_link`, a write to (read from) the NVMe also fills the host link's direction away from (to) the
  device: it runs at its own bandwidth but at most half of that direction's while a host transfer runs beside it, and
  the host transfer gets the rest.
A latency occupies its own link only.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, replace

from tieroff.core.machine import LINK_NAMES, Machine
from tieroff.core.plan import Plan, Transfer
from tieroff.core.schedule import make_schedule
from tieroff.core.tensor import Tier
from tieroff.core.timeline import OpSpan, Stall, Timeline, TransferSpan
from tieroff.core.trace import Trace
from tieroff.errors import InvalidPlanError, TraceMismatchError
from tieroff.units import NS_PER_S

_BESIDE = {"d2h": "nvme_write", "nvme_write": "d2h", "h2d": "nvme_read", "nvme_read": "h2d"}
_STEPS_WHEN_WRAPPING = 4


@dataclass(slots=True)
class _Job:
    transfer: Transfer
    size_bytes: int
    start_ns: int = -1
    stop_ns: int = -1


@dataclass(slots=True)
class _Channel:
    """One link at work: the job in service, what is left of it, and the queue behind it."""

    name: str
    bytes_per_s: int
    latency_ns: int
    queue: deque[_Job]
    job: _Job | None = None
    latency_left_ns: int = 0
    work_left: int = 0  # bytes times ns per second, so that rates in bytes per second divide it in integers


class _Channels:
    """All links, advanced together from event to event; see [Note: links in the simulator]."""

    def __init__(self, machine: Machine, plan: Plan) -> None:
        self._now_ns = 0
        self._channels: dict[str, _Channel] = {}
        self._machine = machine
        for source, target in sorted({(t.source, t.target) for t in plan.transfers}):
            link = machine.link(source, target)
            self._channels[link.name] = _Channel(link.name, link.bytes_per_s, link.latency_ns, deque())
        self._share_millionths = round(machine.duplex_share * 1_000_000)
        self._is_plain = not machine.nvme_shares_host_link and self._share_millionths >= 1_000_000

    def issue(self, job: _Job, now_ns: int) -> None:
        """Puts a job behind the others of its link at a time that is not before the last event."""
        self.advance(now_ns)
        channel = self._channels[LINK_NAMES[job.transfer.source, job.transfer.target]]
        channel.queue.append(job)
        self._serve(channel)

    def finish(self, job: _Job) -> int:
        """Advances until the job is done and returns when that was."""
        while job.stop_ns < 0:
            self._step(None)
        return job.stop_ns

    def advance(self, until_ns: int) -> None:
        """Advances to a time; every job that ends by then is done."""
        while self._now_ns < until_ns:
            self._step(until_ns)

    def _serve(self, channel: _Channel) -> None:
        if channel.job is None and channel.queue:
            channel.job = channel.queue.popleft()
            channel.job.start_ns = self._now_ns
            channel.latency_left_ns = channel.latency_ns
            channel.work_left = channel.job.size_bytes * NS_PER_S

    def _rate(self, channel: _Channel) -> int:
        if self._is_plain:
            return channel.bytes_per_s
        rate = channel.bytes_per_s
        if self._machine.nvme_shares_host_link:
            beside = self._channels.get(_BESIDE[channel.name])
            if channel.name in ("d2h", "h2d"):
                if beside is not None and beside.job is not None:
                    rate -= min(beside.bytes_per_s, rate // 2)
            else:
                host_name = _BESIDE[channel.name]
                host_bandwidth: int = getattr(self._machine, f"{host_name}_bytes_per_s") or rate
                is_beside = beside is not None and beside.job is not None
                rate = min(rate, host_bandwidth - host_bandwidth // 2 if is_beside else host_bandwidth)
        other = self._channels.get({"d2h": "h2d", "h2d": "d2h"}.get(channel.name, ""))
        if other is not None and other.job is not None:
            rate = rate * self._share_millionths // 1_000_000
        return max(rate, 1)

    def _step(self, until_ns: int | None) -> None:
        """Advances to the next event, or to `until_ns` if that comes first."""
        busy = [(c, self._rate(c)) for c in self._channels.values() if c.job is not None]
        spans = [c.latency_left_ns if c.latency_left_ns else -(-c.work_left // rate) for c, rate in busy]
        if until_ns is not None:
            spans.append(until_ns - self._now_ns)
        span = min(spans)
        self._now_ns += span
        for channel, rate in busy:
            if channel.latency_left_ns:
                channel.latency_left_ns -= span
                if channel.latency_left_ns or channel.work_left:
                    continue
            channel.work_left = max(0, channel.work_left - rate * span)
            if channel.work_left == 0 and channel.job is not None:
                channel.job.stop_ns = self._now_ns
                channel.job = None
        for channel, _ in busy:
            self._serve(channel)


class _Run:
    """One simulated run of a schedule, step after step."""

    def __init__(self, plan: Plan, trace: Trace, machine: Machine) -> None:
        self._trace = trace
        self._ticks = make_schedule(plan).ticks
        self._channels = _Channels(machine, plan)
        self._pending: dict[Transfer, deque[_Job]] = {}
        self.now_ns = 0

    def step(self, *, is_first: bool) -> tuple[list[OpSpan], list[Stall], list[_Job]]:
        """Runs one step; what the first step would await from the one before is taken as done."""
        ops: list[OpSpan] = []
        stalls: list[Stall] = []
        jobs: list[_Job] = []
        for index, tick in enumerate(self._ticks):
            self._issue(tick.issue_first, jobs)
            self._await(index, tick.await_outs, stalls, is_first)
            self._issue(tick.issues, jobs)
            self._await(index, tick.await_ins, stalls, is_first)
            if index < len(self._trace.ops):
                start = self.now_ns
                self.now_ns += self._trace.ops[index].duration_ns
                ops.append(OpSpan(start, self.now_ns))
        return ops, stalls, jobs

    def _issue(self, transfers: tuple[Transfer, ...], jobs: list[_Job]) -> None:
        for transfer in transfers:
            job = _Job(transfer, self._trace.tensors[transfer.tensor].size_bytes)
            self._channels.issue(job, self.now_ns)
            self._pending.setdefault(transfer, deque()).append(job)
            jobs.append(job)

    def _await(self, index: int, transfers: tuple[Transfer, ...], stalls: list[Stall], is_first: bool) -> None:
        """Waits for transfers; the whole wait is charged to the one that ends last."""
        last: _Job | None = None
        for transfer in transfers:
            queue = self._pending.get(transfer)
            if not queue:
                if not is_first:
                    raise InvalidPlanError(f"a transfer is awaited and was never issued: {transfer}", rule="range")
                continue
            job = queue.popleft()
            stop = self._channels.finish(job)
            if last is None or stop > last.stop_ns:
                last = job
        if last is not None and last.stop_ns > self.now_ns:
            moved = last.transfer
            stalls.append(Stall(index, last.stop_ns - self.now_ns, moved.tensor, moved.source, moved.target))
            self.now_ns = last.stop_ns


def memory_per_op(plan: Plan, trace: Trace) -> dict[Tier, tuple[int, ...]]:
    """Returns the bytes that count at each op in each tier."""
    op_count = plan.op_count
    change = {tier: [0] * (2 * op_count + 1) for tier in Tier}
    for residency in plan.residencies:
        size = trace.tensors[residency.tensor].size_bytes
        change[residency.tier][residency.start] += size
        change[residency.tier][residency.stop] -= size
    memory: dict[Tier, tuple[int, ...]] = {}
    for tier, changes in change.items():
        line = list(itertools.accumulate(changes))
        extra = [op.transient_bytes if tier is Tier.DEVICE else 0 for op in trace.ops]
        memory[tier] = tuple(line[i] + line[i + op_count] + extra[i] for i in range(op_count))
    return memory


def simulate(plan: Plan, trace: Trace, machine: Machine) -> Timeline:
    """Returns the predicted timeline of one step of a valid plan in the steady state.

    Without transfers that cross the step's end, one step is the steady state; with them, the last of a few steps is
    returned, its times counted from its own start.

    Raises:
        TraceMismatchError: the plan is for another trace.
        ConfigError: the plan uses a link that the machine does not have.
        InvalidPlanError: a transfer is awaited that was never issued.
    """
    if plan.trace_digest != trace.digest:
        raise TraceMismatchError(
            f"expected a plan for trace {trace.digest}, got one for {plan.trace_digest}: plan this trace again"
        )
    run = _Run(plan, trace, machine)
    wraps = any(t.ready_by > plan.op_count for t in plan.transfers)
    begin = 0
    for step in range(_STEPS_WHEN_WRAPPING if wraps else 1):
        begin = run.now_ns
        ops, stalls, jobs = run.step(is_first=step == 0)
    spans = sorted(
        (
            TransferSpan(j.transfer.tensor, j.transfer.source, j.transfer.target, j.start_ns, j.stop_ns, j.size_bytes)
            for j in jobs
            if j.stop_ns >= 0
        ),
        key=lambda s: (s.start_ns, s.stop_ns, s.tensor),
    )
    if begin:
        ops = [OpSpan(o.start_ns - begin, o.stop_ns - begin) for o in ops]
        spans = [replace(s, start_ns=s.start_ns - begin, stop_ns=s.stop_ns - begin) for s in spans]
    return Timeline(tuple(ops), tuple(spans), tuple(stalls), memory_per_op(plan, trace), run.now_ns - begin)
