"""From the fractional solution of the relaxation to windows of whole pieces.

The tensors of a group lie one after the other on a line as long as the group's bytes. At each check point, what is
away in HOST covers the line from its left end on and what is away in NVME from its right end on, so that the parts
nest from one check point to the next. Tensors are cut where such a part ends, unless a cut makes a piece too small;
each piece then is where its middle is.
"""

from __future__ import annotations

from bisect import bisect_left

from tieroff.core.lifetime import Gap
from tieroff.core.tensor import Tier
from tieroff.planner.bounds.relaxation import Group, Relaxation
from tieroff.planner.problem.pieces import KEPT, LOWER, Away, Piece, Windows, make_windows
from tieroff.planner.problem.problem import Problem

_PIECE_BYTES_MIN = 8 * 2**20


def round_solution(problem: Problem, relaxation: Relaxation) -> Windows:
    """Returns the windows that the solution of a relaxation suggests; ops may still be over the budget."""
    chosen: list[tuple[Piece, list[Away]]] = []
    placed: set[int] = set()
    for group in relaxation.groups:
        chosen += _round_group(problem, relaxation, group)
        placed.update(group.tensors)
    for tensor in sorted({slot.tensor for unit in problem.units for slot in unit.slots} - placed):
        gaps = problem.trace.lifetimes[tensor].gaps
        chosen.append((Piece(tensor, 0, problem.size_bytes(tensor)), [KEPT] * len(gaps)))
    return make_windows(problem, chosen)


def _round_group(problem: Problem, relaxation: Relaxation, group: Group) -> list[tuple[Piece, list[Away]]]:
    lifetimes, points = problem.trace.lifetimes, relaxation.points
    ends = {tier: relaxation.away_bytes(group, tier) for tier in problem.tiers}
    total = sum(problem.size_bytes(tensor) for tensor in group.tensors)
    host = ends.get(Tier.HOST, {})
    nvme = {q: total - size for q, size in ends.get(Tier.NVME, {}).items()}
    marks = sorted({int(mark) for mark in (*host.values(), *nvme.values())})
    op_count = problem.op_count

    def place(gap: Gap, middle: float) -> Away:
        at: dict[int, list[int]] = {0: [], 1: []}
        for shift in (0, op_count) if gap.stop > op_count else (0,):
            low, high = bisect_left(points, gap.start - shift), bisect_left(points, gap.stop - shift)
            for q in range(low, high):
                if middle < host.get(q, 0.0):
                    at[0].append(points[q] + shift)
                elif middle > nvme.get(q, total):
                    at[1].append(points[q] + shift)
        both = at[0] + at[1]
        if not both:
            return KEPT
        tier = LOWER.index(problem.tiers[0]) if len(problem.tiers) == 1 else int(len(at[1]) > len(at[0]))
        return min(both), max(both) + 1, tier

    def order(tensor: int) -> tuple[int, int]:
        life = lifetimes[tensor]
        if group.pattern.is_persistent:
            return life.required[0][0], tensor
        return -max(gap.stop - gap.start for gap in life.gaps), tensor

    chosen: list[tuple[Piece, list[Away]]] = []
    begin = 0
    for tensor in sorted(group.tensors, key=order):
        for first, stop in _cuts(problem, tensor, begin, marks):
            middle = begin + (first + stop) / 2
            aways = [place(gap, middle) for gap in lifetimes[tensor].gaps]
            chosen.append((Piece(tensor, first, stop - first), aways))
        begin += problem.size_bytes(tensor)
    return chosen


def _cuts(problem: Problem, tensor: int, begin: int, marks: list[int]) -> list[tuple[int, int]]:
    """Returns the byte ranges of a tensor that lies on the line from `begin` on, cut near the marks."""
    size, granule = problem.size_bytes(tensor), problem.capabilities.granule_bytes
    least = max(_PIECE_BYTES_MIN, granule, problem.capabilities.min_bytes)
    cuts = [0]
    if problem.capabilities.splits:
        for mark in marks[bisect_left(marks, begin) : bisect_left(marks, begin + size)]:
            cut = (mark - begin) // granule * granule
            if cut - cuts[-1] >= least and size - cut >= least:
                cuts.append(cut)
    return list(zip(cuts, [*cuts[1:], size], strict=True))
