"""Lower bounds on the step time, for plans that only move bytes and, at a lower value, for those that do more.

[Note: the cut bounds]
Let `excess` be the bytes by which the live tensors at an op p exceed the device's budget. Any plan has at least
`excess` bytes of tensors that are live but idle at p in a lower tier while p runs. Each of those bytes
* comes back to the device in every step if its tensor is used again (after p, or in the next step if the gap wraps),
* goes out in every step if its tensor is written since its last copy: always for a tensor that is not persistent, and
  for a persistent one that the step writes at all.
So the link in carries at least `excess` less the bytes that never come back (last gaps), the link out at least
`excess` less the bytes that need no copy, in each step. What is not persistent goes out before p and comes back after
it, within the step: what of that does not fit into the compute before p is stall, and so is what does not fit after.
Summed over the tiers the links offer at most the sum of their bandwidths (with `nvme_shares_host_link`: that of the
larger one); the host takes at most its own budget of bytes at p. Both directions together carry no more than
`host_memory_bytes_per_s` where each byte passes that memory; updates are granted theirs at no cost. Latencies are left out:
with them the bound would be higher. A step is never shorter than its ops with nothing moved.

With communication beside compute (see [Note: two queues] in `tieroff.core.trace`) a wait for the links lets communication
go on, so that what is left of a step after an op is at least what an endless head start of all communication before it leaves
(`rests_ns`). The relaxation, whose slots are stretches of the row, counts compute, and communication that is awaited at once.

[Note: plans that do more]
Repeats: a byte made again takes no link, but a share of the run of an op that writes it: at least that op's duration
over all bytes that it writes. With c the least such time per byte, E bytes to carry, rate r and g bytes made again, a
step takes (E - g) / r or more, and compute + c g or more: at best (E c + compute) / (r c + 1), where both are equal.
Updates on the host: such an op takes no time on the device, uses nothing there and leaves copies in the host valid. The
bound grants all of that to every op of the optimizer at no cost.

Tensors that no op uses never have to be on the device; they do not count as live here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tieroff.core.plan import Plan
from tieroff.core.tensor import Tier
from tieroff.core.trace import Queue, Trace
from tieroff.planner.bounds.relaxation import Relaxation, check_points, column_count, group_tensors, movable_tensors
from tieroff.planner.problem.problem import Bytes, Problem, Span, held_bytes, make_problem
from tieroff.planner.simulate.options import memory_rate
from tieroff.units import NS_PER_S

_SLOTS = (48, 36, 30, 24, 20, 16, 12, 8, 4, 2, 1)  # more gain nothing on any trace tried
_COLUMNS_AT_MOST = 40_000
_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Scope:
    """What plans may do in addition to moving bytes; a bound holds for plans of its scope.

    Attributes:
        repeats: run ops again.
        host_updates: have the CPU run ops of the optimizer.
    """

    repeats: bool = False
    host_updates: bool = False


MOVES_ONLY = Scope()
"""Plans that keep and move bytes and do nothing else."""


def scope_of(plan: Plan) -> Scope:
    """Returns the narrowest scope that a plan lies in."""
    return Scope(bool(plan.repeats or plan.recompute), bool(plan.host_updates))


def best_bound_ns(problem: Problem, effort: str, scope: Scope = MOVES_ONLY) -> int:
    """Returns the best bound within an effort: the relaxation's as well with "high", in about a minute."""
    bound_ns = lower_bound_ns(problem, scope)
    return max(bound_ns, relaxed_bound_ns(problem, scope)) if effort == "high" else bound_ns


def lower_bound_ns(problem: Problem, scope: Scope = MOVES_ONLY) -> int:
    """Returns a step time, in ns, that no plan in the scope beats; see [Note: the cut bounds].

    It holds for every plan that the checker passes, whatever the executor's capabilities, and for the mean over the
    steps of a periodic timeline.
    """
    again_ns = _again_ns(problem.trace) if scope.repeats else {}
    problem = _in_scope(problem, scope)
    compute_ns = int(problem.starts_ns[-1])
    movable = movable_tensors(problem)
    excess = problem.live - problem.device_bytes - _unused_bytes(problem)
    if not problem.units or int(excess.max(initial=0)) <= 0:
        return compute_ns
    cut = _Cut(problem, movable)
    least_ns = min((again_ns[tensor] for tensor in movable if tensor in again_ns), default=np.inf)
    out, back = int((excess - cut.clean).max()), int((excess - cut.last).max())
    bounds = [compute_ns, _channel_ns(problem, out, least_ns, is_out=True), _channel_ns(problem, back, least_ns, is_out=False)]
    bounds.append(_memory_ns(problem, max(out, 0) + max(back, 0), least_ns))
    if np.isinf(least_ns):
        bounds.append(_window_ns(problem, excess - cut.persistent, cut.last))
    return max(bounds)


def relaxed_bound_ns(problem: Problem, scope: Scope = MOVES_ONLY, *, slot_counts: tuple[int, ...] = _SLOTS) -> int:
    """Returns the bound of the fractional relaxation, with all groups, both lower tiers and moves between them.

    Args:
        problem: what is planned.
        scope: the plans that the bound holds for.
        slot_counts: to try, the best first; the first that gives a program of a size to solve in time is taken.
    """
    again_ns = _again_ns(problem.trace) if scope.repeats else {}
    problem = _in_scope(problem, scope)
    ideal_ns = int(problem.starts_ns[-1])
    device_bytes = problem.device_bytes + _unused_bytes(problem)
    if not problem.units or int(problem.live.max(initial=0)) <= device_bytes:
        return ideal_ns
    problem = _without_communication(problem)
    for slot_count in slot_counts:
        # What is not persistent crosses no end of the step: with a check point there, the slots at both ends are apart.
        points = sorted({0, *check_points(problem, slot_count)})
        groups = group_tensors(problem, points, again_ns)
        if column_count(groups) > _COLUMNS_AT_MOST and slot_count != slot_counts[-1]:
            continue
        if not groups:
            break
        relaxation = Relaxation(problem, points, groups, device_bytes=device_bytes)
        if relaxation.solve(_TOLERANCE):
            return max(ideal_ns, relaxation.bound_ns)
    return ideal_ns


def _without_communication(problem: Problem) -> Problem:
    """Returns the problem with the clock of compute, and of communication that is awaited at once."""
    trace = problem.trace
    if not trace.communication:
        return problem
    row_ns = (op.duration_ns if trace.blocks(index) else trace.compute_ns[index] for index, op in enumerate(trace.ops))
    return replace(problem, starts_ns=np.array([0, *itertools.accumulate(row_ns)], np.int64))


def _in_scope(problem: Problem, scope: Scope) -> Problem:
    """Returns a problem whose plans include, without updates on the host, all that the scope allows."""
    if not scope.host_updates or not any(op.phase == "optimizer" for op in problem.trace.ops):
        return problem
    trace = _without_updates(problem.trace)
    # Gradients of what the host updates leave on their own, and its parameters come back across the step's end.
    can = problem.capabilities
    free = replace(can, gradient_follows_parameter=False, wraps=can.wraps or can.updates_cross)
    return make_problem(trace, problem.machine, problem.budget, free, problem.effort)


def _without_updates(trace: Trace) -> Trace:
    """Returns a trace whose ops of the optimizer take no time and use nothing, and hold nothing for themselves."""
    held: dict[int, set[tuple[int, int]]] = {}
    ops = list(trace.ops)
    for index, op in enumerate(trace.ops):
        if op.phase == "optimizer":
            for tensor in {*op.reads, *op.writes}:
                held.setdefault(tensor, set()).add((index, index + 1))
            ops[index] = replace(op, duration_ns=0, reads=(), writes=())
    tensors = tuple(
        replace(tensor, holds=tuple(h for h in tensor.holds if h not in held.get(index, ())))
        for index, tensor in enumerate(trace.tensors)
    )
    return replace(trace, ops=tuple(ops), tensors=tensors)


def rests_ns(problem: Problem) -> Bytes:
    """Returns the least time from the begin of each op to the end of the step, and 0: n + 1 values.

    Communication before the op is taken to have ended.
    """
    trace = problem.trace
    if not trace.communication:
        return np.array(problem.starts_ns[-1] - problem.starts_ns, np.int64)
    rest = [0] * (len(trace.ops) + 1)
    after_ns = 0  # the longest way on from the end of the communication before, by what awaits it or follows it in its queue
    ways_ns = [0] * len(trace.ops)
    for index in range(len(trace.ops) - 1, -1, -1):
        op = trace.ops[index]
        if op.queue is Queue.COMMUNICATION:
            after_ns = op.duration_ns + max(after_ns, ways_ns[index])
            rest[index] = max(rest[index + 1], after_ns)
        else:
            rest[index] = op.duration_ns + rest[index + 1]
        if op.awaits >= 0:
            ways_ns[op.awaits] = max(ways_ns[op.awaits], rest[index])
    return np.array(rest, np.int64)


def _again_ns(trace: Trace) -> Mapping[int, float]:
    """Returns, per tensor that a repeat can make again, the least time per byte that an op writes."""
    again_ns: dict[int, float] = {}
    for op in trace.ops:
        written = set(op.writes)
        if written.intersection(op.reads) or any(trace.tensors[t].is_persistent for t in written):
            continue
        total = sum(trace.tensors[t].size_bytes for t in written)
        for tensor in written:
            again_ns[tensor] = min(again_ns.get(tensor, np.inf), op.duration_ns / total)
    return again_ns


def _unused_bytes(problem: Problem) -> int:
    """Returns the bytes, the same at every op, of tensors that need not be on the device at all."""
    movable_from = problem.capabilities.min_bytes
    total = 0
    for life, tensor in zip(problem.trace.lifetimes, problem.trace.tensors, strict=True):
        is_free = not tensor.is_persistent or (tensor.is_movable and tensor.size_bytes >= movable_from)
        total += tensor.size_bytes * (is_free and not life.required)
    return total


class _Cut:
    """Bytes of movable tensors that are idle at each op.

    Attributes:
        last: in gaps that end a life: they need not come back.
        clean: of tensors that the step never writes: they need no copy.
        persistent: of tensors that are persistent: their transfers may lie anywhere in the ring.
    """

    def __init__(self, problem: Problem, movable: list[int]) -> None:
        last: list[Span] = []
        clean: list[Span] = []
        persistent: list[Span] = []
        for index in movable:
            tensor, life = problem.trace.tensors[index], problem.trace.lifetimes[index]
            spans = [(gap.start, gap.stop, tensor.size_bytes) for gap in life.gaps]
            if tensor.is_persistent:
                persistent += spans
                if not life.writes:
                    clean += spans
            last += [span for span, gap in zip(spans, life.gaps, strict=True) if gap.is_last]
        self.last, self.clean, self.persistent = (held_bytes(spans, problem.op_count) for spans in (last, clean, persistent))


def _bandwidths(problem: Problem, *, is_out: bool) -> tuple[dict[Tier, int], int]:
    """Returns that of each tier's link in one direction, and what all carry together at most."""
    bandwidth = {tier: problem.links(tier)[0 if is_out else 1].bytes_per_s for tier in problem.tiers}
    if len(bandwidth) == 2 and problem.machine.nvme_shares_host_link:
        return bandwidth, max(bandwidth.values()) + 1  # the simulator halves in whole bytes per second
    return bandwidth, sum(bandwidth.values())


def _channel_ns(problem: Problem, size_bytes: int, again_ns: float, *, is_out: bool) -> int:
    """Returns the least step in which the links of a direction carry bytes, at most the host's budget by the host.

    Bytes may also be made again, each in `again_ns` or more.
    """
    bandwidth, total = _bandwidths(problem, is_out=is_out)
    loads = [(size_bytes, total)]
    if Tier.NVME in bandwidth:
        loads.append((size_bytes - problem.budget[Tier.HOST], bandwidth[Tier.NVME]))
    return max(_carried_ns(problem, load, rate, again_ns) for load, rate in loads)


def _memory_ns(problem: Problem, size_bytes: int, again_ns: float) -> int:
    """Returns the least step in which the host's memory carries bytes out and back; one made again does neither."""
    machine = problem.machine
    passes = min(machine.memory_passes(Tier.DEVICE, tier) for tier in problem.tiers)
    if not machine.host_memory_bytes_per_s or not passes:
        return 0
    return _carried_ns(problem, size_bytes * passes, memory_rate(machine), again_ns / (2 * passes))


def _carried_ns(problem: Problem, size_bytes: int, bytes_per_s: int, again_ns: float) -> int:
    if np.isinf(again_ns):
        return size_bytes * NS_PER_S // bytes_per_s
    compute_ns = int(problem.starts_ns[-1])
    return int((size_bytes * again_ns + compute_ns) / (bytes_per_s / NS_PER_S * again_ns + 1.0) * (1 - 1e-12))


def _window_ns(problem: Problem, excess: Bytes, last: Bytes) -> int:
    """Returns the least step in which bytes go out before each op and come back after it, within the step."""
    starts, rests = problem.starts_ns[:-1], rests_ns(problem)[:-1]
    step_ns = int(problem.starts_ns[-1])
    stall_ns = (starts + rests - step_ns).astype(float)  # below 0 where communication runs on beside an op
    for is_out, size, window in ((True, excess, starts), (False, excess - last, rests)):
        bandwidth, total = _bandwidths(problem, is_out=is_out)
        needed = size / total
        if Tier.NVME in bandwidth:
            needed = np.maximum(needed, (size - problem.budget[Tier.HOST]) / bandwidth[Tier.NVME])
        stall_ns += np.maximum(0.0, needed * (1 - 1e-12) * NS_PER_S - window)
    return step_ns + max(0, int(stall_ns.max(initial=0.0)) - 1)
