"""`capuchin`: activations with the longest idle time over transfer time are swapped; where that would wait, recompute.

Peng et al., "Capuchin: Tensor-based GPU Memory Management for Deep Learning", ASPLOS 2020.

The rule. From one measured step: an activation that lives where memory is short leaves after one access (the evicted
one) and is back for the next. Its free time FT is the time between the end of its copy out, begun at the evicted
access, and the latest start of its copy in. Those with the largest FT are swapped while it is above 0. If memory is
still short, the best swap that is left costs -FT, and the best recomputation the time of its lineage: the ops from
what is then on the device to the tensor. The one that costs less is taken; among recomputations the one that saves
most bytes per time (MSPS) is best. Choosing one changes the lineages of others. Copies in are triggered from the last
deadline to the first, each as late as it can be without another one on the link, never where memory is short. After
each step, a tensor that was late is triggered earlier by 5 % of its copy's time.

Certain, from notes on the paper: FT, MSPS, the order of choice, the triggers, the feedback of 5 %. Defaults, not
verified: a tensor leaves in the gap with its largest FT; the comparison takes single best ones; ten rounds of feedback.

Where the port differs. "Short" is counted op by op, so that the plan fits where the rule can make it. The feedback runs
in the simulator and its fastest step is kept. The passive mode of a first step is not a plan. Recomputed are only
tensors that ops write once, by ops that write nothing that persists; only for executors that repeat single ops. The
paper's link carries one transfer at a time: OPTIONS. When host memory is full, tensors go to the NVMe.

On the ten ops of tests/golden/ten_ops.py. In A the copies of a take 8 of the 35 ms in which it is idle, those of b 17
of 20: a has more free time and goes first, b has to go too; each comes back an op ahead. In B no swap hides. Op 1 makes
b again in 5 ms, the most bytes per time, and that is enough.
* capuchin: A `a>h 2-3, a<h 6-7, b>h 3-3, b<h 5-6`; B `repeat 1@6`
"""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np

from tieroff.core.plan import Plan, Repeat, Residency
from tieroff.core.tensor import TensorClass, Tier
from tieroff.planner.policy import policy
from tieroff.planner.problem.assemble import Move, build_plan
from tieroff.planner.problem.problem import Bytes, LowerRoom, Problem, Slot
from tieroff.planner.simulate.options import SimulationOptions
from tieroff.planner.simulate.simulator import memory_per_op, simulate
from tieroff.study.policies.shared.copies import issued_at_start, release_when_copied, retimed
from tieroff.study.policies.shared.lineage import Lineage, Lineages

OPTIONS = SimulationOptions(has_exclusive_link=True)

_FEEDBACK_PERCENT = 5
_ROUNDS = 10


@policy("capuchin", paper="Peng et al., ASPLOS 2020", published=True, options=OPTIONS)
def plan_capuchin(problem: Problem) -> Plan:
    """Returns the plan; it may be over the device's budget."""
    if problem.fits or not problem.tiers:
        return build_plan(problem, "capuchin", [], {})
    choice = SwapChoice(problem)
    choice.run()
    lead_ns: dict[int, int] = {}
    best: Plan | None = None
    for _ in range(_ROUNDS):
        plan = choice.plan(lead_ns)
        timeline = simulate(plan, problem.trace, problem.machine, OPTIONS)
        plan = replace(plan, step_ns=timeline.step_ns)
        if best is None or plan.step_ns < best.step_ns:
            best = plan
        late = {stall.tensor for stall in timeline.stalls if stall.tensor >= 0 and stall.target is Tier.DEVICE}
        if not late:
            break
        for tensor in late:
            back_ns = problem.links(choice.tier_of[tensor])[1].transfer_ns(problem.size_bytes(tensor))
            lead_ns[tensor] = lead_ns.get(tensor, 0) + back_ns * _FEEDBACK_PERCENT // 100
    return best if best is not None else choice.plan({})


class SwapChoice:
    """Who is swapped and who is recomputed."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._starts = problem.starts_ns
        self._usage = problem.live.copy()
        self._room = LowerRoom(problem)
        self._lineages = Lineages(problem)
        self._swapped: list[Slot] = []
        self._recomputed: list[Slot] = []
        self.tier_of = self._room.tier_of

    def _free_ns(self, slot: Slot) -> int:
        """Returns FT."""
        out, back = self._problem.links(self._problem.tiers[0])
        size = self._problem.size_bytes(slot.tensor)
        return int(self._starts[slot.stop] - self._starts[slot.start]) - out.transfer_ns(size) - back.transfer_ns(size)

    def _candidates(self) -> list[Slot]:
        """Returns one slot per activation that is idle where memory is short, those with the largest FT first."""
        tensors = self._problem.trace.tensors
        best: dict[int, Slot] = {}
        for slot in (slot for unit in self._problem.units for slot in unit.slots):
            tensor = tensors[slot.tensor]
            if tensor.kind is not TensorClass.ACTIVATION or tensor.is_persistent or slot.is_last:
                continue
            if self._relieves(slot) and (slot.tensor not in best or self._free_ns(slot) > self._free_ns(best[slot.tensor])):
                best[slot.tensor] = slot
        return sorted(best.values(), key=lambda slot: (-self._free_ns(slot), slot.tensor))

    def _relieves(self, slot: Slot) -> bool:
        return bool((self._usage[slot.start : slot.stop] > self._problem.device_bytes).any())

    def run(self) -> None:
        """Chooses until every op fits or nothing is left to choose."""
        left = self._candidates()
        ranked: list[tuple[float, int, Slot]] = []
        if self._problem.capabilities.repeats_ops:
            ranked = [(-value, slot.tensor, slot) for slot in left if (value := self._saved_per_time(slot)) > 0]
            heapq.heapify(ranked)
        done: set[int] = set()
        for slot in left:
            while slot.tensor not in done and self._relieves(slot):
                again = self._best_recompute(ranked, done) if self._free_ns(slot) <= 0 else None
                if again is not None and self._cost_ns(again) < -self._free_ns(slot):
                    done.add(again.tensor)
                    self._recomputed.append(again)
                    self._leave(again)
                    continue
                done.add(slot.tensor)
                if self._room.place((slot.tensor,), self._problem.tiers):
                    self._swapped.append(slot)
                    self._leave(slot)

    def _leave(self, slot: Slot) -> None:
        self._usage[slot.start : slot.stop] -= self._problem.size_bytes(slot.tensor)
        self._lineages.away[slot.tensor] = Move(slot, slot.start, slot.stop)

    def _cost_ns(self, slot: Slot) -> int:
        found = self._lineages.find(slot.tensor, slot.stop)
        return found.cost_ns if found is not None else int(self._starts[-1])

    def _saved_per_time(self, slot: Slot) -> float:
        """Returns MSPS, or 0 for what cannot be recomputed."""
        found = self._lineages.find(slot.tensor, slot.stop)
        return self._problem.size_bytes(slot.tensor) / (found.cost_ns + 1) if found is not None else 0.0

    def _best_recompute(self, ranked: list[tuple[float, int, Slot]], done: set[int]) -> Slot | None:
        """Returns the slot with the largest MSPS; a value that has changed is put back in its place."""
        while ranked:
            value, tensor, slot = ranked[0]
            now = self._saved_per_time(slot)
            if tensor in done or now <= 0 or not self._relieves(slot):
                heapq.heappop(ranked)
            elif now < -value:
                heapq.heapreplace(ranked, (-now, tensor, slot))
            else:
                return slot
        return None

    def plan(self, lead_ns: dict[int, int]) -> Plan:
        """Returns the plan with loads triggered earlier by what `lead_ns` says for their tensors."""
        problem = self._problem
        usage = self._usage.copy()
        moves = self._load(lead_ns, usage)
        self._lineages.away = {m.slot.tensor: m for m in moves}
        self._lineages.away.update((s.tensor, Move(s, s.start, s.stop)) for s in self._recomputed)
        found: dict[Slot, Lineage] = {}
        for slot in self._recomputed:
            lineage = self._lineages.find(slot.tensor, slot.stop)
            if lineage is not None and usage[slot.stop] + self._extra_bytes(lineage, slot.stop) <= problem.device_bytes:
                usage[slot.stop] += self._extra_bytes(lineage, slot.stop)
                found[slot] = lineage
            elif self._room.place((slot.tensor,), problem.tiers):
                moves.append(Move(slot, slot.start, slot.stop))
        moves = release_when_copied(problem, moves, self.tier_of, usage)
        plan = build_plan(problem, "capuchin", moves, self.tier_of)
        plan = retimed(problem, plan, issued_at_start(moves))
        return self._with_repeats(plan, found)

    def _load(self, lead_ns: dict[int, int], usage: Bytes) -> list[Move]:
        """Returns the swaps with their triggers; `usage` gets the bytes of what is back before its use."""
        problem = self._problem
        moves: list[Move] = []
        free_ns = int(self._starts[-1])
        for slot in sorted(self._swapped, key=lambda s: (-s.stop, s.tensor)):
            size = problem.size_bytes(slot.tensor)
            back_ns = problem.links(self.tier_of[slot.tensor])[1].transfer_ns(size)
            free_ns = min(free_ns, int(self._starts[slot.stop])) - back_ns
            begin_ns = free_ns - lead_ns.get(slot.tensor, 0)
            load = int(np.searchsorted(self._starts, begin_ns, side="right")) - 1
            load = min(max(load, slot.start + 1), slot.stop)
            over = np.flatnonzero(usage[load : slot.stop] > problem.device_bytes - size)
            if over.size:
                load += int(over[-1]) + 1
            usage[load : slot.stop] += size
            moves.append(Move(slot, slot.start, load))
        return moves

    def _extra_bytes(self, lineage: Lineage, tick: int) -> int:
        ops = self._problem.trace.ops
        transient = max(ops[op].transient_bytes for op in lineage.ops) - ops[tick].transient_bytes
        return lineage.passing_bytes + max(transient, 0)

    def _with_repeats(self, plan: Plan, found: dict[Slot, Lineage]) -> Plan:
        """Returns the plan with the tensors of `found` dropped and made again when they are wanted."""
        if not found:
            return plan
        dropped = {slot.tensor: slot for slot in found}
        residencies: list[Residency] = []
        for r in plan.residencies:
            slot = dropped.get(r.tensor)
            residencies += [r] if slot is None else [replace(r, stop=slot.start), replace(r, start=slot.stop)]
        passing = {(tensor, slot.stop) for slot, lineage in found.items() for tensor in lineage.passing}
        passing -= {(slot.tensor, slot.stop) for slot in found}
        residencies += [Residency(tensor, Tier.DEVICE, at, at + 1) for tensor, at in sorted(passing)]
        repeats = sorted({(slot.stop, op) for slot, lineage in found.items() for op in lineage.ops})
        again = tuple(Repeat(op, at) for at, op in repeats)
        plan = replace(plan, residencies=tuple(residencies), repeats=again)
        memory = memory_per_op(plan, self._problem.trace)
        return replace(plan, peak_bytes={tier: max(line) for tier, line in memory.items()})
