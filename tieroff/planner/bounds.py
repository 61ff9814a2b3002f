"""Lower bounds on the step time that hold for every plan without recomputation.

[Note: the cut bound]
Let `excess` be the bytes by which the live tensors at an op p exceed the device's budget. Any plan has at least
`excess` bytes of tensors that are live but idle at p in a lower tier while p runs. Each of those bytes
* comes back to the device in every step if its tensor is used again (after p, or in the next step if the gap wraps),
* goes out in every step if its tensor is written since its last copy: always for a tensor that is not persistent, and
  for a persistent one that the step writes at all.
So the link in carries at least `excess` less the bytes that never come back (last gaps), the link out at least
`excess` less the bytes that need no copy, in each step. Summed over the tiers the links offer at most the sum of their
bandwidths (with `nvme_shares_host_link`: that of the larger one); the host takes at most its own budget of bytes at p.
Latencies are left out: with them the bound would be higher. A step is never shorter than its ops.
"""

from __future__ import annotations

import numpy as np

from tieroff.core.tensor import Tier
from tieroff.planner.problem import Bytes, Problem
from tieroff.units import NS_PER_S


def lower_bound_ns(problem: Problem) -> int:
    """Returns a step time, in ns, that no plan for this problem without recomputation can beat."""
    compute_ns = int(problem.starts_ns[-1])
    excess = problem.live - problem.device_bytes
    if not problem.units or int(excess.max(initial=0)) <= 0:
        return compute_ns
    stays_out, stays_clean = _exempt_bytes(problem)
    back = int((excess - stays_out).max())
    out = int((excess - stays_clean).max())
    return max(compute_ns, _channel_ns(problem, out, is_out=True), _channel_ns(problem, back, is_out=False))


def _exempt_bytes(problem: Problem) -> tuple[Bytes, Bytes]:
    """Returns, per op, bytes of idle tensors that need not come back, and that need not be copied out."""
    never_back = np.zeros(problem.op_count, np.int64)
    never_out = np.zeros(problem.op_count, np.int64)
    for unit in problem.units:
        for slot in unit.slots:
            tensor = problem.trace.tensors[slot.tensor]
            is_clean = tensor.is_persistent and not problem.trace.lifetimes[slot.tensor].writes
            for start, stop in slot.pieces(problem.op_count):
                never_back[start:stop] += tensor.size_bytes * slot.is_last
                never_out[start:stop] += tensor.size_bytes * is_clean
    return never_back, never_out


def _channel_ns(problem: Problem, size_bytes: int, *, is_out: bool) -> int:
    """Returns the least time in which all links of one direction carry bytes, at most the host's budget by the host."""
    if size_bytes <= 0:
        return 0
    bandwidth = {tier: problem.links(tier)[0 if is_out else 1].bytes_per_s for tier in problem.tiers}
    if len(bandwidth) == 2 and problem.machine.nvme_shares_host_link:
        total = max(bandwidth.values())
    else:
        total = sum(bandwidth.values())
    least = size_bytes * NS_PER_S // total
    if Tier.NVME in bandwidth:
        spilled = size_bytes - problem.budget[Tier.HOST]
        least = max(least, spilled * NS_PER_S // bandwidth[Tier.NVME])
    return least
