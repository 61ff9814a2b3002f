"""The fractional relaxation: a linear program over time slots whose value no plan can beat, and which guides `auto`.

[Note: the relaxation]
The ring is cut into slots at check points, the ops at which most bytes are live; slot q reaches from check point q to
the next. Tensors with the same use pattern (alive, required, used and written in the same slots) form a group, so the
program grows with slots and patterns, not with tensors. Its columns are bytes:
* per slot: the stall, a time;
* per group and check point: bytes that are away and will come back from HOST, or from NVME; valid copies in each;
* per group and slot: bytes that go out to each tier, come in from each, and move between them.
Rows: at every check point the device and the lower tiers hold what they have room for; bytes that are away have a
copy, which came out of the device once, however often it moved on below; what comes back from elsewhere than it lay
moved there first, over the drive's link; a copy of a tensor that the slot writes is made in the slot; bytes that are
used in the slot come in; and every link carries no more than fits in the slot and its stall. A plan is a solution:
uses between check points, latencies, whole tensors and the order of transfers are left out, so what is left is a lower
bound; averaging the steps of a plan whose steps differ is one too. Bytes on their way in count as away until they have
arrived.

Bytes that can be recomputed may also be away without any copy. A recomputed byte costs what a run of its cheapest op costs
per byte that it writes, and links carry on meanwhile. The program does not model updates on the host; see
`tieroff.planner.bounds.bounds`.

[Note: what the host link carries]
Let x and y be the bytes that its two directions carry for the HOST, over what each carries alone in the slot, u the same
of the bytes for the NVME that go the way of x, s the duplex share. While both directions move, each has s. So
x + u <= 1, and x + (1 - s) / s y <= 1, with (1 - s) / s at most 1, since a share below a half gains nothing over taking
turns. What goes to the NVME is not slowed by the other direction: beside both, x has s (1 - u). With y it may fill u up
to what the NVME takes, w. So u enters the second row with the factor min(s, (1 - (1 - s) / s) / w).

[Note: the bound from prices]
For prices y >= 0 of the rows A x <= b with 0 <= x <= u, no x costs less than -y b + sum of min(0, c + y A) u: the bound
holds for any prices, however early the solver stopped. Stalls have no upper limit, so the prices of a slot's links are
scaled until they add up to one at most.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tieroff.core.lifetime import Lifetime
from tieroff.core.tensor import TensorClass, Tier
from tieroff.planner.bounds.linear import LinearProgram, Reals, Solution
from tieroff.planner.problem.problem import Problem
from tieroff.planner.simulate.options import memory_rate, share_millionths
from tieroff.units import GIB, NS_PER_S

_MOVE_COST = {Tier.HOST: 1e-6, Tier.NVME: 3e-6}  # of equal solutions, the one that moves least
_LOWER = (Tier.HOST, Tier.NVME)


def check_points(problem: Problem, slot_count: int) -> list[int]:
    """Returns ops that cut the ring into slots of about equal compute time and bytes touched, ascending."""
    trace = problem.trace
    touched = np.array([sum(problem.size_bytes(t) for t in {*op.reads, *op.writes}) for op in trace.ops], float)
    times = np.diff(problem.starts_ns).astype(float)
    weights = times / max(1.0, times.sum()) + touched / max(1.0, touched.sum())
    line = np.concatenate([[0.0], np.cumsum(weights)])
    edges = np.searchsorted(line, np.linspace(0.0, line[-1], slot_count + 1))
    edges[0], edges[-1] = 0, problem.op_count
    return sorted({int(a + np.argmax(problem.live[a:b])) for a, b in itertools.pairwise(edges) if b > a})


@dataclass(frozen=True, slots=True)
class Pattern:
    """When a tensor is alive, required, used and written, in terms of check points and slots; the last three as bits.

    `is_born_at_first`: its life begins at the first check point of its life, not in the slot before.
    """

    is_persistent: bool
    is_born_at_first: bool
    first: int
    last: int
    required_at: int
    used_in: int
    written_in: int


@dataclass(slots=True)
class Group:
    """Tensors of one pattern; `size_gib` of all of them.

    Attributes:
        again_ns: least time per byte in which their bytes are made again; infinite: they cannot be.
        away, copies: column per check point and lower tier.
        below: column per check point: bytes with a copy in any lower tier, where these exchange bytes.
        gone: column per check point: bytes that will be made again.
    """

    pattern: Pattern
    tensors: list[int]
    size_gib: float = 0.0
    again_ns: float = math.inf
    away: dict[tuple[int, Tier], int] = field(default_factory=dict)
    copies: dict[tuple[int, Tier], int] = field(default_factory=dict)
    below: dict[int, int] = field(default_factory=dict)
    gone: dict[int, int] = field(default_factory=dict)


def pattern_of(life: Lifetime, is_persistent: bool, points: list[int]) -> Pattern | None:
    """Returns the pattern of a tensor, or None if it is idle at no check point."""
    count = len(points)
    first, last = 0, count - 1
    if not is_persistent:
        first, last = bisect_left(points, life.birth), bisect_left(points, life.death) - 1
    required_at = used_in = written_in = 0
    for start, stop in life.required:
        low, high = bisect_left(points, start), bisect_left(points, stop)
        required_at |= (1 << high) - (1 << low)
        for slot in range(low - 1, high):
            begin = points[slot] + 1 if slot >= 0 else 0
            end = points[slot + 1] if slot + 1 < count else stop
            if max(start, begin) < min(stop, end) and (slot >= 0 or is_persistent):
                used_in |= 1 << (slot % count)
    for op in life.writes:
        slot = bisect_right(points, op) - 1
        if slot >= 0 or is_persistent:
            written_in |= 1 << (slot % count)
    alive = ((1 << (last + 1)) - (1 << first)) if last >= first else 0
    if not alive & ~required_at:
        return None
    is_born_at_first = not is_persistent and points[first] == life.birth
    return Pattern(is_persistent, is_born_at_first, first, last, required_at, used_in, written_in)


def movable_tensors(problem: Problem) -> list[int]:
    """Returns the tensors that some plan may have away from the device, whatever tensors they follow."""
    least = problem.capabilities.min_bytes
    return [
        life.tensor
        for life, tensor in zip(problem.trace.lifetimes, problem.trace.tensors, strict=True)
        if life.gaps and tensor.is_movable and tensor.kind is not TensorClass.INPUT and tensor.size_bytes >= least
    ]


def group_tensors(problem: Problem, points: list[int], again_ns: Mapping[int, float] | None = None) -> list[Group]:
    """Returns the movable tensors by pattern, in order of their first tensor.

    Args:
        problem: what is planned.
        points: the check points.
        again_ns: least time per byte in which tensors are made again, of those that can be. Only tensors whose times lie
            within a factor of two share a group.
    """
    groups: dict[tuple[Pattern, int | None], Group] = {}
    for tensor in movable_tensors(problem):
        pattern = pattern_of(problem.trace.lifetimes[tensor], problem.trace.tensors[tensor].is_persistent, points)
        if pattern is not None:
            again = (again_ns or {}).get(tensor, math.inf)
            key = pattern, None if math.isinf(again) else math.frexp(again)[1]
            group = groups.setdefault(key, Group(pattern, []))
            group.tensors.append(tensor)
            group.size_gib += problem.size_bytes(tensor) / GIB
            group.again_ns = min(group.again_ns, again)
    return list(groups.values())


def duplex_factors(share: float, fill: float) -> tuple[float, float]:
    """Returns the factors of what goes to the NVME and of the other direction; see [Note: what the host link carries].

    Args:
        share: of the host link's bandwidth that each direction has while both move bytes.
        fill: what the NVME's link takes, over what the host link does.
    """
    of_other = min(1.0, (1.0 - share) / share)
    return min(share, (1.0 - of_other) / min(1.0, fill)), of_other


def column_count(groups: list[Group]) -> int:
    """Returns about how many columns the program of these groups has: what solving it takes grows with it."""
    return sum(8 * (group.pattern.last - group.pattern.first + 1) for group in groups)


class Relaxation:
    """The linear program of a problem at given check points; see [Note: the relaxation].

    Attributes:
        points: the check points.
        groups: with their columns.
        solution: after `solve`; None when the solver found none.
    """

    def __init__(
        self,
        problem: Problem,
        points: list[int],
        groups: list[Group],
        *,
        device_bytes: int,
        lower_share: float = 1.0,
        moves_below: bool = True,
    ) -> None:
        """Builds the program.

        Args:
            problem: what is planned.
            points, groups: from `check_points` and `group_tensors`.
            device_bytes: budget of the device that the program sees.
            lower_share: share of the lower tiers' budgets that it sees.
            moves_below: with moves between HOST and NVME; a bound needs them where any plan may make them.
        """
        self.points, self.groups = points, groups
        self.solution: Solution | None = None
        self._problem, self._count = problem, len(points)
        self._tiers = problem.tiers
        self._moves_below = moves_below and len(problem.tiers) == 2
        # A column of 1 is a GiB or a second, less of both in a small problem: HiGHS ignores differences below 1e-7.
        peak, rates = int(problem.live.max()), [link.bytes_per_s for tier in self._tiers for link in problem.links(tier)]
        self._unit_bytes = min(float(GIB), max(1.0, peak / 16))
        self._unit_ns = min(float(NS_PER_S), max(1.0, float(problem.starts_ns[-1]) + peak * NS_PER_S / max(rates)))
        self._program = LinearProgram()
        self._stalls = [self._program.add_column(cost=1.0) for _ in points]
        self._repeats: list[tuple[int, float]] = []  # column and cost of what is made again, all of them
        self._again: list[list[tuple[int, float]]] = [[] for _ in points]
        self._memory: list[list[tuple[int, float]]] = [[] for _ in points]
        self._room: dict[Tier, list[list[tuple[int, float]]]] = {tier: [[] for _ in points] for tier in self._tiers}
        self._flows: dict[tuple[Tier, bool], list[list[int]]] = {
            (tier, leaves): [[] for _ in points] for tier in self._tiers for leaves in (True, False)
        }
        self._below: dict[bool, list[list[int]]] = {is_down: [[] for _ in points] for is_down in (True, False)}
        for group in groups:
            self._add_states(group)
            self._add_flows(group)
        self._add_budgets(device_bytes, lower_share)
        self._link_rows = [self._add_links(slot) for slot in range(self._count)]

    def solve(self, tolerance: float = 1e-3) -> bool:
        """Solves the program; False when no solution was found."""
        self.solution = self._program.solve(tolerance)
        return self.solution is not None

    @property
    def row_count(self) -> int:
        """How many rows the program has: as many prices it takes."""
        return len(self._program.limits)

    @property
    def bound_ns(self) -> int:
        """A step time that no plan of the problem beats, from the prices of the solution; the compute without one."""
        return int(self._problem.starts_ns[-1]) if self.solution is None else self.bound_of(self.solution.prices)

    def bound_of(self, prices: Reals) -> int:
        """Returns a step time that no plan of the problem beats; see [Note: the bound from prices].

        Args:
            prices: any, >= 0, one per row; the nearer to the best, the higher the bound.
        """
        prices = prices.copy()
        for rows in self._link_rows:
            total = prices[rows].sum()
            if total > 1.0:
                prices[rows] /= total
        program = self._program
        costs = np.zeros(len(program.cost))
        costs[self._stalls] = 1.0
        for column, cost in self._repeats:
            costs[column] = cost
        reduced = costs + program.products(prices)
        reduced[self._stalls] = np.maximum(reduced[self._stalls], 0.0)
        upper = np.where(np.isinf(program.upper), 0.0, program.upper)
        gains, losses = float(np.minimum(reduced, 0.0) @ upper), prices * np.array(program.limits)
        stall_ns = (gains - float(losses.sum())) * self._unit_ns
        # Rounding of the sums, generously.
        rounding_ns = 1e-12 * (abs(gains) + float(np.abs(losses).sum())) * self._unit_ns + 1e-7 * abs(stall_ns)
        return int(self._problem.starts_ns[-1]) + max(0, int(stall_ns - rounding_ns) - 1)

    def away_bytes(self, group: Group, tier: Tier) -> dict[int, float]:
        """Returns the bytes of a group that come back from a tier, per check point at which it is idle."""
        assert self.solution is not None
        values = self.solution.values
        return {q: float(values[column]) * self._unit_bytes for (q, where), column in group.away.items() if where is tier}

    def _size(self, group: Group) -> float:
        return group.size_gib * (GIB / self._unit_bytes)

    def _add_states(self, group: Group) -> None:
        program, pattern, size = self._program, group.pattern, self._size(group)
        for q in range(pattern.first, pattern.last + 1):
            is_idle = not pattern.required_at >> q & 1
            has_been = q > pattern.first or not pattern.is_born_at_first
            for tier in self._tiers:
                copy = group.copies[q, tier] = program.add_column(size if has_been else 0.0)
                self._room[tier][q].append((copy, 1.0))
                if is_idle:
                    away = group.away[q, tier] = program.add_column(size)
                    self._memory[q].append((away, -1.0))
                    program.add_row(((away, 1.0), (copy, -1.0)), 0.0)
            apart = [group.away[q, tier] for tier in self._tiers if is_idle]
            if is_idle and not math.isinf(group.again_ns):
                group.gone[q] = program.add_column(size)
                self._memory[q].append((group.gone[q], -1.0))
                apart.append(group.gone[q])
            if len(apart) > 1:
                program.add_row([(column, 1.0) for column in apart], size)
            if self._moves_below:
                group.below[q] = program.add_column(size if has_been else 0.0)
            if self._moves_below and is_idle:
                program.add_row([*((group.away[q, tier], 1.0) for tier in self._tiers), (group.below[q], -1.0)], 0.0)

    def _add_flows(self, group: Group) -> None:
        """Adds what a group moves in each slot: from the one in which it is born, if it is, to that of its last use."""
        pattern = group.pattern
        begin = pattern.first if pattern.is_persistent or pattern.is_born_at_first else pattern.first - 1
        for position in range(begin, pattern.last + 1):
            slot = position % self._count
            is_alive = position >= pattern.first
            after: int | None = position + 1
            if position == pattern.last:
                after = pattern.first if pattern.is_persistent else None
            is_used = not is_alive or bool(pattern.used_in >> slot & 1)
            is_written = not is_alive or bool(pattern.written_in >> slot & 1)
            moved = self._add_moves_below(group, slot) if is_alive and (is_used or after is not None) else {}
            if is_alive and (slot, self._tiers[0]) in group.away and (is_used or after is not None):
                self._add_loads(group, slot, None if is_used else after, moved)
            if is_alive and slot in group.gone:
                self._add_again(group, slot, None if is_used else after)
            if after is not None:
                self._add_copies(group, slot if is_alive and not is_written else None, after, slot, moved)

    def _add_moves_below(self, group: Group, slot: int) -> dict[Tier, int]:
        """Returns the columns of bytes copied in a slot from one lower tier to the other, by the tier they go to."""
        if not self._moves_below:
            return {}
        moved: dict[Tier, int] = {}
        for tier in _LOWER:
            moved[tier] = self._program.add_column(self._size(group), _MOVE_COST[Tier.NVME])
            self._below[tier is Tier.NVME][slot].append(moved[tier])
        return moved

    def _add_loads(self, group: Group, slot: int, after: int | None, moved: dict[Tier, int]) -> None:
        """What is away now and not at the slot's end came in; what moved below may from then on come from there."""
        program, size = self._program, self._size(group)
        stays = after is not None and (after, self._tiers[0]) in group.away
        turned = {tier: program.add_column(size) for tier in moved}
        for tier, column in turned.items():
            program.add_row(((column, 1.0), (moved[tier], -1.0)), 0.0)
        for tier in self._tiers:
            load = program.add_column(size, _MOVE_COST[tier])
            self._flows[tier, False][slot].append(load)
            terms = [(group.away[slot, tier], 1.0), (load, -1.0)]
            if stays and after is not None:
                terms.append((group.away[after, tier], -1.0))
            for target, column in turned.items():
                terms.append((column, 1.0 if target is tier else -1.0))
            program.add_row(terms, 0.0)

    def _add_again(self, group: Group, slot: int, after: int | None) -> None:
        """What is gone now and not at the slot's end was made again, at the latest before its life ends."""
        cost = group.again_ns * self._unit_bytes / self._unit_ns
        again = self._program.add_column(self._size(group), cost)
        self._repeats.append((again, cost))
        self._again[slot].append((again, -cost))
        terms = [(group.gone[slot], 1.0), (again, -1.0)]
        if after in group.gone:
            terms.append((group.gone[after], -1.0))
        self._program.add_row(terms, 0.0)

    def _add_copies(self, group: Group, before: int | None, after: int, slot: int, moved: dict[Tier, int]) -> None:
        """Copies that are there at the slot's end were there before (unless written in it), or were made in it.

        What has a copy in any lower tier had one before, or came out of the device: moves below do not add to it.
        """
        program = self._program
        outs: list[tuple[int, float]] = []
        for tier in self._tiers:
            out = program.add_column(self._size(group), _MOVE_COST[tier])
            self._flows[tier, True][slot].append(out)
            outs.append((out, -1.0))
            terms = [(group.copies[after, tier], 1.0), (out, -1.0)]
            if before is not None:
                terms.append((group.copies[before, tier], -1.0))
            if tier in moved:
                terms.append((moved[tier], -1.0))
            program.add_row(terms, 0.0)
        if self._moves_below:
            had = [(group.below[before], -1.0)] if before is not None else []
            program.add_row([(group.below[after], 1.0), *had, *outs], 0.0)

    def _add_budgets(self, device_bytes: int, lower_share: float) -> None:
        unit = self._unit_bytes
        for q, point in enumerate(self.points):
            self._program.add_row(self._memory[q], (device_bytes - int(self._problem.live[point])) / unit)
            for tier in self._tiers:
                self._program.add_row(self._room[tier][q], lower_share * self._problem.budget[tier] / unit)

    def _slot_time(self, slot: int) -> float:
        starts, points = self._problem.starts_ns, self.points
        if slot + 1 < self._count:
            return float(starts[points[slot + 1]] - starts[points[slot]]) / self._unit_ns
        return float(starts[-1] - starts[points[slot]] + starts[points[0]]) / self._unit_ns

    def _add_links(self, slot: int) -> list[int]:
        """Adds the rows of all links in a slot and returns them; each reads: time busy - stall <= time of the slot."""
        machine = self._problem.machine
        spare = [(self._stalls[slot], -1.0), *self._again[slot]]
        rows: list[list[tuple[int, float]]] = []
        host, beside = {}, {}
        for leaves in (True, False):
            flows, rate = self._flows.get((Tier.NVME, leaves)), self._rate(Tier.NVME, leaves)
            nvme = self._busy(flows, slot, rate)
            if nvme:
                rows.append([*nvme, *self._busy(self._below[leaves], slot, rate)])
            host_rate = machine.d2h_bytes_per_s if leaves else machine.h2d_bytes_per_s
            is_shared = machine.nvme_shares_host_link and host_rate > 0
            # The simulator halves in whole bytes per second: both together may have one more.
            host[leaves] = self._busy(self._flows.get((Tier.HOST, leaves)), slot, host_rate + is_shared)
            beside[leaves] = self._busy(flows, slot, host_rate + 1) if is_shared else []
            if host[leaves] or beside[leaves]:
                rows.append([*host[leaves], *beside[leaves]])
        for leaves in (True, False) if machine.duplex_share < 1.0 and Tier.HOST in self._tiers else ():
            fill = self._rate(Tier.NVME, leaves) / self._rate(Tier.HOST, leaves) if beside[leaves] else 1.0
            of_nvme, of_other = duplex_factors(share_millionths(machine) / 1e6, fill)
            nvme = [(column, time * of_nvme) for column, time in beside[leaves]]
            rows.append([*host[leaves], *nvme, *((column, time * of_other) for column, time in host[not leaves])])
        rows.append(self._through_memory(slot))
        limit = self._slot_time(slot)
        return [self._program.add_row([*terms, *spare], limit) for terms in rows if terms]

    def _through_memory(self, slot: int) -> list[tuple[int, float]]:
        """Returns the columns of a slot with the time that a unit of bytes takes of the host's memory, in units."""
        machine, rate = self._problem.machine, memory_rate(self._problem.machine)
        terms: list[tuple[int, float]] = []
        for (tier, _), flows in self._flows.items() if rate else ():
            passes = machine.memory_passes(Tier.DEVICE, tier)
            terms += [(column, time * passes) for column, time in self._busy(flows, slot, rate) if passes]
        for flows in self._below.values() if rate else ():
            terms += self._busy(flows, slot, rate)
        return terms

    def _rate(self, tier: Tier, leaves: bool) -> int:
        return self._problem.links(tier)[0 if leaves else 1].bytes_per_s if tier in self._tiers else 0

    def _busy(self, flows: list[list[int]] | None, slot: int, bytes_per_s: int) -> list[tuple[int, float]]:
        """Returns the columns of a slot with the time that a unit of bytes takes on a link, in units."""
        time = self._unit_bytes * (NS_PER_S / self._unit_ns) / bytes_per_s if flows and flows[slot] else 0.0
        return [(column, time) for column in flows[slot]] if flows else []
