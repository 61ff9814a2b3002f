"""`zero-offload` and `zero-infinity`: fixed places for parameters, gradients and optimizer state; activations stay.

ZeRO-Offload (Ren et al., ATC 2021). Parameters stay on the device. A gradient goes to the host as backward makes it. The
optimizer's state lives in the host and the CPU updates it; the new parameters are copied back. The port runs an update on
the CPU where the executor can, the machine says how fast, and all that the op touches is of these classes; the device
then waits for it at the next op, and the copy back has until the parameter's next use. Elsewhere the state comes to the
device for its update, one update ahead, and gradients that must follow their parameter stay.

ZeRO-Infinity (Rajbhandari et al., SC 2021). Parameters and state live on the NVMe, in the host where there is none.
A parameter is fetched before its module, is fetched early with those of the next modules, and is released after the
module unless modules within `_REUSE_ELEMENTS` use it again. What is fetched early is bounded by `_BUCKET_ELEMENTS`, and
by what `_LIVE_ELEMENTS` leave. Parameters below `_PERSISTENT_ELEMENTS` never leave. In the optimizer the state of one
sub-group of `_GROUP_ELEMENTS` is on the device while the next one's is read and the last one's is written.

Verified in DeepSpeed's source: the constants of ZeRO-Infinity, its bounds and the rule of release. Defaults, not
verified: the rules of ZeRO-Offload; that `_LIVE_ELEMENTS`, `_REUSE_ELEMENTS` and the bucket are halved together until the
plan fits, as a user would set them; `_ELEMENT_BYTES`, since a trace knows bytes alone.

Further differences: what is read from the NVMe goes to the device directly, with no stay in the host; the CPU updates
nothing for ZeRO-Infinity; there is one device, so nothing is partitioned; an op without a module is a module by itself.
Where a gradient has no class of its own, it is an activation and stays. Neither policy moves activations: a step that
does not fit for them is over the budget, and the caller says so.

On the ten ops of tests/golden/ten_ops.py. ZeRO-Offload: H goes to the host as it is made, the CPU runs op 9 on v and n
there, and v is back by op 2. G is used right after it is made, so op 8 stays on the device and m comes for it.
ZeRO-Infinity: w and v are used again within the reuse distance and stay; m and n come from the NVMe for their sub-group
and are written back after it.
* zero-offload: A `H>h 7-8, m<h 8-8, m>h 9-10, v<h 0-2, cpu 9@9-10`; B `H>h 7-8, m<h 8-8, m>h 9-10, v<h 0-2, cpu 9@9-10`
* zero-infinity: A `m<s 8-8, m>s 9-10, n>s 0-1, n<s 9-9`; B `m<s 8-8, m>s 9-10, n>s 0-1, n<s 9-9`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tieroff.core.plan import HostUpdate, Plan, Residency, Transfer
from tieroff.core.tensor import TensorClass, Tier
from tieroff.planner.policy import policy
from tieroff.planner.problem.assemble import Move, build_plan, peak_bytes
from tieroff.planner.problem.problem import LowerRoom, Problem, Slot, Unit
from tieroff.planner.simulate.options import rerank
from tieroff.units import NS_PER_S

_PERSISTENT_ELEMENTS = 10**5
_BUCKET_ELEMENTS = 5 * 10**7
_LIVE_ELEMENTS = 10**9
_REUSE_ELEMENTS = 10**9
_GROUP_ELEMENTS = 10**9
_ELEMENT_BYTES = 4  # default, not verified: training in fp32
_HALVINGS = 40  # down to nothing, from any of the above


def kinds(problem: Problem, unit: Unit) -> set[TensorClass]:
    """Returns the classes of a unit's tensors."""
    return {problem.trace.tensors[tensor].kind for tensor in unit.tensors}


def state_units(problem: Problem) -> list[Unit]:
    """Returns the units of the optimizer's state, in the order in which the step first uses them."""
    return [unit for unit in problem.units if kinds(problem, unit) == {TensorClass.OPTIMIZER}]


def state_moves(problem: Problem, units: list[Unit], group_bytes: int) -> list[Move]:
    """Returns moves by which state comes to the device one group of updates ahead and leaves during the next group.

    A group is made of ops, in order, whose state is at least `group_bytes` together.
    """
    slots = [slot for unit in units for slot in unit.slots]
    starts = _groups(problem, {tensor for unit in units for tensor in unit.tensors}, group_bytes)
    moves: list[Move] = []
    for slot in slots:
        use = slot.stop % problem.op_count
        before = int(np.searchsorted(starts, use, "right")) - 2
        load = slot.stop - (use - int(starts[before])) if before >= 0 else slot.stop
        after = int(np.searchsorted(starts, slot.start)) + 1
        release = starts[after] if after < len(starts) else slot.start + 1
        moves.append(fitted(problem, slot, release, load))
    return moves


def _groups(problem: Problem, tensors: set[int], group_bytes: int) -> list[int]:
    """Returns the first op of each group."""
    starts: list[int] = []
    left = 0
    for index, op in enumerate(problem.trace.ops):
        own = tensors.intersection((*op.reads, *op.writes))
        if own and left <= 0:
            starts.append(index)
            left = group_bytes
        left -= sum(problem.size_bytes(tensor) for tensor in own)
    return starts


def fitted(problem: Problem, slot: Slot, release_at: int, load_at: int) -> Move:
    """Returns a move within its slot that is not empty; the release gives way, then the load."""
    load_at = min(max(load_at, slot.start), slot.stop)
    if slot.is_boundary and not problem.capabilities.wraps:
        release_at, load_at = min(release_at, problem.op_count), max(load_at, problem.op_count)
        if release_at < load_at:
            return Move(slot, release_at, load_at)
        return Move(slot, slot.start, problem.op_count if slot.start < problem.op_count else slot.stop)
    release_at = min(max(release_at, slot.start), load_at)
    return Move(slot, release_at, load_at) if release_at < load_at else Move(slot, slot.start, slot.stop)


@dataclass(frozen=True, slots=True)
class _Update:
    """An op of the optimizer that the CPU runs, and what it touches."""

    op: int
    tensors: tuple[int, ...]
    duration_ns: int


def _updates(problem: Problem) -> Iterator[_Update]:
    """Yields the ops that the CPU can run: each with state, and with tensors that no other such op touches."""
    rate = problem.machine.cpu_update_bytes_per_s
    can = problem.capabilities
    if not (can.updates_on_host and can.wraps and rate) or problem.tied or Tier.HOST not in problem.tiers:
        return
    tensors, movable = problem.trace.tensors, {tensor for unit in problem.units for tensor in unit.tensors}
    users: dict[int, list[int]] = {}
    for index, op in enumerate(problem.trace.ops):
        for tensor in {*op.reads, *op.writes}:
            users.setdefault(tensor, []).append(index)
    for index, op in enumerate(problem.trace.ops):
        own = tuple(dict.fromkeys((*op.reads, *op.writes)))
        state = [t for t in own if tensors[t].kind is TensorClass.OPTIMIZER]
        if op.phase != "optimizer" or not state or not movable.issuperset(own):
            continue
        if all(_is_served(problem, tensor, users[tensor], index) for tensor in own):
            duration = -(-sum(tensors[t].size_bytes for t in state) * NS_PER_S // rate)
            yield _Update(index, own, duration)


def _is_served(problem: Problem, tensor: int, users: list[int], op: int) -> bool:
    """True when the port has a place for a tensor of an update on the host."""
    trace, kind = problem.trace, problem.trace.tensors[tensor].kind
    if any(kind is not TensorClass.GRADIENT or stop > op for _, stop in trace.tensors[tensor].holds):
        return False
    if kind is TensorClass.OPTIMIZER:
        return users == [op]
    if kind is TensorClass.PARAMETER:
        return trace.tensors[tensor].is_persistent and [w for w in trace.lifetimes[tensor].writes if w >= 0] == [op]
    is_last = users[-1] == op and len(users) > 1 and users[-2] < op
    return kind is TensorClass.GRADIENT and not trace.tensors[tensor].is_persistent and is_last


def _made(problem: Problem, tensor: int, update: int) -> int:
    """Returns the tick from which a gradient is only needed by its update."""
    uses = [i for i, op in enumerate(problem.trace.ops[:update]) if tensor in op.reads or tensor in op.writes]
    return max([use + 1 for use in uses] + [stop for _, stop in problem.trace.tensors[tensor].holds])


def _serve(problem: Problem, plan: Plan, updates: list[_Update]) -> Plan:
    """Returns the plan with updates run by the CPU; none of what they touch is moved by the plan."""
    count, lifetimes = problem.op_count, problem.trace.lifetimes
    own = {tensor for update in updates for tensor in update.tensors}
    residencies = [r for r in plan.residencies if r.tensor not in own]
    transfers = list(plan.transfers)
    for update in updates:
        done = update.op + 1
        for tensor in update.tensors:
            kind = problem.trace.tensors[tensor].kind
            if kind is TensorClass.GRADIENT:
                life = lifetimes[tensor]
                made = _made(problem, tensor, update.op)
                out = min(made + 1, update.op)
                residencies += [
                    Residency(tensor, Tier.DEVICE, life.birth, out),
                    Residency(tensor, Tier.HOST, made, max(life.death, done)),
                ]
                transfers.append(Transfer(tensor, Tier.DEVICE, Tier.HOST, made, out, 0))
                continue
            residencies.append(Residency(tensor, Tier.HOST, 0, count))
            if kind is TensorClass.PARAMETER:
                residencies.append(Residency(tensor, Tier.DEVICE, 0, count))
                uses = [start for start, _ in lifetimes[tensor].required if start != update.op]
                use = min((start + count * (start < done) for start in uses), default=update.op + count)
                shift = count if done == count else 0
                transfers.append(Transfer(tensor, Tier.HOST, Tier.DEVICE, done - shift, use - shift, 0))
    peaks = peak_bytes(problem, residencies)
    host_updates = tuple(HostUpdate(u.op, u.op, u.op + 1, u.duration_ns) for u in updates)
    ordered = sorted(transfers, key=lambda t: (t.ready_by, t.tensor))
    return replace(plan, residencies=tuple(residencies), transfers=rerank(ordered), host_updates=host_updates, peak_bytes=peaks)


@policy("zero-offload", paper="Ren et al., ATC 2021", published=True)
def plan_zero_offload(problem: Problem) -> Plan:
    """Returns ZeRO-Offload's plan; it may be over the device's budget, which the caller checks."""
    if problem.fits or Tier.HOST not in problem.tiers:
        return build_plan(problem, "zero-offload", [], {})
    room = LowerRoom(problem)
    updates = [update for update in _updates(problem) if room.place(update.tensors, (Tier.HOST,))]
    served = {tensor for update in updates for tensor in update.tensors}
    units = [unit for unit in state_units(problem) if not served.intersection(unit.tensors)]
    units = [unit for unit in units if room.place(unit.tensors, (Tier.HOST,))]
    moves = state_moves(problem, units, 1)
    for unit in problem.units:
        is_free = kinds(problem, unit) == {TensorClass.GRADIENT} and not served.intersection(unit.tensors)
        if is_free and room.place(unit.tensors, (Tier.HOST,)):
            moves += [fitted(problem, slot, slot.start + 1, slot.stop - 1) for slot in unit.slots]
    plan = build_plan(problem, "zero-offload", moves, room.tier_of)
    return _serve(problem, plan, updates) if updates else plan


@policy("zero-infinity", paper="Rajbhandari et al., SC 2021", published=True)
def plan_zero_infinity(problem: Problem) -> Plan:
    """Returns ZeRO-Infinity's plan; it may be over the device's budget, which the caller checks."""
    if problem.fits or not problem.units:
        return build_plan(problem, "zero-infinity", [], {})
    room = LowerRoom(problem)
    order = problem.tiers[::-1]
    units = [unit for unit in problem.units if TensorClass.PARAMETER in kinds(problem, unit)]
    least = _PERSISTENT_ELEMENTS * _ELEMENT_BYTES
    units = [u for u in units if problem.size_bytes(u.tensors[0]) >= least and room.place(u.tensors, order)]
    states = [unit for unit in state_units(problem) if room.place(unit.tensors, order)]
    fixed = state_moves(problem, states, _GROUP_ELEMENTS * _ELEMENT_BYTES)
    tightest = build_plan(problem, "zero-infinity", fixed + _Coordinator(problem, units, _HALVINGS).moves(), room.tier_of)
    if tightest.peak_bytes[Tier.DEVICE] > problem.device_bytes:
        return tightest
    for halvings in range(_HALVINGS):
        moves = fixed + _Coordinator(problem, units, halvings).moves()
        plan = build_plan(problem, "zero-infinity", moves, room.tier_of)
        if plan.peak_bytes[Tier.DEVICE] <= problem.device_bytes:
            return plan
    return tightest


class _Coordinator:
    """Which parameters are on the device while each module runs; bounds are in bytes, halved so many times."""

    def __init__(self, problem: Problem, units: list[Unit], halvings: int) -> None:
        self._problem = problem
        self._units = units
        self._bucket, self._live, self._reuse = (
            elements * _ELEMENT_BYTES >> halvings for elements in (_BUCKET_ELEMENTS, _LIVE_ELEMENTS, _REUSE_ELEMENTS)
        )
        self._starts = [0]
        ops = problem.trace.ops
        for index in range(1, len(ops)):
            if not ops[index].module or ops[index].module != ops[index - 1].module:
                self._starts.append(index)
        parameters = {tensor for unit in units for tensor in unit.tensors}
        used = [sum(problem.size_bytes(t) for t in parameters.intersection((*op.reads, *op.writes))) for op in ops]
        self._used = np.concatenate(([0], np.cumsum(np.array(used * 2, np.int64))))

    def _module(self, tick: int, *, up: bool) -> int:
        """Returns the start of the module around a tick, or (`up`) of the first that does not start before it."""
        base = tick // self._problem.op_count * self._problem.op_count
        at = int(np.searchsorted(self._starts, tick - base, "left" if up else "right")) - (not up)
        return base + (self._starts[at] if at < len(self._starts) else self._problem.op_count)

    def moves(self) -> list[Move]:
        """Returns the moves: releases at the ends of modules, loads as early as the queue's budget lets them."""
        chosen: list[Slot] = []
        for unit in self._units:
            far = [slot for slot in unit.slots if int(self._used[slot.stop] - self._used[slot.start]) > self._reuse]
            if far:
                chosen += far + self._along(unit, far)
        moves: list[Move] = []
        for slot in chosen:
            end = self._module(slot.start, up=True)
            load = max(self._early(slot), end)
            moves.append(fitted(self._problem, slot, min(end + 1, load), load))  # the copy, if any, has one op
        return moves

    def _along(self, unit: Unit, far: list[Slot]) -> list[Slot]:
        """Returns the slots that the executor asks to move with some of a unit's: boundaries, and one per tied tensor."""
        problem = self._problem
        tensors = set(unit.tensors) if unit.tensors[0] in problem.tied else {slot.tensor for slot in far}
        rest = [slot for slot in unit.slots if slot.tensor in tensors and slot not in far]
        asked = [slot for slot in rest if slot.is_boundary and not problem.capabilities.wraps]
        left = tensors.difference(slot.tensor for slot in far + asked)
        return asked + [next(slot for slot in reversed(rest) if slot.tensor == tensor) for tensor in sorted(left)]

    def _early(self, slot: Slot) -> int:
        """Returns the start of the first module from which on no more than the bucket is used up to a slot's end."""
        stop = self._module(slot.stop, up=False)
        bound = min(self._bucket, max(0, self._live - int(self._used[stop + 1] - self._used[stop])))
        first = int(np.searchsorted(self._used, self._used[stop] - bound))
        return min(stop, self._module(first, up=True))
