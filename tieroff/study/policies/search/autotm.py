"""`autotm-static` and `autotm-sync`: AutoTM, placement by integer programming (Hildebrand et al., ASPLOS 2020).

The formulation is that of the authors' code. A tensor is in fast or in slow memory between its uses, every move is
synchronous, and the sum of the moves' times is minimised while the fast memory has room at every op. A tensor is
written to slow memory at most once for each time that it is written itself: later it is dropped free.

* Synchronous: one binary per gap, away or not; one variable per written version, at least that of each gap it lies in.
* Static: a tensor lives in one tier for the step, one binary each. Kernels of a device cannot read slow memory in place, so
  one that lives below is brought in before each use and taken back after it.

Both programs go to HiGHS. What cannot be said in them is mended after: where the exact bytes are still over the limit,
absences with the least time per byte are added; then those are taken back, the most time first, that nothing needs.

The defragmentation loop: planned addresses may end above the sum of bytes. Where they are over the limit, the limits of
all ops within 10 of such an op fall by 10 % (both figures verified) and the program is solved again, 2 times at most. Where
lower limits lead to a plan that is over the budget, the first plan is taken. Plans count bytes; the addresses are no
part of them.

Defaults, not verified: a gap of 2 % ends a solve, and so do 200 nodes with the best so far. A program of
more than 4 million entries is not solved: what its limits ask for is chosen as what is missing is.
Differences: kernels have one configuration here, all in fast memory, so there are no binaries of kernels and the
program is one over absences; sizes are not rounded to MB; what the program moves goes to the host, and to the drive
where that is full; where the executor ties slots together they share one binary.

On the ten ops of tests/golden/ten_ops.py. In A n, as large as what op 3 is over by, costs a copy each way; no choice
moves fewer bytes. In B one tier per tensor for the step leaves a and m, 7 MiB together, for 14 of copies. With gaps
apart w can be away between ops 0 and 7 alone, and w and n cost no more.
* autotm-static: A `n<h 9-9, n>h 10-10`; B `a>h 2-2, a<h 7-7, m<h 8-8, m>h 9-9`
* autotm-sync: A `n<h 9-9, n>h 10-10`; B `n<h 9-9, n>h 10-10, w>h 1-1, w<h 7-7`
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tieroff.core.plan import Plan
from tieroff.core.tensor import Tier
from tieroff.planner.auto.select import transfer_ns
from tieroff.planner.bounds.linear import SparseRows, make_model, run_highs
from tieroff.planner.policy import policy
from tieroff.planner.problem.assemble import Move, build_plan
from tieroff.planner.problem.problem import Bytes, LowerRoom, Problem, Slot, Unit
from tieroff.planner.simulate.simulator import memory_per_op
from tieroff.study.policies.shared.addresses import overshoot_bytes, with_addresses

DEFRAGMENTATION_OPS = 10  # verified
DEFRAGMENTATION_PERCENT = 10  # verified
DEFRAGMENTATION_ROUNDS = 2  # default, not verified
GAP = 0.02  # default, not verified
NODES = 200  # default, not verified
ENTRIES_AT_MOST = 4_000_000  # default, not verified; the steps of large models have about a million

Reals = npt.NDArray[np.float64]


@policy("autotm-static", paper="Hildebrand et al., ASPLOS 2020", published=True)
def plan_autotm_static(problem: Problem) -> Plan:
    """Returns the plan in which every tensor lives in one tier."""
    return _plan(problem, "autotm-static", _static_columns(problem))


@policy("autotm-sync", paper="Hildebrand et al., ASPLOS 2020", published=True)
def plan_autotm_sync(problem: Problem) -> Plan:
    """Returns the plan that moves tensors between their uses, one move at a time."""
    return _plan(problem, "autotm-sync", _sync_columns(problem))


@dataclass(slots=True)
class _Column:
    """Slots that are decided together. `needs` is another column that must be chosen with this one, or -1.

    `read_ns` is the time of the copies in and `write_ns` that of the copy out, which columns of one `version` share.
    """

    units: tuple[Unit, ...]
    slots: tuple[Slot, ...]
    read_ns: int
    write_ns: int
    version: tuple[int, int]
    needs: int = -1


def _static_columns(problem: Problem) -> list[_Column]:
    units_of: dict[int, list[Unit]] = {}
    for unit in problem.units:
        units_of.setdefault(unit.tensors[0], []).append(unit)
    columns: list[_Column] = []
    for tensor, units in units_of.items():
        slots = tuple(slot for unit in units for slot in unit.slots)
        columns.append(_Column(tuple(units), slots, transfer_ns(problem, Unit(slots), problem.tiers[0]), 0, (tensor, 0)))
    return columns


def _sync_columns(problem: Problem) -> list[_Column]:
    columns: list[_Column] = []
    for unit in problem.units:
        if len(unit.tensors) > 1:
            time_ns = transfer_ns(problem, unit, problem.tiers[0])
            columns.append(_Column((unit,), unit.slots, time_ns, 0, (unit.tensors[0], 0)))
            continue
        tensor, is_tied = unit.tensors[0], unit.is_split
        out, back = (link.transfer_ns(problem.size_bytes(tensor)) for link in problem.links(problem.tiers[0]))
        boundary = len(columns)
        for slot in reversed(unit.slots):  # a boundary slot is the last
            version = _version(problem, slot)
            needs = boundary if is_tied and len(columns) > boundary else -1
            read_ns = 0 if slot.is_last else back
            columns.append(_Column((unit,), (slot,), read_ns, out if version else 0, version or (tensor, -1), needs))
    return columns


def _version(problem: Problem, slot: Slot) -> tuple[int, int] | None:
    """Returns the tensor and the write whose data a slot sends out, or None where slow memory has it already."""
    writes = problem.trace.lifetimes[slot.tensor].writes
    earlier = [write for write in writes if write < slot.start] or list(writes)
    return (slot.tensor, earlier[-1]) if earlier else None


def _plan(problem: Problem, policy: str, columns: list[_Column]) -> Plan:
    if problem.fits or not columns:
        return build_plan(problem, policy, [], {})
    program = _Program(problem, columns)
    limits = np.full(problem.op_count, problem.device_bytes, np.int64)
    plan = first = program.plan(policy, limits)
    for _ in range(DEFRAGMENTATION_ROUNDS):
        if overshoot_bytes(plan):
            return first
        highest = np.array(memory_per_op(with_addresses(plan, problem.trace), problem.trace)[Tier.DEVICE])
        if highest.max() <= problem.device_bytes:
            return plan
        is_near = np.convolve(highest > problem.device_bytes, np.ones(2 * DEFRAGMENTATION_OPS + 1), "full") > 0
        is_near = is_near[DEFRAGMENTATION_OPS:-DEFRAGMENTATION_OPS]
        limits[is_near] = limits[is_near] * (100 - DEFRAGMENTATION_PERCENT) // 100
        plan = program.plan(policy, limits)
    return first if overshoot_bytes(plan) else plan


class _Program:
    """The integer program over the columns: the least time that brings every op under its limit."""

    def __init__(self, problem: Problem, columns: list[_Column]) -> None:
        self._problem = problem
        self._columns = columns
        n = problem.op_count
        change = np.zeros((len(columns), n + 1), np.int64)
        for index, column in enumerate(columns):
            for slot in column.slots:
                for start, stop in slot.pieces(n):
                    change[index, [start, stop]] += np.array([1, -1]) * problem.size_bytes(slot.tensor)
        self._away = np.cumsum(change, axis=1)[:, :n].T.copy()  # bytes per op and column
        self._live = problem.live

    def plan(self, policy: str, limits: Bytes) -> Plan:
        """Returns the plan of the best solution found for limits per op."""
        problem = self._problem
        over = np.maximum(self._live - limits, 0)
        chosen = self._mended(self._solve(np.minimum(over, self._away.sum(axis=1))), over)
        room = LowerRoom(problem)
        slots: list[Slot] = []
        for index in sorted(np.flatnonzero(chosen).tolist(), key=lambda c: (-self._columns[c].read_ns, c)):
            column = self._columns[index]
            if all(room.place(unit.tensors, problem.tiers) for unit in column.units):
                slots += column.slots
        moves = [Move(slot, slot.start, slot.stop) for slot in slots]
        return build_plan(problem, policy, moves, room.tier_of, copies_early=False)

    def _solve(self, over: Bytes) -> npt.NDArray[np.bool_]:
        """Returns which columns HiGHS chooses, none where it finds no solution; `over` is what must leave per op."""
        import highspy  # here, since only planning for some policies needs it

        columns = self._columns
        versions = {v: len(columns) + i for i, v in enumerate(dict.fromkeys(c.version for c in columns if c.write_ns))}
        write_ns = {c.version: c.write_ns for c in columns if c.write_ns}
        rows, lower = self._rows(over)
        pairs = [(c.needs, i) for i, c in enumerate(columns) if c.needs >= 0]
        pairs += [(versions[c.version], i) for i, c in enumerate(columns) if c.write_ns]
        for needed, needing in pairs:
            rows.add((needed, needing), (1.0, -1.0))
        if len(rows.values) > ENTRIES_AT_MOST:
            return np.zeros(len(columns), bool)
        row_lower = np.array([*lower, *(0.0 for _ in pairs)])
        cost = np.array([c.read_ns for c in columns] + [write_ns[v] for v in versions], np.float64)
        upper = np.ones(len(cost))
        model = make_model(cost / max(1.0, cost.max()), upper, row_lower, np.full(len(row_lower), np.inf), rows)
        model.integrality_ = [highspy.HighsVarType.kInteger] * len(columns) + [highspy.HighsVarType.kContinuous] * len(versions)
        solver = run_highs(
            model,
            threads=1,
            presolve="off",  # slow on these dense rows, and of little use
            mip_rel_gap=GAP,
            mip_max_nodes=NODES,
        )
        values = np.array(solver.getSolution().col_value)
        if len(values) != len(cost) or not np.isfinite(solver.getInfo().objective_function_value):
            return np.zeros(len(columns), bool)
        return values[: len(columns)] > 0.5

    def _rows(self, over: Bytes) -> tuple[SparseRows, list[float]]:
        """Returns a row with its lower limit per op that is over, less those that another implies: same columns, less to go."""
        largest = float(max(1, self._away.max(initial=1)))
        most: dict[bytes, int] = {}
        for op in np.flatnonzero(over).tolist():
            key = self._away[op].tobytes()
            if key not in most or over[op] > over[most[key]]:
                most[key] = op
        rows = SparseRows()
        for op in most.values():
            columns = np.flatnonzero(self._away[op])
            rows.add(columns.tolist(), (self._away[op, columns] / largest).tolist())
        return rows, [float(over[op]) / largest for op in most.values()]

    def _mended(self, chosen: npt.NDArray[np.bool_], over: Bytes) -> npt.NDArray[np.bool_]:
        """Returns the choice with what is missing added and what nothing needs taken back, to the byte."""
        time_ns = np.array([c.read_ns + c.write_ns for c in self._columns], np.float64) + 1.0
        needs = np.array([c.needs for c in self._columns])
        chosen = chosen.copy()
        chosen[needs[chosen & (needs >= 0)]] = True
        left = over - self._away[:, chosen].sum(axis=1)
        while left.max(initial=0) > 0:
            gain = np.minimum(self._away[int(np.argmax(left))], left.max()) / time_ns * ~chosen
            index = int(np.argmax(gain))
            if gain[index] <= 0:
                break
            for column in {index, int(needs[index])} - {-1}:
                left -= self._away[:, column] * (not chosen[column])
                chosen[column] = True
        needed_by = np.bincount(needs[chosen & (needs >= 0)], minlength=len(needs))
        for index in sorted(np.flatnonzero(chosen).tolist(), key=lambda c: (-time_ns[c], c)):
            if not needed_by[index] and (left + self._away[:, index] <= np.maximum(left, 0)).all():
                chosen[index] = False
                left += self._away[:, index]
                if needs[index] >= 0:
                    needed_by[needs[index]] -= 1
        return chosen
