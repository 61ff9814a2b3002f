"""`sentinel`: the step is cut into equal runs of layers; at each cut, what the next run does not use leaves.

Ren et al., "Sentinel: Efficient Tensor Migration and Allocation on Heterogeneous Memory Systems for Deep Learning",
HPCA 2021.

The rule. Tensors that live within one layer stay; room for them is set aside. All others, of every class, migrate at
the ends of intervals of MIL consecutive layers, the same number through the whole step: at the start of an interval
what the next one uses is fetched, at its end what the next one does not use leaves. An MIL will do if the most bytes
that one interval needs fit beside what is set aside, and if they cross the link within the shortest interval. Of those
that will do, the one with the shortest step is taken; of equals, the one with less traffic.

Certain, from notes on the paper: the classes, the intervals, both conditions. Defaults, not verified: where none meets
both, the first is enough; steps are compared in the simulator; at most 24 lengths are tried, spread evenly by ratio;
pages are migrated whole, clean or not (OPTIONS).

Where the port differs. A layer is a module of the trace or a single op, in backward the run of ops that read what it
saved. Tensors are not packed in pages by lifetime and count of accesses. An interval always waits for what it needs:
kernels of a GPU do not run from slow memory. Space is met when the plan fits. What leaves is copied from the interval's
end on and holds its room until then, unless ops need that room; what persists is copied after its last write. Where
nothing may cross the end of the step, nothing is fetched before it. When host memory is full, tensors go to the NVMe,
or stay.

On the ten ops of tests/golden/ten_ops.py. In A intervals of two layers begin at ops 0, 2, 4 and 7: when the one at 4
begins, what the last one uses is fetched, a, w, m and n, and each left where an interval did not use it. In B these do
not fit; with intervals of one layer b and v leave too.
* sentinel: A `a>h 2-3, a<h 4-7, m<h 4-8, m>h 9-10, n<h 4-9, n>h 10-10, w<h 4-7, w>h 9-13`; B `a>h 2-5, a<h 6-7, b>h
  3-3, b<h 4-6, m<h 6-8, m>h 9-10, n<h 6-9, n>h 10-10, v<h 1-2, v<h 4-6, v>h 10-10, w<h 6-7, w>h 9-14`
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from tieroff.core.plan import Plan
from tieroff.core.tensor import Tier
from tieroff.planner.policy import Assumptions, policy
from tieroff.planner.problem.assemble import Move, build_plan
from tieroff.planner.problem.problem import LowerRoom, Problem, Slot, Unit
from tieroff.planner.simulate.options import SimulationOptions
from tieroff.planner.simulate.simulator import simulate
from tieroff.study.policies.shared.copies import release_when_copied, retimed, usage_without
from tieroff.study.policies.shared.reading import layers, turn_of

OPTIONS = SimulationOptions(writes_clean=True)

_LENGTHS_AT_MOST = 24


@dataclass(frozen=True, slots=True)
class _Trial:
    is_over: bool
    is_slow: bool
    step_ns: int
    moved_bytes: int
    length: int
    plan: Plan

    @property
    def key(self) -> tuple[int, bool, int, int, int]:
        """The smallest is the best: room, then time, then the step, then the traffic."""
        over = self.plan.peak_bytes[Tier.DEVICE] if self.is_over else 0
        return over, self.is_slow, self.step_ns, self.moved_bytes, self.length


@policy("sentinel", paper="Ren et al., HPCA 2021", published=True, options=OPTIONS, assumes=Assumptions(has_pages=True))
def plan_sentinel(problem: Problem) -> Plan:
    """Returns the plan; it may be over the device's budget."""
    if problem.fits or not problem.tiers:
        return build_plan(problem, "sentinel", [], {})
    cuts = _layer_starts(problem)
    candidates = [_try(problem, cuts, length) for length in _lengths(len(cuts))]
    return min(candidates, key=lambda candidate: candidate.key).plan


def _layer_starts(problem: Problem) -> list[int]:
    """Returns the first op of every layer of the step, in order."""
    of_op, turn = layers(problem.trace), turn_of(problem.trace)
    return [i for i in range(problem.op_count) if i in (0, turn) or of_op[i] != of_op[i - 1]]


def _lengths(count: int) -> list[int]:
    ratio = count ** (1.0 / (_LENGTHS_AT_MOST - 1))
    return sorted({min(count, max(1, round(ratio**i))) for i in range(_LENGTHS_AT_MOST)})


def _try(problem: Problem, cuts: list[int], length: int) -> _Trial:
    starts = cuts[::length]
    room = LowerRoom(problem)
    moves: list[Move] = []
    short = _short_lived(problem, cuts)
    for unit in problem.units:
        own = _moves(problem, unit, starts)
        if own and not short.intersection(unit.tensors) and room.place(unit.tensors, problem.tiers):
            moves += own
    kept = release_when_copied(problem, moves, room.tier_of, usage_without(problem, moves))
    begin_of = {move.slot: move.release_at for move in moves}
    begins = {(move.slot.tensor, move.release_at): begin_of[move.slot] for move in kept}
    plan = retimed(problem, build_plan(problem, "sentinel", kept, room.tier_of), begins)
    timeline = simulate(plan, problem.trace, problem.machine, OPTIONS)
    plan = replace(plan, step_ns=timeline.step_ns)
    is_over = plan.peak_bytes[Tier.DEVICE] > problem.device_bytes
    is_slow = _is_slow(problem, moves, starts)
    return _Trial(is_over, is_slow, plan.step_ns, sum(timeline.moved_bytes.values()), length, plan)


def _short_lived(problem: Problem, cuts: list[int]) -> set[int]:
    """Returns the tensors whose whole life is within one layer."""
    return {
        life.tensor
        for tensor, life in zip(problem.trace.tensors, problem.trace.lifetimes, strict=True)
        if not tensor.is_persistent and bisect_right(cuts, life.birth) == bisect_right(cuts, life.death - 1)
    }


def _moves(problem: Problem, unit: Unit, starts: list[int]) -> list[Move]:
    """Returns the moves of a unit's slots: away from the end of the interval of the last use to the one before the next.

    Where tensors are tied all have to leave: one whose windows are all empty does so over its whole slots.
    """
    must_cross = not problem.capabilities.wraps
    moves: list[Move] = []
    is_idle: list[bool] = []
    for tensor in unit.tensors:
        own = [_window(problem, slot, starts) for slot in unit.slots if slot.tensor == tensor]
        is_idle.append(any(move.release_at < move.load_at for move in own))
        if not is_idle[-1]:
            own = [Move(move.slot, move.slot.start, move.slot.stop) for move in own] if tensor in problem.tied else []
        moves += [move for move in own if move.release_at < move.load_at or (move.slot.is_boundary and must_cross)]
    return moves if any(is_idle) else []


def _window(problem: Problem, slot: Slot, starts: list[int]) -> Move:
    n = problem.op_count
    bounds = [*starts, n]
    release = bounds[bisect_right(starts, slot.start - 1)] if slot.start > 0 else 0
    if slot.is_last:
        return Move(slot, release, max(release, slot.stop))
    if slot.is_boundary and not problem.capabilities.wraps:
        ahead = bisect_right(starts, slot.stop - n) - 2 if slot.stop < 2 * n else len(starts) - 1
        return Move(slot, min(max(release, slot.start), n), n + (starts[ahead] if ahead > 0 else 0))
    line = [*starts, *(n + start for start in starts)]
    load = line[max(bisect_right(line, slot.stop) - 2, 0)]
    return Move(slot, release, max(load, release))


def _is_slow(problem: Problem, moves: list[Move], starts: list[int]) -> bool:
    """Returns whether what one interval fetches takes longer than the shortest interval, on the link of the first tier."""
    n = problem.op_count
    bounds = [*starts, n]
    needed = [0] * len(starts)
    for move in moves:
        if not move.slot.is_last:
            needed[bisect_right(starts, move.slot.stop % n) - 1] += problem.size_bytes(move.slot.tensor)
    shortest = min(int(problem.starts_ns[b] - problem.starts_ns[a]) for a, b in zip(starts, bounds[1:], strict=True))
    return problem.links(problem.tiers[0])[1].transfer_ns(max(needed)) > shortest
