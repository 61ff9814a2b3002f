"""Updates on the host: which buckets of the optimizer the CPU updates, and the problem that is left.

[Note: updated problems]
A bucket is an op of the optimizer with all that it touches. Where the CPU runs it, all of that has to be in pinned host
memory, valid, while it runs: tiny tensors too, so a bucket with one that the executor keeps on the device stays there.
Its tensors are of three kinds:

| kind | what it is | on the host | on the device |
|---|---|---|---|
| state | persistent, touched by no other op | always | never, but where the program holds it |
| parameter | persistent, written by no other op | always | as planned; loaded again after each update |
| gradient | its last op is the update | from its last write on | until it is copied out |

Before its last write, a gradient that several backwards add to moves as any other tensor, but to the host alone, where
there is room for it. One that outlives the step (`zero_grad(set_to_none=False)`) is always on the host, and is loaded, once its
update is over, before backward adds to it.

So the choice of buckets turns a problem into another one of the same kind: the op takes no time and touches nothing, its state
is gone, its gradients are born with their load, if they have one, and end once they are copied out, its parameters are never
written, and the host has so much less room. An update that crosses the step's end keeps its gradients' copies in the host until
it ends. Ticks and memory of its plans are those of the first; `Updated.plan` adds the moves of gradients, the updates, and the
loads of parameters, which may not begin before the update is awaited.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tieroff.core.lifetime import Lifetime
from tieroff.core.plan import HostUpdate, Plan, Residency, Transfer
from tieroff.core.tensor import Tensor, Tier
from tieroff.core.trace import Trace
from tieroff.planner.extended.buckets import Bucket, end_of_backward, find_buckets, uses_of
from tieroff.planner.problem.assemble import peak_bytes
from tieroff.planner.problem.problem import Problem, make_problem
from tieroff.planner.simulate.options import rerank
from tieroff.planner.simulate.simulator import simulate

# Of the time that may be updated on the host, in order of trial; the share that balances both sides comes after the third.
_SHARES = (1.0, 0.9, 0.8, 0.6, 0.4)


_Hurried = tuple[int, Tier]
"""A gradient, and where its move leads that is awaited where it begins."""


@dataclass(frozen=True)
class _Return:
    """What brings an updated parameter back: the load is awaited at tick `due`, on the line after the update."""

    bucket: int
    due: int


@dataclass(frozen=True)
class Updated:
    """A problem in which the CPU updates some buckets; see [Note: updated problems].

    Attributes:
        original: the problem that it stems from.
        problem: the one to plan.
        origin: per tensor of `problem` that of `original`.
        buckets: those that the CPU updates, in order of op.
        copies: per gradient the copy to the host.
        loads: per gradient that outlives the step the one before backward adds to it.
    """

    original: Problem
    problem: Problem
    origin: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    copies: dict[int, Transfer]
    loads: dict[int, Transfer]

    def plan(self, plan: Plan) -> Plan | None:
        """Returns the plan of the original problem that a plan of this one stands for.

        None where a repeat after an update would read what the update changed. Updates are awaited as soon as the next
        one could begin, or as late as the CPU's time allows: whichever is faster by simulation.
        """
        written = {tensor: b.op for b in self.buckets for tensor in self.original.trace.ops[b.op].writes}
        for repeat in plan.repeats:
            op = self.original.trace.ops[repeat.op]
            if any(written.get(tensor, repeat.at + 1) <= repeat.at for tensor in (*op.reads, *op.writes)):
                return None
        begun = self._begun(plan)
        durations = {tuple(b.cpu_ns for b in self.buckets), tuple(b.beside_ns for b in self.buckets)}
        plans = [self._plan(plan, self._awaits(lasting, begun), begun) for lasting in (None, *sorted(durations))]
        return min(plans, key=lambda p: simulate(p, self.original.trace, self.original.machine).step_ns)

    def _begun(self, plan: Plan) -> dict[int, int]:
        """Returns when the stay of each gradient in the host begins: with its copy, or with the first one between backwards."""
        begun = {tensor: copy.issue_at for tensor, copy in self.copies.items()}
        for transfer in plan.transfers:
            tensor = self.origin[transfer.tensor]
            if tensor in begun and transfer.source is Tier.DEVICE:
                begun[tensor] = min(begun[tensor], transfer.issue_at)
        return begun

    @cached_property
    def _issues(self) -> list[int]:
        """When each update begins: at its op, or where it may begin later, once the copies of its gradients should be there."""
        ticks: list[int] = []
        for bucket in self.buckets:
            ticks.append(max([bucket.op, *(self.copies[g].ready_by for g in bucket.gradients), *ticks[-1:]]))
        return ticks

    @cached_property
    def _returns(self) -> dict[int, _Return]:
        """Per parameter that an update writes when it has to be back."""
        trace, n = self.original.trace, self.original.op_count
        index = {tensor: position for position, tensor in enumerate(self.origin)}
        runs = uses_of(trace)
        returns: dict[int, _Return] = {}
        for number, bucket in enumerate(self.buckets):
            for tensor in set(bucket.parameters).intersection(trace.ops[bucket.op].writes):
                gaps = self.problem.trace.lifetimes[index[tensor]].gaps
                ticks = [run for run in runs[tensor] if run != bucket.op] + [gap.stop % n for gap in gaps]
                returns[tensor] = _Return(number, min(t if t > bucket.op else t + n for t in ticks))
        return returns

    def _awaits(self, lasting_ns: tuple[int, ...] | None, begun: dict[int, int]) -> list[int]:
        """Returns the tick at which each update is awaited, on the line [0, 2 n]: in order, before its parameters are due.

        With durations of the updates it is the tick by which each should be over, without them the first one. Where updates
        may not cross the step's end, that is the last tick. No gradient's copy meets the next step's.
        """
        n, starts = self.original.op_count, self._two_steps_ns
        crosses = self.original.capabilities.updates_cross
        last = [b.op + n if crosses else n for b in self.buckets]
        for number, bucket in enumerate(self.buckets):
            # A copy that is awaited as it is issued comes before the room of the one before ends at the same tick.
            last[number] = min([last[number], *(begun[g] + n - 1 for g in bucket.gradients)])
            last[number] = min([last[number], *(self.loads[g].issue_at + n for g in bucket.gradients if g in self.loads)])
        for back in self._returns.values():
            last[back.bucket] = min(last[back.bucket], back.due)
        # The last of a step is awaited before the first of the next one is served again.
        last = [min(limit, self.buckets[0].op + n) for limit in last]
        for number in range(len(last) - 1, 0, -1):
            last[number - 1] = min(last[number - 1], last[number])
        ticks: list[int] = []
        free_ns = 0
        for issue, limit, lasts_ns in zip(self._issues, last, lasting_ns or [0] * len(last), strict=True):
            free_ns = max(free_ns, int(starts[issue])) + lasts_ns
            done = int(np.searchsorted(starts, min(free_ns, int(starts[-1])))) if lasting_ns else 0
            ticks.append(min(limit, max(done, issue + 1, *ticks[-1:])))
        return ticks

    @cached_property
    def _two_steps_ns(self) -> npt.NDArray[np.int64]:
        """When each tick of the line [0, 2 n] is, with nothing moved."""
        starts = self.problem.starts_ns
        return np.concatenate([starts, starts[1:] + starts[-1]])

    def _plan(self, plan: Plan, awaits: list[int], begun: dict[int, int]) -> Plan:
        count = self.original.op_count
        parameters = {tensor for bucket in self.buckets for tensor in bucket.parameters}
        residencies = [
            replace(r, tensor=self.origin[r.tensor])
            for r in plan.residencies
            if r.tier is Tier.DEVICE or self.origin[r.tensor] not in (parameters | self.copies.keys())
        ]
        transfers: list[Transfer] = []
        loaded: dict[int, list[tuple[int, int]]] = {}
        later: dict[tuple[int, int, int, int], int] = {}
        for transfer in plan.transfers:
            tensor = self.origin[transfer.tensor]
            if tensor in self.copies:
                # Between backwards it lies where it ends: the host has room for it all the time.
                leads_in = transfer.target is Tier.DEVICE
                ends = (Tier.HOST, Tier.DEVICE) if leads_in else (Tier.DEVICE, Tier.HOST)
                transfers.append(replace(transfer, tensor=tensor, source=ends[0], target=ends[1]))
            elif tensor not in parameters:
                transfers.append(replace(transfer, tensor=tensor))
            elif transfer.target is Tier.DEVICE:  # there is always a copy in the host: none has to be made
                load = replace(transfer, tensor=tensor, source=Tier.HOST)
                back = self._returns.get(tensor)
                if back is not None and load.ready_by % count == back.due % count:
                    stop = load.stop_byte or self.original.size_bytes(tensor)
                    loaded.setdefault(tensor, []).append((load.first_byte, stop))
                    delay = max(0, awaits[back.bucket] - (back.due - (load.ready_by - load.issue_at)))
                    later[tensor, load.issue_at % count, load.first_byte, load.stop_byte] = delay
                    load = _load(load, back.due - (load.ready_by - load.issue_at) + delay, back.due, count)
                transfers.append(load)
        residencies = [_begun_later(r, later, count) for r in residencies]
        transfers += self._returned(awaits, loaded)
        residencies += self._held(awaits, begun)
        transfers += [*self.copies.values(), *self.loads.values()]
        peaks = peak_bytes(replace(self.original, trace=_with_repeats(self.original.trace, plan)), residencies)
        windows = zip(self.buckets, self._issues, awaits, strict=True)
        updates = (HostUpdate(b.op, issue, ready, b.cpu_ns) for b, issue, ready in windows)
        return replace(
            plan,
            trace_digest=self.original.trace.digest,
            budget_bytes=dict(self.original.budget),
            peak_bytes=peaks,
            residencies=tuple(residencies),
            transfers=rerank(transfers),
            host_updates=tuple(updates),
            skipped=dict(self.original.skipped),
        )

    def _returned(self, awaits: list[int], loaded: dict[int, list[tuple[int, int]]]) -> Iterator[Transfer]:
        """Yields the loads of updated bytes that the plan has on the device all along, those that are due first before."""
        first_rank = sum(map(len, loaded.values())) + len(self.problem.trace.tensors)
        order = sorted(self._returns.items(), key=lambda item: (item[1].due, item[0]))
        for rank, (tensor, back) in enumerate(order, first_rank):
            size = self.original.size_bytes(tensor)
            edges = [0, *(edge for part in sorted(loaded.get(tensor, ())) for edge in part), size]
            for start, stop in zip(edges[::2], edges[1::2], strict=True):
                if start < stop:
                    load = Transfer(tensor, Tier.HOST, Tier.DEVICE, 0, 0, rank, start, stop if stop < size else 0)
                    yield _load(load, awaits[back.bucket], back.due, self.original.op_count)

    def _held(self, awaits: list[int], begun: dict[int, int]) -> Iterator[Residency]:
        """Yields the stays in host memory of all that updates touch."""
        for bucket, ready in zip(self.buckets, awaits, strict=True):
            for tensor in bucket.state + bucket.parameters:
                yield Residency(tensor, Tier.HOST, 0, self.original.op_count)
            for tensor in bucket.gradients:
                death = self.original.trace.lifetimes[tensor].death
                start, stop = (begun[tensor], max(death, ready)) if tensor not in self.loads else (0, self.original.op_count)
                yield Residency(tensor, Tier.HOST, start, stop)


def _load(load: Transfer, issue_at: int, due: int, op_count: int) -> Transfer:
    """Returns a load from one tick to another of the line [0, 2 n]."""
    start = issue_at % op_count
    return replace(load, issue_at=start, ready_by=start + due - issue_at)


def _begun_later(r: Residency, later: dict[tuple[int, int, int, int], int], op_count: int) -> Residency:
    """Returns a stay on the device that begins with a load which was put off."""
    delay = later.get((r.tensor, r.start, r.first_byte, r.stop_byte), 0) if r.tier is Tier.DEVICE else 0
    if not delay:
        return r
    start = (r.start + delay) % op_count
    return replace(r, start=start, stop=start + r.stop - r.start - delay)


def _with_repeats(trace: Trace, plan: Plan) -> Trace:
    """Returns a trace whose ops have the transient bytes of those that run again before them, too."""
    transient = {repeat.at: trace.ops[repeat.at].transient_bytes for repeat in plan.repeats}
    for repeat in plan.repeats:
        transient[repeat.at] = max(transient[repeat.at], trace.ops[repeat.op].transient_bytes)
    if not transient:
        return trace
    ops = list(trace.ops)
    for tick, size in transient.items():
        ops[tick] = replace(ops[tick], transient_bytes=size)
    return replace(trace, ops=tuple(ops))


def update(problem: Problem, buckets: list[Bucket]) -> Updated:
    """Returns the problem in which the CPU updates these buckets, in order of op; the host must have room for them."""
    hurried = set[_Hurried]()
    while True:
        updated = _update(problem, buckets, hurried)
        over = np.flatnonzero(updated.problem.base > updated.problem.device_bytes)
        moves = (*updated.copies.values(), *updated.loads.values())
        late = {(m.tensor, m.target) for m in moves if ((m.issue_at <= over) & (over < m.ready_by)).any()}
        if late <= hurried:
            return updated
        hurried |= late


def _update(problem: Problem, buckets: list[Bucket], hurried: set[_Hurried]) -> Updated:
    """Returns the same with moves of some gradients awaited where they begin: until links have time, there is no room."""
    trace = problem.trace
    copies, loads = _copies(problem, buckets, hurried), _loads(problem, buckets, hurried)
    by_op = {tensor: bucket.op for bucket in buckets for tensor in bucket.tensors}
    states = {tensor for bucket in buckets for tensor in bucket.state}
    tensors = dict(enumerate(trace.tensors))
    for tensor, op in by_op.items():
        holds = tuple(hold for hold in trace.tensors[tensor].holds if hold != (op, op + 1))
        changed = replace(trace.tensors[tensor], holds=holds)
        if tensor in copies:
            changed = _gradient(problem, changed, copies[tensor], loads.get(tensor), op)
        elif tensor in states:
            changed = replace(changed, is_movable=False)
        tensors[tensor] = changed
        if tensor in states and not holds:
            del tensors[tensor]
    origin = tuple(tensors)
    derived = _renumbered(trace, tensors, {bucket.op for bucket in buckets})
    budget = {**problem.budget, Tier.HOST: problem.budget[Tier.HOST] - _taken_bytes(problem, buckets)}
    once = replace(problem.capabilities, updates_on_host=False)  # what the CPU updates is decided
    rest = make_problem(derived, problem.machine, budget, once, problem.effort)
    return Updated(problem, rest, origin, tuple(buckets), copies, loads)


def _gradient(problem: Problem, gradient: Tensor, copy: Transfer, load: Transfer | None, op: int) -> Tensor:
    """Returns a gradient as it is left: there until it is copied out, and movable before, between backwards that add to it.

    It leaves on its own, whatever becomes of its parameter. One that is used again after it might have left stays until then.
    One that is loaded is there from then on, as if it were born.
    """
    life = problem.trace.lifetimes[copy.tensor]
    written_at = copy.issue_at - 1
    held_until = next(stop for start, stop in life.required if start <= written_at < stop)
    is_used_again = any(held_until < stop <= op for _, stop in life.required)
    is_movable = gradient.is_movable and not is_used_again and life.required[0][1] < held_until
    holds = gradient.holds
    if is_movable and copy.issue_at < copy.ready_by:
        holds = (*holds, (copy.issue_at, copy.ready_by))
    if load is not None and load.issue_at < load.ready_by:
        holds = (*holds, (load.issue_at, load.ready_by))
    return replace(gradient, is_persistent=False, is_movable=is_movable, holds=holds, lives_until=copy.ready_by, owner=-1)


def _renumbered(trace: Trace, tensors: dict[int, Tensor], on_host: set[int]) -> Trace:
    """Returns the trace of these tensors by their old index, in which the host's ops take no time and touch nothing."""
    index = {tensor: position for position, tensor in enumerate(tensors)}
    ops = tuple(
        replace(op, duration_ns=0, reads=(), writes=())
        if tick in on_host
        else replace(op, reads=tuple(index[t] for t in op.reads), writes=tuple(index[t] for t in op.writes))
        for tick, op in enumerate(trace.ops)
    )
    return replace(trace, ops=ops, tensors=tuple(replace(t, owner=index.get(t.owner, -1)) for t in tensors.values()))


def _left_ns(trace: Trace, on_host: set[int]) -> list[int]:
    """Returns what each op takes of the device."""
    return [0 if tick in on_host else op.duration_ns for tick, op in enumerate(trace.ops)]


def _taken_bytes(problem: Problem, buckets: list[Bucket]) -> int:
    """Returns the most host memory that buckets take, at the end of backward."""
    return sum(problem.room_bytes(tensor) for bucket in buckets for tensor in bucket.tensors)


def _copies(problem: Problem, buckets: list[Bucket], hurried: set[_Hurried]) -> dict[int, Transfer]:
    """Returns the copy of each gradient to the host, from its last write on, one after the other; of some awaited at once."""
    link, latest = problem.links(Tier.HOST)[0], _latest_issues(problem, buckets)
    starts_ns = np.array(problem.trace.with_durations(_left_ns(problem.trace, {b.op for b in buckets})).starts_ns, np.int64)
    made: list[tuple[int, int, int]] = []
    for bucket in buckets:
        for tensor in bucket.gradients:
            made.append((_last_write(problem.trace.lifetimes[tensor], bucket.op) + 1, bucket.op, tensor))
    copies: dict[int, Transfer] = {}
    now_ns = 0
    for tick, op, tensor in sorted(made):
        now_ns = max(now_ns, int(starts_ns[tick])) + link.transfer_ns(problem.size_bytes(tensor))
        ready = tick if (tensor, Tier.HOST) in hurried else min(latest[op], int(np.searchsorted(starts_ns, now_ns)))
        copies[tensor] = Transfer(tensor, Tier.DEVICE, Tier.HOST, tick, ready, 0)
    return copies


def _loads(problem: Problem, buckets: list[Bucket], hurried: set[_Hurried]) -> dict[int, Transfer]:
    """Returns the load of each gradient that outlives the step, up to its first use, one after the other; some begin there."""
    link, starts_ns = problem.links(Tier.HOST)[1], problem.starts_ns
    sums = [tensor for bucket in buckets for tensor in bucket.gradients if problem.trace.tensors[tensor].is_persistent]
    due = sorted(((problem.trace.lifetimes[tensor].required[0][0], tensor) for tensor in sums), reverse=True)
    loads: dict[int, Transfer] = {}
    now_ns = int(starts_ns[-1])
    for ready, tensor in due:
        now_ns = min(now_ns, int(starts_ns[ready])) - link.transfer_ns(problem.size_bytes(tensor))
        begin = max(int(np.searchsorted(starts_ns, now_ns, "right")) - 1, 0)
        issue = ready if (tensor, Tier.DEVICE) in hurried else min(begin, ready)
        # Behind all else that begins at its tick, by when they are due: a forward that waits comes before backward.
        loads[tensor] = Transfer(tensor, Tier.HOST, Tier.DEVICE, issue, ready, sys.maxsize - problem.op_count + ready)
    return loads


def _latest_issues(problem: Problem, buckets: list[Bucket]) -> dict[int, int]:
    """Returns per op the last tick at which its update may begin: before its parameters, or those of a later one, are due.

    One that backward does not follow begins at its op: the ticks after it take no time for gradients to arrive in.
    """
    latest: dict[int, int] = {}
    limit, backward_end = problem.op_count - 1, end_of_backward(problem.trace)
    for bucket in reversed(buckets):
        lives = (problem.trace.lifetimes[tensor] for tensor in bucket.parameters)
        limit = min([limit, *(start - 1 for life in lives for start, _ in life.required if start > bucket.op)])
        latest[bucket.op] = limit if bucket.op < backward_end else bucket.op
    return latest


def _last_write(life: Lifetime, op: int) -> int:
    return max(write for write in life.writes if write < op)


def updated_problems(problem: Problem, count: int) -> Iterator[Updated]:
    """Yields at most `count` problems in which the CPU updates buckets, each with others.

    The first has all buckets, the others smaller shares; one of those keeps the CPU busy for as long as the links carry the
    state of the others. Within a problem the buckets that the step reaches first go first, since the CPU updates them while
    the device computes. Buckets for which the host has no room are left out.
    """
    buckets: list[Bucket] = []
    for bucket in find_buckets(problem):
        if _taken_bytes(problem, [*buckets, bucket]) <= problem.budget[Tier.HOST]:
            buckets.append(bucket)
    beside_ns, moved_ns = sum(b.beside_ns for b in buckets), sum(b.moved_ns for b in buckets)
    if not buckets:
        return
    shares = (*_SHARES[:3], moved_ns / max(1, beside_ns + moved_ns), *_SHARES[3:])
    seen: set[int] = set()
    for share in shares:
        taken, busy_ns = 0, 0
        while taken < len(buckets) and busy_ns + buckets[taken].beside_ns <= share * beside_ns:
            busy_ns += buckets[taken].beside_ns
            taken += 1
        if taken and taken not in seen and len(seen) < count:
            seen.add(taken)
            yield update(problem, buckets[:taken])
