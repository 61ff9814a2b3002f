"""`teraio`: TeraIO's offline greedy (NeurIPS 2025, arXiv 2506.06472): GPUDirect to the SSD first, host memory second.

The rule. Pressure is what lies on the device over its capacity. A gap's benefit is the pressure that it takes away, in
bytes times time, capped by the pressure itself, from where its write would be done by what is planned so far to the last
start that lets its read be in time. Its cost is the time that both transfers take. The gap with the highest ratio goes
next, and its traffic is booked; to the SSD, or to the host where the SSD's links have no time for it within the gap. That
ends when no pressure is left, or no gap takes any away.

Verified in the paper: benefit, cost, ratio, the order of tiers, and that kernels wait where pressure is left, with what
the next one needs served before all else. Defaults, not verified (no code is published): ties go to the earlier gap;
links are booked round the ring; what is clean is dropped without a write; where pressure is left, more gaps go by the
same ratio as if their transfers took no time.

The port gives the chosen gaps times by the sweep of `windows`: a tensor leaves when its copy is done, or when an op needs
the room, which then waits; loads go in order of deadline, so what the next op needs is served before what is not urgent.
A tensor has one tier below.

On the ten ops of tests/golden/ten_ops.py. The ratio is the same for all that relieve no more than what is over; w has
the earlier gap. Of the 3 MiB left in A, a relieves all in the least time: the SSD has no time for it within its gap,
and the host takes half as long. In B, where the host is slower, m and v follow w to the SSD.
* teraio: A `a>h 1-2, a<h 6-7, w<s 6-7, w>s 9-11`; B `m<s 7-8, m>s 9-10, v>s 0-3, v<s 5-6, w<s 6-7, w>s 9-12`
"""

from __future__ import annotations

import heapq

import numpy as np

from tieroff.core.plan import Plan
from tieroff.core.tensor import Tier
from tieroff.planner.auto.select import Selection, transfer_ns
from tieroff.planner.auto.windows import make_moves
from tieroff.planner.policy import policy
from tieroff.planner.problem.assemble import build_plan
from tieroff.planner.problem.problem import LowerRoom, Problem, Slot, Unit
from tieroff.study.policies.shared.ledger import Ledger

_Window = tuple[Slot, int, int]


class _TeraIoGreedy:
    """The choice of gaps. `whole` is what is on the device with the chosen ones away from their start to their end."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._ledger = Ledger(problem)
        self._durations = np.tile(np.diff(problem.starts_ns), 2).astype(np.float64) + 1.0  # ops without a time count too
        self._planned = problem.live.copy()
        self._is_open = [True] * len(problem.units)
        self._without_room: set[tuple[int, Tier]] = set()
        self.whole = problem.live.copy()
        self.room = LowerRoom(problem)
        self.slots: list[Slot] = []

    def run(self, *, is_timed: bool) -> None:
        """Chooses units until there is no pressure, or none takes any away; times count, or whole gaps if not `is_timed`.

        What a unit is worth falls as the pressure does and as links fill, so only the first of the heap is asked again.
        """
        usage = self._planned if is_timed else self.whole
        positions = [position for position, is_open in enumerate(self._is_open) if is_open]
        heap = [(-self._best(position, is_timed)[0], position) for position in positions]
        heap = [entry for entry in heap if entry[0] < 0.0]
        heapq.heapify(heap)
        while heap and int(usage.max()) > self._problem.device_bytes:
            _, position = heapq.heappop(heap)
            value, tier, windows = self._best(position, is_timed)
            if value <= 0.0:
                continue
            if heap and value < -heap[0][0]:
                heapq.heappush(heap, (-value, position))
            elif self.room.place(self._problem.units[position].tensors, (tier,)):
                self._is_open[position] = False
                self._commit(self._problem.units[position], tier, windows)
            else:
                self._without_room.add((position, tier))
                heapq.heappush(heap, (-value, position))

    def _best(self, position: int, is_timed: bool) -> tuple[float, Tier, list[_Window]]:
        """Returns benefit over cost, the tier and the windows of a unit; 0 where it takes no pressure away."""
        unit, tiers = self._problem.units[position], self._problem.tiers[::-1]
        placed = self.room.tier_of.get(unit.tensors[0])
        for tier in tiers if placed is None else (placed,):
            if (position, tier) in self._without_room:
                continue
            windows = [w for slot in unit.slots if (w := self._window(slot, tier, is_timed)) is not None]
            value = sum(self._relief(*window, is_timed) for window in windows) / max(1, transfer_ns(self._problem, unit, tier))
            if value > 0.0:
                return value, tier, windows
        return 0.0, tiers[0], []

    def _window(self, slot: Slot, tier: Tier, is_timed: bool) -> _Window | None:
        if not is_timed:
            return slot, slot.start, slot.stop
        size = self._problem.size_bytes(slot.tensor)
        done = self._ledger.finish(tier, slot.start, slot.stop, size) + 1
        load = slot.stop if slot.is_last else self._ledger.latest(tier, slot.start, slot.stop, size)
        return (slot, done, load) if done < load else None

    def _relief(self, slot: Slot, release_at: int, load_at: int, is_timed: bool) -> float:
        over = np.maximum((self._planned if is_timed else self.whole) - self._problem.device_bytes, 0)
        span = np.take(over, np.arange(release_at, load_at), mode="wrap")
        return float(np.minimum(span, self._problem.size_bytes(slot.tensor)) @ self._durations[release_at:load_at])

    def _commit(self, unit: Unit, tier: Tier, windows: list[_Window]) -> None:
        count, chosen = self._problem.op_count, {window[0]: window for window in windows}
        for slot in unit.slots:
            if slot not in chosen and unit.is_split and not slot.is_boundary and slot.tensor not in self._problem.tied:
                continue
            size = self._problem.size_bytes(slot.tensor)
            self.slots.append(slot)
            for start, stop in slot.pieces(count):
                self.whole[start:stop] -= size
            if slot not in chosen:
                continue
            _, release_at, load_at = chosen[slot]
            np.subtract.at(self._planned, np.arange(release_at, load_at) % count, size)
            self._ledger.book(tier, slot.start, size, leaves=True)
            if not slot.is_last:
                self._ledger.book(tier, load_at, size, leaves=False)


@policy("teraio", paper="TeraIO, NeurIPS 2025", published=True)
def plan_teraio(problem: Problem) -> Plan:
    """Returns TeraIO's plan; it may be over the device's budget, which the caller checks."""
    if problem.fits or not problem.units:
        return build_plan(problem, "teraio", [], {})
    greedy = _TeraIoGreedy(problem)
    greedy.run(is_timed=True)
    greedy.run(is_timed=False)
    selection = Selection(tuple(greedy.slots), greedy.room.tier_of, greedy.whole)
    moves = make_moves(problem, selection, 0)
    return build_plan(problem, "teraio", moves, selection.tier_of)
