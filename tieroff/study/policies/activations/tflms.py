"""`tflms`: what is consumed many levels of the graph after it is made is swapped; three numbers are tuned to fit.

Le et al., "TFLMS: Large Model Support in TensorFlow by Graph Rewriting", arXiv 1807.02037; its successor's tuner,
"Automating the swapping of tensors", ISMM 2019.

The rule. The level of an op is the round in which all that it reads has been made. An activation is swapped for a
consumer whose level is more than `threshold` above its producer's; it leaves once, right after it is made. Consumers
that follow each other by less than `groupby` levels share one swap-in; otherwise the tensor is dropped in between. A
swap-in begins after an op that the consumer depends on, `ahead` levels below the consumer's or up to ten levels
further down, the nearest there is. Sizes, times and bandwidths do not enter. The three numbers are tuned on a count of
bytes, in which all stay below 0.9 of what parameters leave of the device and a swap-out takes one level: first the
largest threshold that fits with the latest swap-in and no sharing (if not even the smallest does, swap-outs and then
swap-ins too are made synchronous), then the largest `ahead`, then the largest `groupby`, all by bisection.

Certain: levels, edges, the trigger's search, the order of tuning and the 0.9 (the authors' code). Default, not verified:
a swap-in without any such op begins as soon as the tensor is out.

Where the port differs. In a step that was recorded every op depends on the one before: what passes between ops without
being saved is no tensor of the trace. Traces hold no shapes, so the limit to tensors of rank 2 or more falls away. Ops
keep their order: a trigger is the last op of its level in that order, and bytes are counted per op, not per level. One
level for a swap-out is one op here, after which it is awaited. When host memory is full, tensors go to the NVMe, or
stay.

On the ten ops of tests/golden/ten_ops.py. a is read 7 levels after it is made, b 5 and c 3. In both problems a and b
have to leave, at once; the swap-ins begin as many levels ahead as the count of bytes allows, in B one less.
* tflms: A `a>h 2-2, a<h 5-7, b>h 3-3, b<h 4-6`; B `a>h 2-2, a<h 6-7, b>h 3-3, b<h 5-6`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tieroff.core.plan import Plan
from tieroff.core.tensor import TensorClass
from tieroff.core.trace import Trace
from tieroff.planner.policy import policy
from tieroff.planner.problem.assemble import Move, build_plan
from tieroff.planner.problem.problem import LowerRoom, Problem, Slot
from tieroff.study.policies.shared.copies import usage_without

_MEMORY_SHARE = 0.9
_LEVELS_BACK = 10
_SYNC_MODES = range(4)  # bit 0: swap-outs are synchronous; bit 1: swap-ins are


@dataclass(frozen=True, slots=True)
class _Setting:
    threshold: int
    ahead: int
    groupby: int
    sync_mode: int = 0


@policy("tflms", paper="Le et al., ISMM 2019", published=True)
def plan_tflms(problem: Problem) -> Plan:
    """Returns the plan of the tuned setting; it may be over the device's budget."""
    if problem.fits:
        return build_plan(problem, "tflms", [], {})
    tuner = _Tuner(problem)
    setting = tuner.tune()
    moves = tuner.moves(setting)
    return build_plan(problem, "tflms", moves, tuner.tier_of, copies_early=not setting.sync_mode & 1)


class _Graph:
    """The levels of a trace's ops, and which ops each depends on, as bits."""

    def __init__(self, trace: Trace) -> None:
        self.level: list[int] = []
        self._before: list[int] = []
        self._in_level: list[int] = []
        writer: dict[int, int] = {}
        for index, op in enumerate(trace.ops):
            sources = {writer[tensor] for tensor in (*op.reads, *op.writes) if tensor in writer}
            if index and trace.origin != "file":  # what ops hand on without saving it is not recorded
                sources.add(index - 1)
            level = 1 + max((self.level[source] for source in sources), default=-1)
            before = 0
            for source in sources:
                before |= self._before[source] | 1 << source
            self.level.append(level)
            self._before.append(before)
            if level == len(self._in_level):
                self._in_level.append(0)
            self._in_level[level] |= 1 << index
            writer.update(dict.fromkeys(op.writes, index))

    @property
    def level_count(self) -> int:
        """Number of levels."""
        return len(self._in_level)

    def trigger(self, op: int, ahead: int, lowest: int) -> int:
        """Returns the last op of the nearest level that `op` depends on, or -1; see the rule."""
        highest = self.level[op] - ahead
        for level in range(highest, max(highest - _LEVELS_BACK, lowest - 1), -1):
            found = self._in_level[level] & self._before[op]
            if found:
                return found.bit_length() - 1
        return -1


class _Tuner:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._graph = _Graph(problem.trace)
        tensors = problem.trace.tensors
        room = LowerRoom(problem)
        self._slots: list[Slot] = []
        for slot in sorted((s for unit in problem.units for s in unit.slots), key=lambda s: (s.start, s.tensor)):
            tensor = tensors[slot.tensor]
            if tensor.kind is not TensorClass.ACTIVATION or tensor.is_persistent or slot.is_last:
                continue
            if slot.stop > slot.start + 1 and room.place((slot.tensor,), problem.tiers):
                self._slots.append(slot)
        self.tier_of = room.tier_of
        parameters = sum(t.size_bytes for t in tensors if t.kind is TensorClass.PARAMETER)
        self._limit = parameters + _MEMORY_SHARE * (problem.device_bytes - parameters)

    def tune(self) -> _Setting:
        """Returns the setting; see the rule."""
        top = self._graph.level_count
        if self._fits(_Setting(top, 1, 0)):
            return _Setting(top, 1, 0)
        mode = next((mode for mode in _SYNC_MODES if self._fits(_Setting(1, 1, 0, mode))), None)
        if mode is None:
            return _Setting(1, 1, 0, max(_SYNC_MODES))
        threshold = _largest(top, lambda value: self._fits(_Setting(value, 1, 0, mode)))
        ahead = _largest(top, lambda value: self._fits(_Setting(threshold, value, 0, mode)))
        groupby = _largest(top, lambda value: self._fits(_Setting(threshold, ahead, value, mode)), least=0)
        return _Setting(threshold, ahead, groupby, mode)

    def _fits(self, setting: _Setting) -> bool:
        return int(usage_without(self._problem, self.moves(setting)).max()) <= self._limit

    def moves(self, setting: _Setting) -> list[Move]:
        """Returns what is swapped, and when."""
        level, lifetimes = self._graph.level, self._problem.trace.lifetimes
        moves: list[Move] = []
        for slot in self._slots:
            made = level[lifetimes[slot.tensor].birth]
            is_far = level[slot.stop] - made > setting.threshold
            last_level = level[slot.start - 1]
            is_shared = last_level - made > setting.threshold and level[slot.stop] - last_level < setting.groupby
            if not is_far or is_shared:
                continue
            release = slot.start if setting.sync_mode & 1 else slot.start + 1
            load = slot.stop
            if not setting.sync_mode & 2:
                load = 1 + self._graph.trigger(slot.stop, setting.ahead, made + 1)
            moves.append(Move(slot, release, min(max(load, release + 1), slot.stop)))
        return moves


def _largest(top: int, fits: Callable[[int], bool], least: int = 1) -> int:
    """Returns the largest value in [least, top] found by bisection, given that `least` fits."""
    if fits(top):
        return top
    low, high = least, top
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
