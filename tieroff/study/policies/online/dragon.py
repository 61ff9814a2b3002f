"""`dragon`: memory mapped on the NVMe, with the host as its page cache (DRAGON, Markthub et al., SC 2018).

The rule [A, N: abstract and reading notes]. The device's memory maps files on the NVMe. A fault fetches a page, from the
host's page cache if it is there; the least recently used pages leave, first to the page cache, which is a second level
with its own eviction of the least recently used; from there dirty pages are written to the NVMe without anyone waiting.
A fault also reads ahead what follows in the file, where memory is free. The system has no rule for neural networks.

Constants: `READ_AHEAD` = 2 tensors [M: default, not verified].

Where the port differs. A tensor that the page cache would have to write out while it is away takes the NVMe as its one
place below for the step, and its copy begins when it falls idle; others take the host. Whole tensors move, not pages,
and the order of the trace's tensors stands for that in the file. Faults cost their transfers alone. Without an NVMe all
goes to the host, without room in the host all to the NVMe.

Worked example, device 2, host 1, every tensor of 1 byte: op 0 writes a, op 1 b, op 2 c, op 3 reads c and writes d, op 4
computes and touches nothing, op 5 reads a, op 6 reads b. At op 2 a leaves, at op 3 b does, and pushes a out of the page
cache: a goes to the NVMe, b to the host. At op 5 a faults, and b, next in the file, is read ahead beside op 5 as there is
room.

On the ten ops of tests/golden/ten_ops.py. m and n leave as under `demand`. The fault on m at op 8 reads n ahead, the
next in the file.
* dragon: A `m>h 3-3, m<h 8-8, n>h 3-3, n<h 8-9`; B `m>h 3-3, m<h 8-8, n>h 3-3, n<h 8-9`
"""

from __future__ import annotations

from tieroff.core.plan import Plan
from tieroff.core.tensor import Tier
from tieroff.planner.policy import Assumptions, Decides, policy
from tieroff.planner.problem.assemble import Move, build_plan
from tieroff.planner.problem.problem import Problem
from tieroff.study.policies.shared.paging import FROM_IDLE, Paging, build_paged

READ_AHEAD = 2


class _Dragon(Paging):
    """Paging with tensors that the page cache cannot keep in the NVMe."""

    def __init__(self, problem: Problem, spilled: frozenset[int]) -> None:
        super().__init__(problem)
        self._spilled = spilled

    def tier_order(self, tensor: int) -> tuple[Tier, ...]:
        """Returns the NVMe first for what the page cache would write out."""
        return self.problem.tiers[::-1] if tensor in self._spilled else self.problem.tiers

    def fetch_ahead(self, tick: int) -> None:
        """Fetches what follows the tensors that faulted in the file, into memory that is free."""
        count = len(self.problem.trace.tensors)
        for first in self.faulted:
            for tensor in range(first + 1, min(first + 1 + READ_AHEAD, count)):
                self.prefetch(tensor)


def _spilled(problem: Problem, moves: list[Move]) -> frozenset[int]:
    """Returns the tensors that a page cache as large as the host evicts, least recently used first, while they are away."""
    n = problem.op_count
    events: list[tuple[int, int, int]] = []
    for move in moves:
        stays = [(move.release_at, move.load_at)]
        if move.slot.is_boundary:
            stays = [(max(move.release_at - n, 0), max(move.load_at - n, 0)), (move.release_at, min(move.load_at, n))]
        for start, stop in stays:
            if start < stop:
                events.append((start, 1, move.slot.tensor))
                events.append((stop, 0, move.slot.tensor))
    cached: dict[int, int] = {}
    spilled: set[int] = set()
    room = problem.budget[Tier.HOST]
    for _, arrives, tensor in sorted(events):
        if not arrives:
            room += cached.pop(tensor, 0)
            continue
        cached[tensor] = problem.room_bytes(tensor)
        room -= cached[tensor]
        while room < 0:
            oldest = next(iter(cached))
            spilled.add(oldest)
            room += cached.pop(oldest)
    return frozenset(spilled)


@policy(
    "dragon",
    paper="Markthub et al., SC 2018",
    published=True,
    decides=Decides.ONLINE,
    assumes=Assumptions(has_faults=True, has_pages=True),
)
def plan_dragon(problem: Problem) -> Plan:
    """Returns the plan; it may be over the device's budget, which the caller checks."""
    if problem.fits:
        return build_plan(problem, "dragon", [], {})
    moves, tier_of = _Dragon(problem, frozenset()).run()
    spilled = _spilled(problem, moves)
    if spilled and Tier.NVME in problem.tiers:
        moves, tier_of = _Dragon(problem, spilled).run()
    return build_paged(problem, "dragon", moves, tier_of, leads={Tier.NVME: FROM_IDLE})
