"""`deepum`: paged memory with prefetch of the ops that are predicted to follow (DeepUM, Jung et al., ASPLOS 2023).

The rule. A table of executions predicts the next kernels from the last three, a table per kernel the blocks that it
touches; from the first fault on, the blocks of the next kernels are prefetched, up to a window of kernels ahead. Room for
a prefetch is made from blocks that are used longest ago and that no kernel of the window touches; where there are none,
prefetching stops. A fault evicts the least recently used block whatever the window says. Blocks of freed tensors are
dropped. [V: as modelled by the public G10 artifact; N: the tables, from reading notes]

Constants: `WINDOW` = 8 ops [V: that of the G10 artifact; the paper's own is 32 by hearsay, not verified].

Where the port differs. In a step that repeats, the tables predict the step itself after one round, so the window is read
off the trace. Whole tensors move, not blocks of 2 MiB. Memory of tensors that are not born yet is not taken ahead. Faults
cost their transfers alone. Copies of what leaves begin up to a window earlier, as those of pre-evicted blocks do.

Worked example, budget 2, every tensor of 1 byte: op 0 writes a, op 1 writes b, op 2 writes c, ops 3 to 5 compute and touch
nothing, op 6 reads a, op 7 reads b. At op 2 the device is full: a leaves, the least recently used. Its room comes back when
c dies: at op 3 a is prefetched, three ops ahead, where `oc-dnn` fetches it at op 5 and `demand` at op 6.

On the ten ops of tests/golden/ten_ops.py. m and n leave as under `demand`, copied up to eight ops before. Both updates
are within the window of op 4: m comes back there, n where there is room, in B an op later.
* deepum: A `m<h 4-8, m>h 9-13, n>h 0-3, n<h 4-9`; B `m<h 4-8, m>h 9-13, n>h 0-3, n<h 5-9`
"""

from __future__ import annotations

from tieroff.core.plan import Plan
from tieroff.planner.policy import Assumptions, Decides, policy
from tieroff.planner.problem.assemble import build_plan
from tieroff.planner.problem.problem import Problem
from tieroff.planner.simulate.options import SimulationOptions
from tieroff.study.policies.shared.paging import Paging, build_paged

WINDOW = 8

OPTIONS = SimulationOptions(writes_clean=True)


class _DeepUm(Paging):
    def fetch_ahead(self, tick: int) -> None:
        """Fetches what the ops of the window need, in their order, until there is no room outside of the window."""
        window = [self.needed_at(tick + ahead) for ahead in range(1, WINDOW + 1)]
        keeps = frozenset(tensor for needed in window for tensor in needed)
        for needed in window:
            for tensor in needed:
                if not self.prefetch(tensor, keeps):
                    return


@policy(
    "deepum",
    paper="Jung et al., ASPLOS 2023",
    published=True,
    decides=Decides.ONLINE,
    options=OPTIONS,
    assumes=Assumptions(has_faults=True, has_pages=True),
)
def plan_deepum(problem: Problem) -> Plan:
    """Returns the plan; it may be over the device's budget, which the caller checks."""
    if problem.fits:
        return build_plan(problem, "deepum", [], {})
    return build_paged(problem, "deepum", *_DeepUm(problem).run(), leads=dict.fromkeys(problem.tiers, WINDOW))
