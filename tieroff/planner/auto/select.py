"""Which units leave the device: greedy choice by a score over the pressure line, then pruning.

The pressure at an op is what lies on the device there above the line (a share of the budget). A unit relieves an op by
its bytes at most, and by the pressure at most. Its relief is the sum of that over its idle ops, times their duration.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from tieroff.core.tensor import Tier
from tieroff.planner.native import _native
from tieroff.planner.problem.assemble import last_dirty_writes
from tieroff.planner.problem.problem import Bytes, LowerRoom, Problem, Slot, Span, Unit, holds_within

Weights = npt.NDArray[np.float64]


class Score(StrEnum):
    """What makes a unit worth moving.

    SLACK: idle time over transfer time, where it relieves anything. TIME: idle time. RELIEF: bytes times time over the
    line. BYTES: bytes at the op of highest pressure. RATIO: relief over the time that its transfers take.
    """

    SLACK = "slack"
    TIME = "time"
    RELIEF = "relief"
    BYTES = "bytes"
    RATIO = "ratio"


_RANKED = (Score.SLACK, Score.TIME)
"""Scores by which the value of a unit that relieves any op does not depend on the pressure."""


@dataclass(frozen=True)
class Selection:
    """The chosen slots and the tier of each tensor; `usage` is the device's bytes at each op with them away."""

    slots: tuple[Slot, ...]
    tier_of: dict[int, Tier]
    usage: Bytes


def idle_ns(problem: Problem, slot: Slot) -> int:
    """Returns the compute time that passes in a slot."""
    starts = problem.starts_ns
    return sum([starts.item(b) - starts.item(a) for a, b in slot.pieces(problem.op_count)])


def transfer_ns(problem: Problem, unit: Unit, tier: Tier) -> int:
    """Returns the time that a unit's transfers take, out and in."""
    total = 0
    for tensor, group in itertools.groupby(unit.slots, attrgetter("tensor")):  # slots of a tensor are neighbours
        slots = list(group)
        out_ns, back_ns = problem.move_ns(tier, problem.size_bytes(tensor))
        copies = len(slots) - last_dirty_writes(problem, slots).count(None)
        total += copies * out_ns + sum([not slot.is_last for slot in slots]) * back_ns
    return total


def _relief(problem: Problem, unit: Unit, over: Bytes, weights: Weights) -> float:
    total = 0.0
    for slot in unit.slots:
        size = problem.size_bytes(slot.tensor)
        for start, stop in slot.pieces(problem.op_count):
            total += float(np.minimum(over[start:stop], size) @ weights[start:stop])
    return total


def _weights(problem: Problem) -> Weights:
    """Returns the duration of each op, and a bit so that ops without one count; bytes times ns overflow integers."""
    return np.diff(problem.starts_ns).astype(np.float64) + 1.0


def pressure_order(problem: Problem) -> list[Unit]:
    """Returns all units, those that relieve the device's budget most per byte below first."""
    over = np.maximum(problem.live - problem.device_bytes, 0)
    weights = _weights(problem)
    keys = []
    for position, unit in enumerate(problem.units):
        size = sum(problem.size_bytes(tensor) for tensor in unit.tensors)
        keys.append((-_relief(problem, unit, over, weights) / size, position))
    return [problem.units[position] for _, position in sorted(keys)]


class _Choice:
    """Units that left so far.

    Attributes:
        chosen: the units by position, in order.
        usage: the device's bytes at each op with them away.
        room: what is left in the lower tiers.
    """

    def __init__(self, problem: Problem, line_bytes: int) -> None:
        self._problem = problem
        self._line_bytes = line_bytes
        self.chosen: list[int] = []
        self.usage = problem.live.copy()
        self.room = LowerRoom(problem)
        self._peak = 0  # an op that was over the line at the last check

    def leave(self, position: int, order: tuple[Tier, ...]) -> bool:
        """Has a unit leave, to the first tier of `order` with room; returns False where none has."""
        if not self.room.place(self._problem.units[position].tensors, order):
            return False
        self.chosen.append(position)
        _native.drop_bytes(self.usage, self._problem.idle_spans[position])
        return True

    def relieves(self, position: int) -> bool:
        """Returns whether any of a unit's idle ops is over the line."""
        return _native.most_bytes(self.usage, self._problem.idle_spans[position]) > self._line_bytes

    def is_over(self) -> bool:
        """Returns whether any op is over the line; scans all ops only when the one found last no longer is."""
        if self.usage.item(self._peak) <= self._line_bytes:
            self._peak = int(self.usage.argmax())
        return self.usage.item(self._peak) > self._line_bytes

    def over(self) -> Bytes:
        """Returns what each op has over the line, in bytes."""
        return np.maximum(self.usage - self._line_bytes, 0)

    def update(self, over: Bytes, position: int) -> None:
        """Brings what `over` returned up to date at the idle ops of a unit that left since."""
        for start, stop, _ in self._problem.idle_spans[position]:
            over[start:stop] = np.maximum(self.usage[start:stop] - self._line_bytes, 0)


class Selector:
    """Chooses units by one score after another on one problem, sharing what does not change."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._weights = _weights(problem)
        self._idle_ns = [max(idle_ns(problem, slot) for slot in unit.slots) for unit in problem.units]
        tensors = problem.trace.tensors
        self._is_persistent = [tensors[unit.slots[0].tensor].is_persistent for unit in problem.units]

    @cached_property
    def _transfer_ns(self) -> list[int]:
        """Per unit the time of its transfers in the first tier; only some scores ask for it."""
        problem = self._problem
        return [max(1, transfer_ns(problem, unit, problem.tiers[0])) for unit in problem.units]

    def value(self, score: Score, position: int, over: Bytes) -> float:
        """Returns what a unit is worth by a score: `over` is what each op has over the line, in bytes."""
        unit = self._problem.units[position]
        if score in _RANKED:
            is_worth = _native.most_bytes(over, self._problem.idle_spans[position]) > 0
            return self.rank(score, position) if is_worth else 0.0
        relief = _relief(self._problem, unit, over, self._weights)
        if relief <= 0.0:
            return 0.0
        if score is Score.RELIEF:
            return relief
        if score is Score.RATIO:
            return relief / self._transfer_ns[position]
        peak = int(np.argmax(over))
        pieces = [(slot, piece) for slot in unit.slots for piece in slot.pieces(self._problem.op_count)]
        at_peak = sum(self._problem.size_bytes(s.tensor) for s, (a, b) in pieces if a <= peak < b)
        return at_peak + relief / (1.0 + float(over.max()) * float(self._weights.sum()))

    def rank(self, score: Score, position: int) -> float:
        """Returns the value of a unit by a score that does not depend on what has left already."""
        return self._idle_ns[position] / (self._transfer_ns[position] if score is Score.SLACK else 1)

    def choose(
        self, score: Score, line_bytes: int, order: tuple[Tier, ...], reluctance: float = 1.0
    ) -> tuple[list[Unit], Bytes, dict[int, Tier]] | None:
        """Returns units whose absence brings every op under the line, or None if the score finds none.

        With them come the usage that is left and the tier of each tensor. `reluctance` divides the value of
        persistent tensors: their transfers crowd at the step's ends and in the optimizer, where little hides them.

        Tensors take the first tier of `order` that has room. By some scores a unit's value does not depend on what
        has left already: one pass takes them in order. Other values only fall as the pressure falls (for BYTES nearly
        so), so a heap with values of an earlier round gives the best unit after few evaluations.
        """
        choice = self._choose(score, line_bytes, order, reluctance, {})
        if choice is None:
            return None
        return [self._problem.units[position] for position in choice.chosen], choice.usage, choice.room.tier_of

    def _choose(
        self, score: Score, line_bytes: int, order: tuple[Tier, ...], reluctance: float, first: Mapping[int, Tier]
    ) -> _Choice | None:
        choice = _Choice(self._problem, line_bytes)
        for position, tier in first.items():
            choice.leave(position, (tier, *(other for other in order if other is not tier)))
        weight = [1.0 / reluctance if is_persistent else 1.0 for is_persistent in self._is_persistent]
        waiting = [position for position in range(len(self._problem.units)) if position not in first]
        if score in _RANKED:
            ranked = sorted((-self.rank(score, p) * weight[p], p) for p in waiting)
            for _, position in ranked:
                if not choice.is_over():
                    break
                if choice.relieves(position):
                    choice.leave(position, order)
        else:
            self._leave_by_value(choice, score, waiting, weight, order)
        return None if choice.is_over() else choice

    def _leave_by_value(
        self, choice: _Choice, score: Score, waiting: list[int], weight: list[float], order: tuple[Tier, ...]
    ) -> None:
        """Has units leave whose value changes as others do, the one of highest value first."""
        over = choice.over()
        heap = [(-self.value(score, p, over) * weight[p], p) for p in waiting]
        heap = [entry for entry in heap if entry[0] < 0]
        heapq.heapify(heap)
        while heap and over.any():
            _, position = heapq.heappop(heap)
            value = self.value(score, position, over) * weight[position]
            if value <= 0:
                continue
            if heap and -value > heap[0][0]:
                heapq.heappush(heap, (-value, position))
                continue
            if choice.leave(position, order):
                choice.update(over, position)

    def select(
        self,
        score: Score,
        line_bytes: int,
        order: tuple[Tier, ...],
        reluctance: float = 1.0,
        first: Mapping[int, Tier] | None = None,
    ) -> Selection | None:
        """Returns the slots that `choose` finds, less those that turn out not to be needed, or None.

        The units in `first`, by position, go before all others, each to its tier where that has room.
        """
        choice = self._choose(score, line_bytes, order, reluctance, first or {})
        if choice is None:
            return None
        return Selection(tuple(self._prune(choice.chosen, choice.usage, line_bytes)), choice.room.tier_of, choice.usage)

    def _prune(self, chosen: list[int], usage: Bytes, line_bytes: int) -> list[Slot]:
        """Takes back, last choice first, whole units and then inner gaps that the line does not need away."""
        kept: list[Slot] = []
        for position in reversed(chosen):
            if holds_within(usage, self._problem.idle_spans[position], line_bytes):
                continue
            unit = self._problem.units[position]
            leaving = _leaving(unit.slots, self._problem.tied)
            for slot in unit.slots:
                is_optional = unit.is_split and not slot.is_boundary and slot not in leaving
                if not (is_optional and self.takes_back((slot,), usage, line_bytes)):
                    kept.append(slot)
        return kept

    def takes_back(self, slots: tuple[Slot, ...], usage: Bytes, line_bytes: int) -> bool:
        """Returns whether slots that are away may stay under the line; adds their bytes to the usage if so."""
        problem = self._problem
        spans: list[Span] = [(*p, problem.size_bytes(s.tensor)) for s in slots for p in s.pieces(problem.op_count)]
        return holds_within(usage, spans, line_bytes)


def _leaving(slots: Iterable[Slot], tied: Container[int]) -> set[Slot]:
    """Returns the slots without which a tied tensor would not leave at all: of each that no boundary has away its longest."""
    crossing = {slot.tensor for slot in slots if slot.is_boundary}
    longest: dict[int, Slot] = {}
    for slot in slots:
        if slot.tensor in tied and slot.tensor not in crossing:
            known = longest.setdefault(slot.tensor, slot)
            if slot.stop - slot.start > known.stop - known.start:
                longest[slot.tensor] = slot
    return set(longest.values())
