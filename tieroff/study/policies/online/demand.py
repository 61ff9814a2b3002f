"""`demand`: paging on demand with eviction of the least recently used, as unified virtual memory (UVM) does it.

The baseline of every paper on unified memory (DeepUM, ASPLOS 2023; G10, MICRO 2023, whose simulator calls it UVM-LRU).

The rule. An op that touches what is away faults: the pages come from below while it waits, and where the device is full
the pages that were touched longest ago leave first, to the host while it has room [V: the public G10 artifact].

Constants: `FAULT_BYTES_PER_S`, fitted to the published times, default, not verified. Under options of its own a page that
leaves is always written, for a page of unified memory has one place at a time; an eviction is always awaited.

Where the port differs. Whole tensors move, not pages, so nothing is in part on the device; the time to handle faults is
not charged, only the transfers; bytes of a dead tensor are free at once, while a driver without the program's knowledge
writes them back. The last two make the published times of this rule far longer: with links as slow as faults make them
they come out, but for steps that fit once dead tensors are freed, which the published rule pages all the same.

Worked example, budget 2, every tensor of 1 byte: op 0 writes a, op 1 writes b, op 2 writes c and reads nothing, op 3 reads
b, op 4 reads a. At op 2 the device is full: a, touched longest ago, leaves. Op 3 finds b, and c is dead by then. Op 4
faults on a.

On the ten ops of tests/golden/ten_ops.py. Op 3 asks for room twice, for its scratch and for d; m, used longest ago, and
then n leave while it waits, and the updates wait for them.
* demand: A `m>h 3-3, m<h 8-8, n>h 3-3, n<h 9-9`; B `m>h 3-3, m<h 8-8, n>h 3-3, n<h 9-9`
"""

from __future__ import annotations

from tieroff.core.plan import Plan
from tieroff.planner.policy import Assumptions, Decides, ModelOptions, policy
from tieroff.planner.problem.assemble import build_plan
from tieroff.planner.problem.problem import Problem
from tieroff.planner.simulate.options import SimulationOptions
from tieroff.study.policies.shared.paging import Paging, build_paged
from tieroff.units import GIB

FAULT_BYTES_PER_S = round(1.7 * GIB)

OPTIONS = SimulationOptions(writes_clean=True, eviction_blocks=True)


@policy(
    "demand",
    paper="UVM, as in G10, MICRO 2023",
    published=True,
    decides=Decides.ONLINE,
    options=ModelOptions(OPTIONS, FAULT_BYTES_PER_S),
    assumes=Assumptions(has_faults=True, has_pages=True),
)
def plan_demand(problem: Problem) -> Plan:
    """Returns the plan; it may be over the device's budget, which the caller checks."""
    if problem.fits:
        return build_plan(problem, "demand", [], {})
    return build_paged(problem, "demand", *Paging(problem).run())
