"""The reference simulator: what a plan takes on a machine, in integer nanoseconds, in the most readable form.

[Note: time in the simulator]
Ticks are those of `make_schedule`, transfers before updates. A wait is charged to the one of those awaited that ends
last, the first of equals.

The simulation begins with idle links. What the first step would await from the step before it is taken as done, as it
is in any later step that begins with idle links. At the end of each step the state is what is under way: per link the
transfer in service with the latency and the bytes it has left, and those that wait behind it; the same of the CPU. All
else follows from the plan. When a state comes back after `cycle` steps, all later steps repeat those, and the step time
is their mean.

A transfer takes `move_compute_s` of the compute before the op of its tick; at the step's end, before the first op of the next
step. Where that is an op of communication, it takes it before the next op of compute. In a step with ops that run again it
takes none.

Communication: an op of that queue begins when the waits of its tick are over and the one before it in its queue has ended,
and compute goes on at once. Before all else at its tick, an op that awaits communication waits for it, as the end of the
step does for all of it. A tick's waits for transfers hold compute whichever queue its op is of, so a plan is never
predicted faster than it is where communication alone waits.

[Note: links in the simulator]
A link serves its transfers one at a time in order of issue, each after its latency. Rates are constant between events:
* a direction of the host link has its full bandwidth while the other direction moves nothing, and `duplex_share` of it
  while both move bytes;
* with `nvme_shares_host_link`, a transfer between device and NVMe also fills the host link's direction away from (to)
  the device: it runs at its own bandwidth but at most half of that direction's while a host transfer moves beside it,
  and the host transfer gets the rest. One between host and NVMe fills the NVMe's link alone.
* what all that moves wants of the host's memory, past these rules, is the sum of its rates, each as often as a byte passes
  that memory (`Machine.memory_passes`), and of `UPDATE_PASSES` times `cpu_update_bytes_per_s` while the CPU updates. Where
  that exceeds `host_memory_bytes_per_s`, all who pass it slow down by the same factor.
A latency occupies its own link only. The CPU serves updates one at a time in order of issue, like a link of its own; the
duration of one is what it takes with the host's memory to itself.

Where links share nothing, every time is a maximum of sums of durations, so a faster link or op never makes the same
plan slower (for periodic results). Where they share it can: a transfer that starts earlier may slow one that is awaited.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from tieroff.core.buckets import bytes_below
from tieroff.core.machine import LINK_NAMES, UPDATE_PASSES, Machine
from tieroff.core.plan import AllocationKind, HostUpdate, Plan, Transfer
from tieroff.core.schedule import make_schedule
from tieroff.core.tensor import Tier
from tieroff.core.timeline import OpSpan, RunSpan, Stall, Timeline, TransferSpan
from tieroff.core.trace import Queue, Trace
from tieroff.planner.simulate.options import SimulationOptions, prepare, share_millionths, size_of
from tieroff.units import NS_PER_S

_BESIDE = {"d2h": "nvme_write", "nvme_write": "d2h", "h2d": "nvme_read", "nvme_read": "h2d"}
_OPPOSITE = {"d2h": "h2d", "h2d": "d2h"}

_Item = Transfer | HostUpdate


@dataclass(slots=True)
class _Job:
    """One transfer or update of one step."""

    item: _Item
    size_bytes: int = 0  # of a transfer
    start_ns: int = -1
    stop_ns: int = -1

    @property
    def link(self) -> str:
        return LINK_NAMES[self.item.source, self.item.target] if isinstance(self.item, Transfer) else "cpu"

    @property
    def touches_device(self) -> bool:
        return isinstance(self.item, Transfer) and Tier.DEVICE in (self.item.source, self.item.target)


@dataclass(slots=True)
class _Channel:
    """A link, or both directions of an exclusive one: the job in service, what is left of it, the queue behind it."""

    queue: deque[_Job] = field(default_factory=deque)
    job: _Job | None = None
    latency_left_ns: int = 0
    work_left: int = 0  # bytes times ns per second, so that rates in bytes per second divide it in integers


class _Links:
    """All links and the CPU, advanced together from event to event; see [Note: links in the simulator]."""

    def __init__(self, machine: Machine, options: SimulationOptions) -> None:
        self._now_ns = 0
        self._machine = machine
        self._bandwidth = {name: int(getattr(machine, f"{name}_bytes_per_s")) for name in _BESIDE}
        self._latency_ns = {name: round(getattr(machine, f"{name}_latency_s") * NS_PER_S) for name in _BESIDE}
        self._updated_per_s = round(machine.cpu_update_bytes_per_s * UPDATE_PASSES)
        self._bandwidth["cpu"], self._latency_ns["cpu"] = max(self._updated_per_s, 1), 0
        self._share_millionths = share_millionths(machine)
        self._channels = {name: _Channel() for name in (*_BESIDE, "cpu")}
        if options.has_exclusive_link:
            self._channels["h2d"] = self._channels["d2h"]
        self._all = list({id(c): c for c in self._channels.values()}.values())

    def issue(self, job: _Job, now_ns: int) -> None:
        """Puts a job behind the others of its link at a time that is not before the last event."""
        self.advance(now_ns)
        channel = self._channels[job.link]
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

    def state(self) -> Hashable:
        """Returns what is under way, without the time."""
        return tuple(
            (c.job.item, c.latency_left_ns, c.work_left, *(job.item for job in c.queue)) if c.job else () for c in self._all
        )

    def _serve(self, channel: _Channel) -> None:
        while channel.job is None and channel.queue:
            job = channel.queue.popleft()
            job.start_ns = self._now_ns
            if isinstance(job.item, HostUpdate):
                work = job.item.duration_ns * self._bandwidth["cpu"]
            else:
                work = job.size_bytes * NS_PER_S
            if work == 0:
                job.stop_ns = self._now_ns
                continue
            channel.job, channel.latency_left_ns, channel.work_left = job, self._latency_ns[job.link], work

    def _moving(self, link: str) -> _Job | None:
        """Returns the job whose bytes move on a link now, past its latency."""
        channel = self._channels[link]
        job = channel.job
        return job if job is not None and job.link == link and not channel.latency_left_ns else None

    def _rates(self, busy: list[_Channel]) -> list[int]:
        """Returns the bytes per second of each channel that serves a job."""
        jobs = [(c.job, self._wanted(c.job), 0 if c.latency_left_ns else self._passes(c.job)) for c in busy if c.job]
        wanted, limit = sum(rate * passes for _, rate, passes in jobs), self._machine.host_memory_bytes_per_s
        is_full = 0 < limit < wanted
        return [max(rate * limit // wanted, 1) if is_full and passes else rate for _, rate, passes in jobs]

    def _passes(self, job: _Job) -> int:
        """Returns how often a byte passes the host's memory."""
        if isinstance(job.item, Transfer):
            return self._machine.memory_passes(job.item.source, job.item.target)
        return 1 if self._updated_per_s else 0

    def _wanted(self, job: _Job) -> int:
        """Returns the bytes per second of a job if the host's memory has room for them."""
        rate = self._bandwidth[job.link]
        if self._machine.nvme_shares_host_link and job.touches_device:
            beside = self._moving(_BESIDE[job.link])
            if job.link in _OPPOSITE:
                if beside is not None and beside.touches_device:
                    rate -= min(self._bandwidth[beside.link], rate // 2)
            else:
                host = self._bandwidth[_BESIDE[job.link]] or rate
                rate = min(rate, host - host // 2 if beside is not None else host)
        if job.link in _OPPOSITE and self._moving(_OPPOSITE[job.link]) is not None:
            rate = rate * self._share_millionths // 1_000_000
        return max(rate, 1)

    def _step(self, until_ns: int | None) -> None:
        """Advances to the next event, or to `until_ns` if that comes first."""
        serving = [c for c in self._all if c.job is not None]
        busy = list(zip(serving, self._rates(serving), strict=True))
        spans = [c.latency_left_ns or -(-c.work_left // rate) for c, rate in busy]
        if until_ns is not None:
            spans.append(until_ns - self._now_ns)
        span = min(spans)
        self._now_ns += span
        for channel, rate in busy:
            if channel.latency_left_ns:
                channel.latency_left_ns -= span
                continue
            channel.work_left = max(0, channel.work_left - rate * span)
            if channel.work_left == 0 and channel.job is not None:
                channel.job.stop_ns = self._now_ns
                channel.job = None
        for channel, _ in busy:
            self._serve(channel)


@dataclass(slots=True)
class _Step:
    """What happened in one step."""

    ops: list[OpSpan] = field(default_factory=list)
    repeats: list[RunSpan] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    jobs: dict[_Item, _Job] = field(default_factory=dict)  # in order of issue


class _Run:
    """One simulated run, step after step."""

    def __init__(self, plan: Plan, trace: Trace, machine: Machine, options: SimulationOptions) -> None:
        self._trace = trace
        self._op_count = plan.op_count
        self._ticks = make_schedule(plan).ticks
        on_cpu = {update.op for update in plan.host_updates}
        self._move_ns = 0 if plan.repeats else round(machine.move_compute_s * NS_PER_S)
        compute = [index for index, op in enumerate(trace.ops) if op.queue is Queue.COMPUTE]
        issued = [transfer.issue_at % plan.op_count for transfer in plan.transfers]
        self._issued = Counter(next((op for op in compute if op >= at), compute[0]) for at in issued if compute)
        self.engine_ns = self._move_ns * self._issued.total()
        self._op_ns = [0 if index in on_cpu else op.duration_ns for index, op in enumerate(trace.ops)]
        self._links = _Links(machine, options)
        self._before = _Step()
        self._step = _Step()
        self._peers_free_ns = 0
        self.now_ns = 0

    def step(self) -> _Step:
        """Runs one step."""
        self._before, self._step = self._step, _Step()
        for index, tick in enumerate(self._ticks):
            self._await_communication(index)
            self._issue((*tick.issue_first, *tick.update_first))
            self._await(index, (*tick.await_outs, *tick.await_updates))
            self._issue((*tick.issues, *tick.updates))
            self._await(index, tick.await_ins)
            for repeat in tick.repeats:
                self._step.repeats.append(RunSpan(repeat.op, *self._compute(repeat.op)))
            if index < self._op_count:
                self.now_ns += self._move_ns * self._issued[index]
                beside = self._trace.ops[index].queue is Queue.COMMUNICATION
                self._step.ops.append(OpSpan(*(self._communicate(index) if beside else self._compute(index))))
        self._links.advance(self.now_ns)
        return self._step

    def state(self) -> Hashable:
        """Returns the state at a step's end."""
        return self._links.state()

    def _compute(self, op: int) -> tuple[int, int]:
        start = self.now_ns
        self.now_ns += self._op_ns[op]
        return start, self.now_ns

    def _communicate(self, op: int) -> tuple[int, int]:
        start = max(self.now_ns, self._peers_free_ns)
        self._peers_free_ns = start + self._op_ns[op]
        return start, self._peers_free_ns

    def _await_communication(self, tick: int) -> None:
        communication = self._trace.communication
        awaited = self._trace.ops[tick].awaits if tick < self._op_count else communication[-1] if communication else -1
        if awaited >= 0 and self._step.ops[awaited].stop_ns > self.now_ns:
            stop_ns = self._step.ops[awaited].stop_ns
            wait = Stall(tick, stop_ns - self.now_ns, -1, Tier.DEVICE, Tier.DEVICE, communication=awaited)
            self._step.stalls.append(wait)
            self.now_ns = stop_ns

    def _issue(self, items: tuple[_Item, ...]) -> None:
        for item in items:
            job = _Job(item, size_of(item, self._trace) if isinstance(item, Transfer) else 0)
            self._links.issue(job, self.now_ns)
            self._step.jobs[item] = job

    def _await(self, op: int, items: tuple[_Item, ...]) -> None:
        last: _Job | None = None
        for item in items:
            crosses = item.ready_by > self._op_count
            job = (self._before if crosses else self._step).jobs.get(item)
            if job is None:
                continue  # the first step: it was issued before the simulation began
            if job.stop_ns < 0:
                self._links.finish(job)
            if last is None or job.stop_ns > last.stop_ns:
                last = job
        if last is not None and last.stop_ns > self.now_ns:
            self._step.stalls.append(_stall(op, last.stop_ns - self.now_ns, last.item))
            self.now_ns = last.stop_ns


def _stall(op: int, duration_ns: int, cause: _Item) -> Stall:
    if isinstance(cause, Transfer):
        return Stall(op, duration_ns, cause.tensor, cause.source, cause.target, cause.first_byte)
    return Stall(op, duration_ns, -1, Tier.HOST, Tier.HOST, update=cause.op)


def simulate_reference(plan: Plan, trace: Trace, machine: Machine, options: SimulationOptions | None = None) -> Timeline:
    """Returns what `tieroff.planner.simulate.simulator.simulate` does, to the last digit, at a fraction of its speed.

    Raises:
        As `simulate` does.
    """
    options = options or SimulationOptions()
    plan = prepare(plan, trace, machine, options)
    run = _Run(plan, trace, machine, options)
    ends_ns, seen, cycle = [0], {run.state(): 0}, 0
    while not cycle and len(ends_ns) <= options.step_count_max:
        step = run.step()
        ends_ns.append(run.now_ns)
        count = len(ends_ns) - 1
        cycle = count - seen.setdefault(run.state(), count)
    if any(job.stop_ns < 0 for job in step.jobs.values()):
        run.step()  # what the last step left under way ends within the next
    begin = ends_ns[-2]
    transfers = [
        TransferSpan(t.tensor, t.source, t.target, job.start_ns - begin, job.stop_ns - begin, job.size_bytes, t.first_byte)
        for t, job in step.jobs.items()
        if isinstance(t, Transfer)
    ]
    rounds = cycle or 1
    return Timeline(
        ops=tuple(OpSpan(o.start_ns - begin, o.stop_ns - begin) for o in step.ops),
        transfers=tuple(sorted(transfers, key=lambda span: (span.start_ns, span.stop_ns))),
        stalls=tuple(step.stalls),
        memory={
            tier: tuple(held + bytes_below(trace.meta).get(tier, 0) for held in line)
            for tier, line in memory_per_op_reference(plan, trace).items()
        },
        step_ns=-(-(ends_ns[-1] - ends_ns[-1 - rounds]) // rounds),
        repeats=tuple(RunSpan(r.op, r.start_ns - begin, r.stop_ns - begin) for r in step.repeats),
        host_updates=tuple(
            RunSpan(u.op, job.start_ns - begin, job.stop_ns - begin)
            for u, job in step.jobs.items()
            if isinstance(u, HostUpdate)
        ),
        recompute_ns=sum(r.stop_ns - r.start_ns for r in step.repeats) + trace.recompute_ns,
        engine_ns=run.engine_ns,
        first_step_ns=ends_ns[1],
        cycle=cycle,
        communication=trace.communication,
    )


def memory_per_op_reference(plan: Plan, trace: Trace) -> dict[Tier, tuple[int, ...]]:
    """Returns the bytes that count at each op in each tier."""
    op_count = plan.op_count
    transient = [op.transient_bytes for op in trace.ops]
    for repeat in plan.repeats:
        transient[repeat.at] = max(transient[repeat.at], trace.ops[repeat.op].transient_bytes)
    memory = {tier: [0] * op_count for tier in Tier}
    for index, residency in enumerate(plan.residencies):
        line = memory[residency.tier]
        size = size_of(residency, trace)
        for op in range(residency.start, residency.stop):
            if residency.tier is Tier.DEVICE and plan.allocation.kind is AllocationKind.ADDRESSES:
                line[op % op_count] = max(line[op % op_count], plan.allocation.addresses[index] + size)
            else:
                line[op % op_count] += size
    memory[Tier.DEVICE] = [held + extra for held, extra in zip(memory[Tier.DEVICE], transient, strict=True)]
    return {tier: tuple(line) for tier, line in memory.items()}
