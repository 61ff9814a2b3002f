"""Recomputing a tensor from what is on the device: which ops run again, and what they need room for."""

from __future__ import annotations

from dataclasses import dataclass, field

from tieroff.core.trace import Queue
from tieroff.planner.problem.assemble import Move
from tieroff.planner.problem.problem import Problem

_OPS_AT_MOST = 64  # in one lineage


@dataclass(slots=True)
class Lineage:
    """Ops that run again to make a tensor, and the tensors that are on the device for that tick alone.

    Attributes:
        ops: each once.
        passing: tensors that these write and that are away or dead at the tick.
        cost_ns: duration of the ops.
        passing_bytes: of the passing tensors.
    """

    ops: set[int] = field(default_factory=set)
    passing: set[int] = field(default_factory=set)
    cost_ns: int = 0
    passing_bytes: int = 0


class Lineages:
    """Finds lineages beside windows that change: `away` has one move per tensor that leaves the device.

    A tensor is there at a tick when it lives and is not in its window; while it is being loaded it is of no use.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._tensors = problem.trace.tensors
        self._lifetimes = problem.trace.lifetimes
        self.away: dict[int, Move] = {}

    def find(self, tensor: int, tick: int) -> Lineage | None:
        """Returns what makes a tensor again at a tick, or None if that cannot be done op by op."""
        found = Lineage()
        return found if self._add(tensor, tick, found, tensor) else None

    def _add(self, tensor: int, tick: int, found: Lineage, target: int) -> bool:
        life = self._lifetimes[tensor]
        op_index = life.birth
        ops = self._problem.trace.ops
        if len(life.writes) != 1 or op_index >= tick or tensor not in ops[op_index].writes:
            return False
        if op_index in found.ops:
            return True
        if len(found.ops) >= _OPS_AT_MOST:
            return False
        op = ops[op_index]
        if op.queue is Queue.COMMUNICATION:
            return False
        found.ops.add(op_index)
        found.cost_ns += op.duration_ns
        for output in set(op.writes):
            if self._tensors[output].is_persistent or output in op.reads or len(self._lifetimes[output].writes) != 1:
                return False
            state = self._state(output, tick)
            if state == "loading":
                return False
            if state == "away" and output != target and output not in found.passing:
                found.passing.add(output)
                found.passing_bytes += self._tensors[output].size_bytes
        for source in sorted(set(op.reads)):
            if any(op_index < write < tick for write in self._lifetimes[source].writes):
                return False
            state = self._state(source, tick)
            if state == "loading" or (state == "away" and not self._add(source, tick, found, target)):
                return False
        return True

    def _state(self, tensor: int, tick: int) -> str:
        """Returns "there", "away" or "loading"."""
        life = self._lifetimes[tensor]
        if not life.birth <= tick < life.death:
            return "away"
        move = self.away.get(tensor)
        if move is None or not move.release_at <= tick < move.slot.stop:
            return "there"
        return "away" if tick < move.load_at else "loading"
