"""`lms`: run-time large model support (IBM's patch of TensorFlow 2.2; the LMS that DeepUM compares with).

The rule [V: its source]. Tensors that no running op refers to stand in a queue, first the one that has been there longest.
When an allocation fails, the first in the queue that alone makes enough room, with what is free, is paged out; where no
single one does, all of them are. What is away is paged in when an op needs it. For each tensor it is remembered whether
it was paged out in the step before; if so its copy starts as soon as it stands in the queue, ahead of the need.

Constants: none. In a plan, which repeats, the step before is the same step: every copy out starts when its tensor
falls idle, and an allocation that fails waits for the rest of it.

Where the port differs. "With what is free" there means free memory beside it in the address space; bytes are counted
here. One queue serves all classes of tensors. The history is that of one step, not of the last 32.

Worked example, budget 6: op 0 writes a (1 byte), op 1 b (3 bytes), op 2 c (2 bytes), op 3 writes d (2 bytes), op 4 reads
b, op 5 reads a and c. At op 3 the queue is a, b, c, and 2 bytes are missing: a is too small, so b leaves alone, its copy
begun at op 2, where the least recently used rule takes a and b. At op 4, d being dead, b is paged in.

On the ten ops of tests/golden/ten_ops.py. Op 3 asks for room twice, for its scratch and for d (1 and 2 MiB in A, 3 and
4 in B): m is the first that alone makes the one, n the first that makes the other. Both are copied from their last use
on, and the updates wait for them.
* lms: A `m<h 8-8, m>h 9-13, n>h 0-3, n<h 9-9`; B `m<h 8-8, m>h 9-13, n>h 0-3, n<h 9-9`
"""

from __future__ import annotations

from collections.abc import Iterator

from tieroff.core.plan import Plan
from tieroff.planner.policy import Decides, policy
from tieroff.planner.problem.assemble import build_plan
from tieroff.planner.problem.problem import Problem
from tieroff.study.policies.shared.paging import FROM_IDLE, Paging, build_paged


class _Lms(Paging):
    def victims(self, shortage_bytes: int, candidates: Iterator[int]) -> list[int]:
        """Returns the first tensor in the queue that is large enough, or all of them."""
        queue = list(candidates)
        for tensor in queue:
            if self.problem.size_bytes(tensor) >= shortage_bytes:
                return [tensor]
        return queue


@policy("lms", paper="IBM LMS, TensorFlow 2.2", published=True, decides=Decides.ONLINE)
def plan_lms(problem: Problem) -> Plan:
    """Returns the plan; it may be over the device's budget, which the caller checks."""
    if problem.fits:
        return build_plan(problem, "lms", [], {})
    return build_paged(problem, "lms", *_Lms(problem).run(), leads=dict.fromkeys(problem.tiers, FROM_IDLE))
