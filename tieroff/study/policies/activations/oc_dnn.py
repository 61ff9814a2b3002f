"""`oc-dnn`: paged memory with prefetch for the next op (OC-DNN, Awan et al., HiPC 2018).

The rule. All memory is managed by the driver, which evicts the least recently used [A, N: abstract and reading notes].
When an op starts, what the next op reads and writes is prefetched; the driver makes room for it beside the running op.
The paper prefetches what an op writes, and takes what it reads to be there already, being just computed; in backward that
fails, so both are fetched here.

Constants: `AHEAD` = 1 op [N]. Under options of its own a page that leaves is always written: see `demand`.

Where the port differs. Whole tensors move, not pages. Bytes that leave for a prefetch start their copy one op earlier,
which is when a driver would move page by page. Advice on where pages prefer to be has no effect in a plan.

Worked example, budget 2, every tensor of 1 byte: op 0 writes a, op 1 writes b, op 2 writes c, ops 3 to 5 compute and
touch nothing, op 6 reads a, op 7 reads b. At op 2 the device is full: a leaves, its copy beside op 1. From op 3 on there is
room, but only op 5 looks at op 6: it starts the fetch of a.

On the ten ops of tests/golden/ten_ops.py. m and n leave as under `demand`, and each is fetched beside the op before its
update.
* oc-dnn: A `m>h 2-3, m<h 7-8, n>h 2-3, n<h 8-9`; B `m>h 2-3, m<h 7-8, n>h 2-3, n<h 8-9`
"""

from __future__ import annotations

from tieroff.core.plan import Plan
from tieroff.planner.policy import Assumptions, Decides, policy
from tieroff.planner.problem.assemble import build_plan
from tieroff.planner.problem.problem import Problem
from tieroff.planner.simulate.options import SimulationOptions
from tieroff.study.policies.shared.paging import Paging, build_paged

AHEAD = 1

OPTIONS = SimulationOptions(writes_clean=True)


class _OcDnn(Paging):
    def fetch_ahead(self, tick: int) -> None:
        """Fetches what the next op reads and writes; what it needs and is there already is not evicted for that."""
        needed = self.needed_at(tick + AHEAD)
        keeps = frozenset(needed)
        for tensor in needed:
            self.prefetch(tensor, keeps)


@policy(
    "oc-dnn",
    paper="Awan et al., HiPC 2018",
    published=True,
    decides=Decides.ONLINE,
    options=OPTIONS,
    assumes=Assumptions(has_faults=True, has_pages=True),
)
def plan_oc_dnn(problem: Problem) -> Plan:
    """Returns the plan; it may be over the device's budget, which the caller checks."""
    if problem.fits:
        return build_plan(problem, "oc-dnn", [], {})
    return build_paged(problem, "oc-dnn", *_OcDnn(problem).run(), leads=dict.fromkeys(problem.tiers, AHEAD))
