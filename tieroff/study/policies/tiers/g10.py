"""`g10`: the offline greedy of G10 (Zhang et al., MICRO 2023), over device, host and SSD, with all tensors.

The rule. A gap is worth its bytes times the time in it during which the device is over its budget, counted from where
half of the tensor would be out to where half of it has to be on its way back, by what earlier choices left of the SSD's
bandwidth. The best gap is taken next (ties: bytes times idle time), until no op is over the line, a share of the budget:
* one shorter than `_SAFE` transfers to the SSD goes to the host, if there is room and it is longer than `_SAFE` transfers
  there; else it is kept;
* a longer one goes to the SSD, but to the host if it has room and the SSD's link is full for as long as the tensor alone
  would take to leave;
* it leaves at the gap's start, and its way back starts at the last op that is in time. If the first would not be over by
  then, the tensor is kept. A gap round the step's end goes by the link's speed alone and takes nothing from others.
At the end every load within the step is issued as much earlier as the line leaves room.

Verified in the authors' artifact: all of the above, the line, the margin, the system's latency, that everything is
written when it leaves, and that where a gap round the end meets an op 0 over its budget, a whole step is taken off the
time that it relieves (so weights that fill the device on their own are not planned to leave). A default, not verified:
the order among equals.

What the greedy leaves over the budget was paged by the authors' simulated driver: page by page, the least recently used
first, to the host, while the kernel that misses a page runs on. Here `overflow` pages whole tensors, each fetch ahead of
the op that waits for it, so what misses much is slower here; and a fault costs nothing but the transfer, as does the
first touch of an output, so a plan without misses is faster here than published.

Further differences: a tensor whose copy is late stays where nothing needs its room (a driver frees what is out); loads
are issued early only into room that is there, where theirs may push out other pages; allocation takes no time. Where the
executor asks for whole tensors (gradients that follow, or nothing across the step's end), a unit goes by its first gap,
and a tensor has one tier below and its room there for all of its life.

On the ten ops of tests/golden/ten_ops.py. In A n is worth most, and its 5 MiB bring op 3 under the line alone; it goes
to the NVMe, which has time. In B op 3 is over by 2 more, and m is worth most of what is left.
* g10: A `n>s 0-3, n<s 7-9`; B `m<s 6-8, m>s 9-10, n>s 0-3, n<s 7-9`
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tieroff.core.plan import Plan
from tieroff.core.tensor import Tier
from tieroff.planner.auto.select import idle_ns
from tieroff.planner.policy import Assumptions, policy
from tieroff.planner.problem.assemble import build_plan
from tieroff.planner.problem.problem import Problem, Slot, Unit
from tieroff.planner.simulate.options import SimulationOptions
from tieroff.study.policies.shared.ledger import Amounts, Ledger
from tieroff.study.policies.shared.overflow import Moves, least_recent

OPTIONS = SimulationOptions(writes_clean=True)
"""What the authors' simulator does with the plan."""

_LINE = 0.99  # of the device's budget
_DELTA = 0.5  # margin of a transfer's estimate
_SAFE = 2.0 + _DELTA
_SYSTEM_LATENCY_NS = 45_000  # of every transfer, besides the link's own


@dataclass(frozen=True, slots=True)
class _Window:
    """Where a chosen gap's tensor is away: [release_at, load_at) on the line of the ring."""

    slot: Slot
    release_at: int
    load_at: int
    is_booked: bool


class _G10Greedy:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._starts = problem.starts_ns
        self._line_bytes = int(_LINE * problem.device_bytes)
        self._ledger = Ledger(problem)
        self.moves = Moves(problem)
        slots = [(position, slot) for position, unit in enumerate(problem.units) for slot in unit.slots]
        self._owner = np.array([position for position, _ in slots], np.int64)
        self._start = np.array([slot.start for _, slot in slots], np.int64)
        self._stop = np.array([slot.stop for _, slot in slots], np.int64)
        self._wraps = np.array([slot.is_boundary for _, slot in slots], np.bool_)
        self._size = np.array([problem.size_bytes(slot.tensor) for _, slot in slots], np.float64)
        idle = np.array([idle_ns(problem, slot) for _, slot in slots], np.float64)
        self._tie = np.bincount(self._owner, self._size * idle, len(problem.units))
        self._is_open = np.ones(len(problem.units), np.bool_)
        self._early: list[_Window] = []

    def run(self) -> None:
        """Chooses gaps until no op is over the line, or none is worth it."""
        while int(self.moves.usage.max()) > self._line_bytes:
            values = np.where(self._is_open, self._values(), 0.0)
            best = float(values.max(initial=0.0))
            if best <= 0.0:
                break
            ties = np.flatnonzero(values == best)
            position = int(ties[np.argmax(self._tie[ties])])
            self._is_open[position] = False
            self._take(self._problem.units[position])

    def _values(self) -> Amounts:
        """Returns what each unit is worth now, in bytes times ns."""
        count = self._problem.op_count
        is_over = self.moves.usage > self._problem.device_bytes
        over = np.concatenate(([0.0], np.cumsum(np.tile(is_over * np.diff(self._starts), 2))))
        tier = self._problem.tiers[-1]
        out, back = self._ledger.prefix(tier, leaves=True), self._ledger.prefix(tier, leaves=False)
        half = self._size // 2
        first = np.searchsorted(out, out[self._start] + half) - 1
        last = np.searchsorted(back, back[self._stop] - half, "right") - 1
        first, last = np.clip(first, self._start, self._stop), np.clip(last, self._start, self._stop)
        inner = np.maximum(over[last] - over[first], 0.0)
        whole = over[self._stop] - over[self._start]
        whole = whole - (self._stop > count) * is_over[0] * float(self._starts[-1])
        values = self._size * np.where(self._wraps, whole, inner)
        return np.bincount(self._owner, values, len(self._problem.units)).astype(np.float64)

    def _take(self, unit: Unit) -> None:
        """Places a unit and moves those of its slots that the rule accepts; nothing if it accepts none."""
        for tier in self._preferred(unit):
            windows = [window for slot in unit.slots if (window := self._window(slot, tier)) is not None]
            if not windows:
                return
            if not self.moves.place(unit, (tier,)):
                continue
            for window in windows:
                self._commit(window, tier)
            self.moves.put_rest(unit)
            return

    def _preferred(self, unit: Unit) -> tuple[Tier, ...]:
        """Returns the tiers that the rule allows a unit by its first gap, the first choice first."""
        problem, slot, placed = self._problem, unit.slots[0], self.moves.tier_of(unit)
        idle = idle_ns(problem, slot)
        tiers = tuple(tier for tier in problem.tiers if idle > _SAFE * self._estimate_ns(slot.tensor, tier))
        if placed is not None:
            return (placed,) if placed in tiers else ()
        if Tier.NVME not in tiers or slot.is_boundary:
            return tiers[::-1]
        ideal_ns = int(self._starts[slot.start]) + self._estimate_ns(slot.tensor, Tier.NVME)
        clear = int(np.searchsorted(self._starts, ideal_ns, "right")) - 1
        return tiers if self._ledger.is_full(Tier.NVME, slot.start, clear) else tiers[::-1]

    def _estimate_ns(self, tensor: int, tier: Tier) -> int:
        return _SYSTEM_LATENCY_NS + self._problem.links(tier)[0].transfer_ns(self._problem.size_bytes(tensor))

    def _window(self, slot: Slot, tier: Tier) -> _Window | None:
        problem = self._problem
        if slot.stop - slot.start <= 1 or slot.is_last:
            return _Window(slot, slot.start, slot.stop, False) if slot.is_last else None
        size = problem.size_bytes(slot.tensor)
        if slot.is_boundary:
            line = np.concatenate((self._starts, self._starts[1:] + self._starts[-1]))
            estimate = self._estimate_ns(slot.tensor, tier)
            clear = int(np.searchsorted(line, line[slot.start] + estimate, "right")) - 1
            load = int(np.searchsorted(line, line[slot.stop] - int((1 + _DELTA) * estimate), "right")) - 1
        else:
            clear = self._ledger.finish(tier, slot.start, slot.stop, size)
            load = self._ledger.latest(tier, slot.start, slot.stop, size)
        return _Window(slot, clear + 1, load, not slot.is_boundary) if load > clear + 1 else None

    def _commit(self, window: _Window, tier: Tier) -> None:
        self.moves.put(window.slot, window.release_at, window.load_at)
        if not window.is_booked:
            return
        size = self._problem.size_bytes(window.slot.tensor)
        self._ledger.book(tier, window.slot.start, size, leaves=True)
        self._ledger.book(tier, window.load_at, size, leaves=False)
        self._early.append(window)

    def load_early(self) -> None:
        """Issues loads within the step earlier, the first one first, as far as the line has room."""
        problem, usage = self._problem, self.moves.usage
        for window in sorted(self._early, key=lambda w: (w.load_at, w.slot.tensor)):
            size, load = problem.size_bytes(window.slot.tensor), window.load_at
            while load > window.release_at and usage[load - 1] + size <= self._line_bytes:
                load -= 1
            self.moves.put(window.slot, window.release_at, max(load, window.release_at + 1))


@policy(
    "g10",
    paper="Zhang et al., MICRO 2023",
    published=True,
    options=OPTIONS,
    assumes=Assumptions(has_faults=True, has_pages=True),
)
def plan_g10(problem: Problem) -> Plan:
    """Returns G10's plan; it may be over the device's budget, which the caller checks."""
    if problem.fits or not problem.units:
        return build_plan(problem, "g10", [], {})
    greedy = _G10Greedy(problem)
    greedy.run()
    greedy.load_early()
    greedy.moves.evict_where_over(problem.tiers, least_recent)
    greedy.moves.stay_while_copied()
    return greedy.moves.plan("g10")
