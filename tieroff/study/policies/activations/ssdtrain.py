"""`ssdtrain`: as many of the first modules' activations go to the NVMe as its bandwidth hides; the last ones stay.

Wu et al., "SSDTrain: An Activation Offloading Framework to SSDs for Faster Large Language Model Training", DAC 2025
(arXiv 2408.10013).

The rule. Forward takes F, backward is taken to last 2 F. Modules are asked in order of forward what bandwidth the drive
needs if they are the last to send: (bytes of all before + 2 x their own) / (3 F - 2 x time of all before). The first
one that needs more than there is, and all after it, keep their activations; all before send theirs, each storage once,
right after it is made. In backward, entering a module fetches what the next one needs. What is still being written
when its fetch is due stays where it is.

Certain: the inequality, the single copy, the forwarding and the fetching of one module ahead (the authors' code);
that bandwidth is the drive's measured one rather than that of two profiled steps is the port's.

Where the port differs. A module is one of the trace, or a single op where none is told; in backward, it is the ops that
read what it saved. Parameters and the budget play no part: a plan may be over it. Without a drive, or when it is
full, host memory is used.

On the ten ops of tests/golden/ten_ops.py. Forward takes 20 ms. a, which layer 1 saves, needs 8 MiB in 50 ms or 0.17
GB/s; b, of layer 2, would need 20 MiB in 40 ms or 0.52 GB/s: it stays, all after it too, and op 3 stays over the
budget.
* ssdtrain: A `a>s 1-3, a<s 6-7`; B `a>s 1-3, a<s 6-7`
"""

from __future__ import annotations

import numpy as np

from tieroff.core.plan import Plan
from tieroff.planner.policy import policy
from tieroff.planner.problem.assemble import Move, build_plan, last_dirty_writes
from tieroff.planner.problem.problem import LowerRoom, Problem, Slot
from tieroff.study.policies.shared.copies import copied_ns, release_when_copied, usage_without
from tieroff.study.policies.shared.reading import layers, saved_slots, turn_of
from tieroff.units import NS_PER_S

_STEP_PER_FORWARD = 3  # backward is taken to last twice as long as forward


@policy("ssdtrain", paper="Wu et al., DAC 2025", published=True)
def plan_ssdtrain(problem: Problem) -> Plan:
    """Returns the plan; it may be over the device's budget."""
    if problem.fits or not problem.tiers:
        return build_plan(problem, "ssdtrain", [], {})
    room = LowerRoom(problem)
    chosen = [slot for slot in _first_modules(problem) if room.place((slot.tensor,), problem.tiers[::-1])]
    ahead = _entered_before(problem)
    moves = [
        Move(slot, slot.start, max(ahead[slot.stop], slot.start + 1))
        for slot in chosen
        if slot.stop > slot.start + 1 or ahead[slot.stop] > slot.start
    ]
    # What would still be under way when its fetch is due is forwarded: it never leaves.
    issue_at = {move.slot: _copy_tick(problem, move.slot) for move in moves}
    done = copied_ns(problem, issue_at, room.tier_of)
    moves = [m for m in moves if int(np.searchsorted(problem.starts_ns, done[m.slot])) < m.load_at]
    issue_at = {move.slot: issue_at[move.slot] for move in moves}
    moves = release_when_copied(problem, moves, room.tier_of, usage_without(problem, moves), issue_at)
    return build_plan(problem, "ssdtrain", moves, room.tier_of)


def _first_modules(problem: Problem) -> list[Slot]:
    """Returns the slots of what the modules before the first one that has to keep its own saved, in order."""
    trace, starts = problem.trace, problem.starts_ns
    turn, of_op = turn_of(trace), layers(trace)
    bytes_per_ns = problem.links(problem.tiers[-1])[0].bytes_per_s / NS_PER_S
    saved: dict[int, list[Slot]] = {}
    for slot in saved_slots(problem):
        saved.setdefault(of_op[trace.lifetimes[slot.tensor].birth], []).append(slot)
    begin_of: dict[int, int] = {}
    for index in range(turn):
        begin_of.setdefault(of_op[index], index)
    result: list[Slot] = []
    bytes_before = 0
    for module, begin in begin_of.items():
        own = saved.get(module, [])
        own_bytes = sum(problem.size_bytes(slot.tensor) for slot in own)
        time_ns = _STEP_PER_FORWARD * int(starts[turn]) - 2 * int(starts[begin])
        if bytes_before + 2 * own_bytes > bytes_per_ns * time_ns:
            break
        bytes_before += own_bytes
        result += own
    return result


def _entered_before(problem: Problem) -> list[int]:
    """Returns for each op the tick at which backward enters the module before the op's own; in forward, the op's."""
    turn, of_op = turn_of(problem.trace), layers(problem.trace)
    result = list(range(problem.op_count))
    entered = before = turn
    for index in range(turn, problem.op_count):
        if index > turn and of_op[index] != of_op[index - 1]:
            before, entered = entered, index
        result[index] = before
    return result


def _copy_tick(problem: Problem, slot: Slot) -> int:
    write = last_dirty_writes(problem, [slot])[0]
    return slot.start if write is None else min(write + 1, slot.start)
