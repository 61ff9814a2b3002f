"""`mlp-offload`: MLP-Offload's optimizer phase (SC 2025) over ZeRO-3: state on several paths at once.

The rule. The optimizer's state goes, sub-group by sub-group, to the paths below the device in proportion to their
bandwidth, so that all are read and written at once. Sub-groups that were updated last stay where they are used, and are
updated first in the next step. Gradients are kept as they are and not flushed in backward. Each path is used by one
process at a time.

Verified in the authors' description: that list. Defaults, not verified: that the split is by earliest finish, with a
path's speed that of its slower direction; that a sub-group here is the state of one op of the optimizer.

Differences: a path is a tier, host or NVMe (their host holds a cache, and their third path is a remote file system); the
cache is the device, which keeps the state that is updated last, as much as fits; the order of updates is the trace's, so
the next step does not begin with them; updates run on the device, each with the next one's state on its way. Parameters
and activations stay: a step that does not fit without is over the budget, and the caller says so.

On the ten ops of tests/golden/ten_ops.py. m and n are two sub-groups. Each goes to the path that would end first: to
the host in A, to the NVMe in B. n is read while m is updated.
* mlp-offload: A `m<h 8-8, m>h 9-10, n>h 0-1, n<h 8-9`; B `m<s 8-8, m>s 9-10, n>s 0-1, n<s 8-9`
"""

from __future__ import annotations

from tieroff.core.plan import Plan
from tieroff.core.tensor import Tier
from tieroff.planner.policy import policy
from tieroff.planner.problem.assemble import build_plan
from tieroff.planner.problem.problem import LowerRoom, Problem, Unit
from tieroff.study.policies.tiers.zero import state_moves, state_units

_GROUP_BYTES = 1


def split_over_paths(problem: Problem, units: list[Unit]) -> dict[int, Tier]:
    """Returns the tier of each tensor: each unit goes to the path that would be done with it first and has room."""
    room = LowerRoom(problem)
    rate = {tier: min(link.bytes_per_s for link in problem.links(tier)) for tier in problem.tiers}
    queued = dict.fromkeys(problem.tiers, 0)
    for unit in units:
        size = sum(problem.size_bytes(tensor) for tensor in unit.tensors)
        order = sorted(problem.tiers, key=lambda tier: (queued[tier] + size) / rate[tier])
        if room.place(unit.tensors, tuple(order)):
            queued[room.tier_of[unit.tensors[0]]] += size
    return room.tier_of


def _updated_last(problem: Problem, unit: Unit) -> int:
    return max(problem.trace.lifetimes[tensor].required[-1][1] for tensor in unit.tensors)


@policy("mlp-offload", paper="MLP-Offload, SC 2025", published=True)
def plan_mlp_offload(problem: Problem) -> Plan:
    """Returns MLP-Offload's plan; it may be over the device's budget, which the caller checks."""
    if problem.fits or not problem.units:
        return build_plan(problem, "mlp-offload", [], {})
    units = sorted(state_units(problem), key=lambda unit: (_updated_last(problem, unit), unit.tensors))
    plan, least, most = _with_first(problem, units, len(units)), 0, len(units)
    while plan.peak_bytes[Tier.DEVICE] <= problem.device_bytes and most - least > 1:
        middle = (least + most) // 2
        fewer = _with_first(problem, units, middle)
        if fewer.peak_bytes[Tier.DEVICE] <= problem.device_bytes:
            plan, most = fewer, middle
        else:
            least = middle
    return plan


def _with_first(problem: Problem, units: list[Unit], count: int) -> Plan:
    """Returns the plan in which the state of the first updates leaves the device."""
    tier_of = split_over_paths(problem, units[:count])
    moved = [unit for unit in units[:count] if unit.tensors[0] in tier_of]
    return build_plan(problem, "mlp-offload", state_moves(problem, moved, _GROUP_BYTES), tier_of)
