"""Local search on greedy choices, for executors that move whole tensors and nothing across the end of the step.

A change begins where the step waits: at a unit that the wait is for, or that its link served a little before. The unit
stays on the device, keeps one of its inner gaps, or goes to the other lower tier. Other units then leave until every op
fits, and units that no longer have to be away come back. Each choice is swept into windows and simulated; a change is kept when
the step gets shorter, and early in the search also when it is a little longer.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tieroff.core.plan import Plan
from tieroff.core.tensor import Tier
from tieroff.core.timeline import Stall, Timeline
from tieroff.planner.auto.best import Best
from tieroff.planner.auto.greedy import TOLERANCE, Swept, candidate_count, last_resort, sweep_choices, sweep_leads
from tieroff.planner.auto.relaxed import relaxed_selection
from tieroff.planner.auto.select import Score, Selection, Selector
from tieroff.planner.auto.windows import make_moves
from tieroff.planner.bounds.bounds import lower_bound_ns
from tieroff.planner.problem.assemble import build_plan
from tieroff.planner.problem.problem import Bytes, LowerRoom, Problem, Slot
from tieroff.planner.simulate.simulator import simulate

WORK = {"fast": 60_000, "high": 3_000_000}  # ops and units visited, over all changes
_PER_ITEM = {"fast": 1, "high": 20}  # changes for every four ops or units: a small step has few that differ
_SEARCHED_AT_MOST = {"fast": 6_000, "high": 300_000}  # ops and units: a few changes to a larger step are not worth their time
_BEGINS = 2  # choices that the search begins with: that of the relaxation, and the best greedy ones
_CLOSE = 0.002  # of the bound: no need to search on
_HEAT = 0.01  # how much longer than the best a step may be at the beginning
_BACK = 6.0  # transfers before the awaited one that a change begins at, on average at most
_SCORES = (Score.TIME, Score.SLACK, Score.RATIO, Score.RELIEF)


@dataclass(frozen=True)
class _State:
    """The tier of each unit that is away, by position; their gaps that stay on the device nevertheless; and the lead."""

    tier_of: dict[int, Tier]
    kept: frozenset[Slot]
    lead_ns: int


@dataclass(frozen=True)
class _Played:
    state: _State
    plan: Plan
    timeline: Timeline


def exchange_count(problem: Problem) -> int:
    """Returns how many changes are tried: a hundred on a step of a few hundred ops and units, fewer on larger or small ones."""
    size = problem.op_count + len(problem.units) + 1
    effort = problem.effort
    return min(WORK[effort] // size, _PER_ITEM[effort] * size // 4)


def plan_exchanged(problem: Problem, policy: str) -> Plan:
    """Returns the fastest plan of the greedy portfolio and of the search from its best and the relaxation's; see the module.

    Of plans as good as it the one that moves least. As feasible as `plan_greedy`, and never slower by more than what
    counts as equal.
    """
    best = Best(problem, TOLERANCE)
    greedy = _offer_all(best, policy, itertools.islice(sweep_choices(problem), candidate_count(problem)))
    if best.plan is None:
        return last_resort(problem, policy)
    bound_ns, changes = lower_bound_ns(problem), exchange_count(problem)
    if best.is_within(bound_ns, _CLOSE) or not changes:
        return best.plan
    relaxed = relaxed_selection(problem)
    guided = _offer_all(best, policy, sweep_leads(problem, relaxed)) if relaxed is not None else []
    if problem.op_count + len(problem.units) > _SEARCHED_AT_MOST[problem.effort]:
        return best.plan
    begins = [*guided[:1], *greedy[:_BEGINS]][:_BEGINS]
    for seed, begin in enumerate(begins):
        if best.is_within(bound_ns, _CLOSE):
            break
        _Search(problem, policy, best, seed).run(begin.selection, begin.lead_ns, changes // len(begins))
    return best.plan


@dataclass(frozen=True)
class _Begin:
    step_ns: int
    number: int
    selection: Selection
    lead_ns: int


def _offer_all(best: Best, policy: str, choices: Iterable[Swept]) -> list[_Begin]:
    """Offers the plans of choices and returns those that fit, the fastest first."""
    begins: list[_Begin] = []
    for number, (selection, lead_ns, moves) in enumerate(choices):
        step_ns = best.offer_moves(policy, moves, selection.tier_of)
        if step_ns is not None:
            begins.append(_Begin(step_ns, number, selection, lead_ns))
    return sorted(begins, key=lambda begin: (begin.step_ns, begin.number))


class _Search:
    def __init__(self, problem: Problem, policy: str, best: Best, seed: int) -> None:
        self._problem, self._policy, self._best = problem, policy, best
        self._selector = Selector(problem)
        self._random = random.Random(seed)
        self._units_of: dict[int, list[int]] = {}
        for position, unit in enumerate(problem.units):
            for tensor in unit.tensors:
                self._units_of.setdefault(tensor, []).append(position)

    def run(self, selection: Selection, lead_ns: int, count: int) -> None:
        """Tries so many changes, from a choice and a lead on, and offers what they lead to."""
        current = self._play(self._state_of(selection, lead_ns)) if count else None
        if current is None:
            return
        best_ns = current.timeline.step_ns
        for number in range(count):
            if current.timeline.stall_ns <= _CLOSE * best_ns:
                return  # changes begin where the step waits, and gain no more than its waits
            changed = self._change(current) if current.timeline.stalls else None
            played = self._play(changed) if changed is not None else None
            if played is None:
                continue
            step_ns = played.timeline.step_ns
            limit = best_ns * (1.0 + _HEAT * (1.0 - number / count) * self._random.random())
            if step_ns <= max(limit, current.timeline.step_ns):
                current = played
            if step_ns < best_ns:
                best_ns = step_ns
                self._best.offer(played.plan)

    def _state_of(self, selection: Selection, lead_ns: int) -> _State:
        away = set(selection.slots)
        units = [p for p, unit in enumerate(self._problem.units) if any(slot in away for slot in unit.slots)]
        slots = (slot for position in units for slot in self._problem.units[position].slots)
        tiers = {p: selection.tier_of[self._problem.units[p].slots[0].tensor] for p in units}
        return _State(tiers, frozenset(slot for slot in slots if slot not in away), lead_ns)

    def _play(self, state: _State) -> _Played | None:
        """Returns the plan of a choice and what it takes, None where it does not fit."""
        problem, room = self._problem, LowerRoom(self._problem)
        for position, tier in state.tier_of.items():
            order = (tier, *(other for other in problem.tiers if other is not tier))
            if not room.place(problem.units[position].tensors, order):
                return None
        slots = tuple(s for p in state.tier_of for s in problem.units[p].slots if s not in state.kept)
        selection = Selection(slots, room.tier_of, self._usage(state))
        plan = build_plan(problem, self._policy, make_moves(problem, selection, state.lead_ns), room.tier_of)
        if any(plan.peak_bytes[tier] > size for tier, size in problem.budget.items()):
            return None
        return _Played(state, plan, simulate(plan, problem.trace, problem.machine))

    def _usage(self, state: _State) -> Bytes:
        usage = self._problem.live.copy()
        for position in state.tier_of:
            self._add([s for s in self._problem.units[position].slots if s not in state.kept], usage, -1)
        return usage

    def _add(self, slots: list[Slot], usage: Bytes, sign: int) -> None:
        for slot in slots:
            for start, stop in slot.pieces(self._problem.op_count):
                usage[start:stop] += sign * self._problem.size_bytes(slot.tensor)

    # Changes.

    def _change(self, played: _Played) -> _State | None:
        """Returns a neighbour of a simulated choice, None where the change drawn is not possible."""
        state, problem = played.state, self._problem
        position = self._pick_unit(played)
        if position is None:
            return None
        tiers, kept, lead_ns = dict(state.tier_of), set(state.kept), state.lead_ns
        unit = problem.units[position]
        inner = [slot for slot in unit.slots if self._may_stay(position, slot) and slot not in kept]
        action = self._random.randrange(4)
        if action == 0 and len(problem.tiers) > 1:
            tiers[position] = next(tier for tier in problem.tiers if tier is not tiers[position])
            return _State(tiers, state.kept, lead_ns)
        if action == 1 and inner:
            kept.add(self._random.choice(inner))
        elif action == 2:
            lead_ns = int(self._random.choice((0.0, 0.02, 0.05, 0.1)) * int(problem.starts_ns[-1]))
            return _State(tiers, state.kept, lead_ns)
        else:
            del tiers[position]
            kept.difference_update(unit.slots)
        return self._settle(_State(tiers, frozenset(kept), lead_ns), position)

    def _pick_unit(self, played: _Played) -> int | None:
        """Returns a unit that is away and whose transfer is waited for, or that its link served a little before."""
        stalls = [stall for stall in played.timeline.stalls if stall.communication < 0]
        if not stalls:
            return None
        stall: Stall = self._random.choices(stalls, weights=[stall.duration_ns for stall in stalls])[0]
        line = [s.tensor for s in played.timeline.transfers if (s.source, s.target) == (stall.source, stall.target)]
        places = [place for place, tensor in enumerate(line) if tensor == stall.tensor]
        tensor = stall.tensor
        if places and self._random.random() < 0.5:
            tensor = line[(self._random.choice(places) - int(self._random.expovariate(1.0 / _BACK))) % len(line)]
        away = [position for position in self._units_of.get(tensor, ()) if position in played.state.tier_of]
        return self._random.choice(away) if away else None

    def _may_stay(self, position: int, slot: Slot) -> bool:
        unit = self._problem.units[position]
        crosses = any(other.is_boundary for other in unit.slots if other.tensor == slot.tensor)
        is_free = slot.tensor not in self._problem.tied or crosses
        return unit.is_split and is_free and not slot.is_boundary

    def _settle(self, state: _State, held: int) -> _State | None:
        """Returns the choice with more away until every op fits, but not the unit held, and less where there is room."""
        problem, limit = self._problem, self._problem.device_bytes
        tiers, kept = dict(state.tier_of), set(state.kept)
        usage = self._usage(state)
        score = self._random.choice(_SCORES)
        tier = problem.tiers[-1] if self._random.random() < 0.2 else problem.tiers[0]
        waiting = [p for p in range(len(problem.units)) if p not in tiers and p != held]
        while (over := np.maximum(usage - limit, 0)).any():
            own = [slot for slot in sorted(kept, key=lambda s: (s.tensor, s.start)) if held not in self._units_of[slot.tensor]]
            own = [slot for slot in own if any(over[a:b].any() for a, b in slot.pieces(problem.op_count))]
            values = [self._selector.value(score, p, over) for p in waiting]
            best = int(np.argmax(values)) if values else -1
            if own and (best < 0 or values[best] <= 0 or self._random.random() < 0.5):
                slot = self._random.choice(own)
                kept.remove(slot)
                self._add([slot], usage, -1)
            elif best >= 0 and values[best] > 0:
                position = waiting.pop(best)
                tiers[position] = tier
                self._add(list(problem.units[position].slots), usage, -1)
            else:
                return None
        order = list(tiers)
        self._random.shuffle(order)
        for position in order:
            slots = tuple(slot for slot in problem.units[position].slots if slot not in kept)
            if self._selector.takes_back(slots, usage, limit):
                del tiers[position]
                kept.difference_update(problem.units[position].slots)
                continue
            for slot in slots:
                if self._may_stay(position, slot) and self._selector.takes_back((slot,), usage, limit):
                    kept.add(slot)
        return _State(tiers, frozenset(kept), state.lead_ns)
