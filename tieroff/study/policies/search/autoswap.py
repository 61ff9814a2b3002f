"""`autoswap` and `autoswap-{doa,aoa,wdoa,swdoa}`: Zhang et al. 2019, SmartPool and AutoSwap (arXiv 1903.06631).

What is known comes from the authors' code in Apache SINGA of 2018, but for what is marked.

Rule. The load is the bytes live at each event, the peak its highest point (the first one). Candidates are absences of
tensors of at least 1 MB between two uses in a row, r before and d after the peak. Each has four scores:

* DOA, duration of absence: t(d) - t(r).
* AOA, area of absence: with s = DOA - 2 x (time of the copy out), s x size if s >= 0, else s / size.
* WDOA, weighted duration: the sum of load - limit over the events in [r, d).
* SWDOA, submodular: the sum over the same events of max(0, load - limit), with the load that the choices so far leave: a
  choice gains nothing where the limit is met already (this score, and the names of all: defaults, not verified).

Candidates are taken by score until the load is at most the limit everywhere. `autoswap` takes them by a weighted sum
of the four, each over its largest magnitude. Its weights come from a search for the fastest simulated step: here the
single scores, equal weights, a number of random weights and then changes to the best ones, 50 plans in all or fewer on
large traces, with a fixed seed; the best so far is the result. The paper uses Bayesian optimisation; that the scores
are normalised so and the number of plans are defaults, not verified.

Times: copies out go one after the other in order of r, each from its last use. Where the load would pass the limit
before a copy is done, the release is put there and the step waits. Copies in are laid from the last d to the first, each
to end at its d or where the next one begins, none before the op after the peak; where the load would pass the limit, the
copy in begins after it, and the step waits. Every copy out is made, also of what was not written since (`OPTIONS`).

On the ten ops of tests/unit/policies/test_policies_search.py, which works the scores out, each score takes another tensor. Ties
go to the first candidate.

SmartPool, the paper's allocator with planned addresses, is `tieroff.planner.layout.pack` here, with a better search
than its single first fit; plans count bytes. Differences: the machine's links stand in for the line that the authors fitted
to their own; absences may wrap round the step; the drive follows where the host is full; where the executor ties slots
together they count as one candidate whose scores are the sums over those that cross the peak. As published, only
what crosses the single peak is moved: where that is not enough, the plan is over the budget.

On the ten ops of tests/golden/ten_ops.py. The peak is op 3. m and n are away for longest, 65 ms both, and m is the
first: DOA takes both. AOA takes n, the largest area, which is enough in A; in B, where copies take longer, m and then
n. WDOA takes v and b: load less limit sums up to 1 over their absences in A and to 7 in B, to less over all others. Of
what is over the limit all relieve the same, so SWDOA takes the first ones, w, v and m. The search finds that DOA hides
everything in A, and nothing faster than SWDOA's choice in B.
* autoswap: A `m<h 7-8, m>h 9-10, n>h 0-2, n<h 8-9`; B `m<h 6-8, m>h 9-12, v>h 3-3, v<h 4-6, w>h 1-3, w<h 5-7`
* autoswap-doa: A `m<h 7-8, m>h 9-10, n>h 0-2, n<h 8-9`; B `m<h 4-8, m>h 9-12, n>h 0-3, n<h 6-9`
* autoswap-aoa: A `n>h 0-2, n<h 8-9`; B `m<h 4-8, m>h 9-12, n>h 0-3, n<h 6-9`
* autoswap-wdoa: A `b>h 3-3, b<h 4-6, v>h 3-3, v<h 5-6`; B `b>h 3-3, b<h 5-6, v>h 3-3, v<h 4-6`
* autoswap-swdoa: A `m<h 7-8, m>h 9-10, v>h 3-3, v<h 5-6, w>h 1-2, w<h 6-7`; B `m<h 6-8, m>h 9-12, v>h 3-3, v<h 4-6, w>h
  1-3, w<h 5-7`
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tieroff.core.plan import Plan
from tieroff.core.tensor import Tier
from tieroff.planner.auto.select import idle_ns
from tieroff.planner.policy import policy
from tieroff.planner.problem.assemble import Move, build_plan
from tieroff.planner.problem.problem import Bytes, LowerRoom, Problem, Slot, Unit
from tieroff.planner.simulate.options import SimulationOptions
from tieroff.planner.simulate.simulator import simulate
from tieroff.study.policies.shared.swaps import double_starts_ns, none_empty, take_away, with_companions, with_copies_at_gaps

log = logging.getLogger("tieroff")

OPTIONS = SimulationOptions(writes_clean=True)

MIN_BYTES = 2**20  # verified
SEARCH_PLANS = 50  # default, not verified
_SEARCH_WORK = 250_000  # ops and units looked at, all plans together
_SEARCH_PLANS_AT_LEAST = 8
_SEED = 0

Reals = npt.NDArray[np.float64]
DOA, AOA, WDOA, SWDOA = np.eye(4)


@policy("autoswap-doa", paper="Zhang et al., arXiv 2019", published=True, options=OPTIONS)
def plan_autoswap_doa(problem: Problem) -> Plan:
    """Returns the plan that takes the longest absences first."""
    return _Absences(problem).plan("autoswap-doa", DOA)


@policy("autoswap-aoa", paper="Zhang et al., arXiv 2019", published=True, options=OPTIONS)
def plan_autoswap_aoa(problem: Problem) -> Plan:
    """Returns the plan that takes the largest areas of absence first."""
    return _Absences(problem).plan("autoswap-aoa", AOA)


@policy("autoswap-wdoa", paper="Zhang et al., arXiv 2019", published=True, options=OPTIONS)
def plan_autoswap_wdoa(problem: Problem) -> Plan:
    """Returns the plan that takes absences by how far over the limit the load is meanwhile."""
    return _Absences(problem).plan("autoswap-wdoa", WDOA)


@policy("autoswap-swdoa", paper="Zhang et al., arXiv 2019", published=True, options=OPTIONS)
def plan_autoswap_swdoa(problem: Problem) -> Plan:
    """Returns the plan of the same score on the load that earlier choices leave."""
    return _Absences(problem).plan("autoswap-swdoa", SWDOA)


@policy("autoswap", paper="Zhang et al., arXiv 2019", published=True, options=OPTIONS)
def plan_autoswap(problem: Problem) -> Plan:
    """Returns the fastest plan of the mixed scores tried."""
    candidates = _Absences(problem)
    count = max(_SEARCH_PLANS_AT_LEAST, min(SEARCH_PLANS, _SEARCH_WORK // (problem.op_count + len(problem.units) + 1)))
    if count < SEARCH_PLANS:
        log.info("autoswap: a search of %d plans instead of %d; its best is taken", count, SEARCH_PLANS)
    best, best_weights = candidates.plan("autoswap", DOA), DOA
    best_key = _key(problem, best)
    seen = {frozenset(best.transfers)}
    generator = random.Random(_SEED)
    for index in range(1, count):
        weights = _weights(index, index > count // 2, best_weights, generator)
        plan = candidates.plan("autoswap", weights)
        if frozenset(plan.transfers) in seen:
            continue
        seen.add(frozenset(plan.transfers))
        key = _key(problem, plan)
        if key < best_key:
            best, best_weights, best_key = plan, weights, key
    return best


def _weights(index: int, is_local: bool, best: Reals, generator: random.Random) -> Reals:
    if index < 4:
        return np.asarray((DOA, AOA, WDOA, SWDOA)[index])
    if index == 4:
        return np.full(4, 0.25)
    if is_local:
        return np.abs(best + [generator.gauss(0.0, 0.2) for _ in range(4)])
    return np.array([generator.expovariate(1.0) for _ in range(4)])


def _key(problem: Problem, plan: Plan) -> tuple[int, int]:
    over = max(0, plan.peak_bytes[Tier.DEVICE] - problem.device_bytes)
    return over, simulate(plan, problem.trace, problem.machine, OPTIONS).step_ns


@dataclass(frozen=True, slots=True)
class _Absence:
    unit: Unit
    crossing: tuple[Slot, ...]
    leaving: tuple[Slot, ...]


class _Absences:
    """The candidates of a problem with what their scores are made of."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._peak = int(np.argmax(problem.live))
        self._candidates = [] if problem.fits else list(self._find())
        slots = [(index, slot) for index, found in enumerate(self._candidates) for slot in found.crossing]
        pieces = [(index, *piece) for index, slot in slots for piece in slot.pieces(problem.op_count)]
        self._owner, self._first, self._stop = np.array(pieces, np.int64).reshape(-1, 3).T
        self._doa = np.zeros(len(self._candidates))
        self._aoa = np.zeros(len(self._candidates))
        for index, slot in slots:
            size, absence = problem.size_bytes(slot.tensor), idle_ns(problem, slot)
            spare = absence - 2 * problem.links(problem.tiers[0])[0].transfer_ns(size)
            self._doa[index] += absence
            self._aoa[index] += float(spare) * size if spare >= 0 else spare / size

    def _find(self) -> Iterator[_Absence]:
        problem = self._problem
        for unit in problem.units:
            crossing = tuple(slot for slot in unit.slots if self._crosses(slot))
            if any(problem.size_bytes(slot.tensor) >= MIN_BYTES for slot in crossing):
                yield _Absence(unit, crossing, with_companions(problem, unit, crossing))

    def _crosses(self, slot: Slot) -> bool:
        return any(start <= self._peak < stop for start, stop in slot.pieces(self._problem.op_count))

    def plan(self, policy: str, weights: Reals) -> Plan:
        """Returns the plan whose choices are made by a weighted sum of DOA, AOA, WDOA and SWDOA."""
        problem = self._problem
        load = problem.live.copy()
        room = LowerRoom(problem)
        chosen: list[Slot] = []
        is_left = np.ones(len(self._candidates), bool)
        fixed = weights[0] * _scaled(self._doa) + weights[1] * _scaled(self._aoa)
        fixed += weights[2] * _scaled(self._sums(load - problem.device_bytes))
        while is_left.any() and load.max() > problem.device_bytes:
            over = np.maximum(load - problem.device_bytes, 0)
            values = fixed + weights[3] * _scaled(self._sums(over)) if weights[3] else fixed
            index = int(np.argmax(np.where(is_left, values, -np.inf)))
            is_left[index] = False
            candidate = self._candidates[index]
            if room.place(candidate.unit.tensors, problem.tiers):
                chosen += candidate.leaving
                take_away(problem, load, candidate.leaving)
        moves = _Times(problem, self._peak, load, room.tier_of).moves(chosen)
        return with_copies_at_gaps(problem, build_plan(problem, policy, moves, room.tier_of))

    def _sums(self, values: Bytes) -> Reals:
        """Returns, per candidate, the sum of one value per op over its idle ops."""
        sums = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
        total = np.zeros(len(self._candidates))
        np.add.at(total, self._owner, sums[self._stop] - sums[self._first])
        return total


def _scaled(scores: Reals) -> Reals:
    largest = np.abs(scores).max(initial=0.0)
    return scores / largest if largest else scores


class _Times:
    """Sticks to the limit: gives every chosen slot its release and its load. Slots have ticks of their own frame."""

    def __init__(self, problem: Problem, peak: int, usage: Bytes, tier_of: dict[int, Tier]) -> None:
        self._problem = problem
        self._peak = peak
        self._usage = usage
        self._tier_of = tier_of
        self._starts = double_starts_ns(problem)
        self._step_ns = int(problem.starts_ns[-1])

    def moves(self, slots: list[Slot]) -> list[Move]:
        """Returns one move per slot."""
        releases = self._releases(slots)
        return none_empty(self._loads(slots, releases))

    def _releases(self, slots: list[Slot]) -> dict[Slot, int]:
        op_count = self._problem.op_count
        free: dict[Tier, int] = {}
        releases: dict[Slot, int] = {}
        before = {slot: op_count if slot.start > self._peak else 0 for slot in slots}  # the peak ends the frame
        for slot in sorted(slots, key=lambda s: (s.start - before[s], s.tensor)):
            tier, shift_ns = self._tier_of[slot.tensor], self._step_ns if before[slot] else 0
            size = self._problem.size_bytes(slot.tensor)
            begin = int(self._starts[slot.start]) - shift_ns
            end = max(begin, free.get(tier, begin)) + self._problem.links(tier)[0].transfer_ns(size)
            wanted = int(np.searchsorted(self._starts, end + shift_ns))
            release = self._stays_until(slot, min(wanted, self._latest_release(slot)), size)
            releases[slot] = release
            free[tier] = end if release == wanted else min(end, int(self._starts[release]) - shift_ns)
        return releases

    def _loads(self, slots: list[Slot], releases: dict[Slot, int]) -> list[Move]:
        op_count = self._problem.op_count
        next_start: dict[Tier, int] = {}
        moves: list[Move] = []
        after = {slot: op_count if slot.stop - op_count > self._peak else 0 for slot in slots}  # the peak begins it
        for slot in sorted(slots, key=lambda s: (after[s] - s.stop, s.tensor)):
            if slot.is_last:
                moves.append(Move(slot, releases[slot], slot.stop))
                continue
            tier, shift_ns = self._tier_of[slot.tensor], self._step_ns if after[slot] else 0
            size = self._problem.size_bytes(slot.tensor)
            due = int(self._starts[slot.stop]) - shift_ns
            begin = min(due, next_start.get(tier, due)) - self._problem.links(tier)[1].transfer_ns(size)
            wanted = int(np.searchsorted(self._starts, begin + shift_ns, side="right")) - 1
            load = self._is_back_from(slot, max(wanted, self._earliest_load(slot, releases[slot])), size)
            next_start[tier] = begin if load == wanted else int(self._starts[load]) - shift_ns
            moves.append(Move(slot, releases[slot], load))
        return moves

    def _peak_in(self, slot: Slot) -> int | None:
        """Returns the peak in the slot's frame, or None where the slot does not cross it."""
        for tick in (self._peak, self._peak + self._problem.op_count):
            if slot.start <= tick < slot.stop:
                return tick
        return None

    def _is_bound(self, slot: Slot) -> bool:
        return slot.is_boundary and not self._problem.capabilities.wraps

    def _latest_release(self, slot: Slot) -> int:
        peak = self._peak_in(slot)
        latest = slot.stop - 1 if peak is None else peak
        return min(latest, self._problem.op_count) if self._is_bound(slot) else latest

    def _earliest_load(self, slot: Slot, release: int) -> int:
        peak = self._peak_in(slot)
        earliest = release + 1 if peak is None else peak + 1
        return max(earliest, self._problem.op_count) if self._is_bound(slot) else earliest

    def _stays_until(self, slot: Slot, release: int, size: int) -> int:
        """Returns the first op from the slot's start on that has no room, or `release`; takes the room before it."""
        ticks = np.arange(slot.start, release) % self._problem.op_count
        full = np.flatnonzero(self._usage[ticks] + size > self._problem.device_bytes)
        ticks = ticks[: full[0]] if full.size else ticks
        self._usage[ticks] += size
        return slot.start + len(ticks)

    def _is_back_from(self, slot: Slot, load: int, size: int) -> int:
        """Returns the first op from `load` on from which there is room up to the slot's end; takes the room."""
        load = min(load, slot.stop)
        ticks = np.arange(load, slot.stop) % self._problem.op_count
        full = np.flatnonzero(self._usage[ticks] + size > self._problem.device_bytes)
        ticks = ticks[full[-1] + 1 :] if full.size else ticks
        self._usage[ticks] += size
        return slot.stop - len(ticks)
