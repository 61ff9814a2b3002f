"""Who waited for whom: a rank that calls a collective waits until the last one has called it.

[Note: when a rank waits]
Calls of one collective are matched by their number in its process group. The rank that calls last lets all others go on; up to
that moment each of them waited, if it had nothing else to do. Most calls return when the collective is over, and then the wait
begins with the call. One that was called ahead of need (`async_op=True`, a bucket of DDP) goes on beside compute: the rank was
not waiting while it gave signs of life, which are the beginnings and ends of its ops and its other calls. So the wait begins
with the last of these before it ends. A wait is therefore the most that it can have been: within one op, a call ahead of need
cannot be told from one that waits. What follows the last call, the exchange itself, is communication and no wait.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tieroff.core.ranks.collectives import Call, Collectives


@dataclass(frozen=True, slots=True)
class Wait:
    """Time in which a rank waited for another one, by the clock of its machine.

    Attributes:
        rank, awaited: who waited for whom.
        start_ns, stop_ns: see [Note: when a rank waits].
        call: the rank's own call of the collective.
    """

    rank: int
    awaited: int
    start_ns: int
    stop_ns: int
    call: Call

    def within_ns(self, start_ns: int, stop_ns: int) -> int:
        """Returns how much of it lies in a stretch of time."""
        return max(min(self.stop_ns, stop_ns) - max(self.start_ns, start_ns), 0)


def waits_of(ranks: Iterable[Collectives], signs_ns: Mapping[int, Sequence[int]]) -> list[Wait]:
    """Returns the waits of all ranks that are given, in order of their ends; no two of one rank overlap.

    Args:
        ranks: of one launch; a collective that not all of them that are in its group have is left out.
        signs_ns: by rank, moments at which it ran, beside those of its calls.
    """
    called: dict[tuple[str, int], dict[int, Call]] = defaultdict(dict)
    alive: dict[int, list[int]] = {}
    for one in ranks:
        alive[one.rank] = sorted([*signs_ns.get(one.rank, ()), *(call.at_ns for call in one.calls)])
        for call in one.calls:
            called[call.group, call.number][one.rank] = call
    members: dict[str, set[int]] = defaultdict(set)
    for (group, _), calls in called.items():
        members[group].update(calls)
    whole = [calls for (group, _), calls in called.items() if calls.keys() == members[group]]
    waits: list[Wait] = []
    free_ns: dict[int, int] = defaultdict(int)  # until when a rank's waits are counted already
    for calls in sorted(whole, key=_last_ns):
        stop_ns = _last_ns(calls)
        awaited = min(rank for rank, call in calls.items() if call.at_ns == stop_ns)
        for rank, call in calls.items():
            signs = alive[rank]
            start_ns = max(signs[max(bisect_left(signs, stop_ns) - 1, 0)], call.at_ns, free_ns[rank])
            if rank != awaited and start_ns < stop_ns:
                waits.append(Wait(rank, awaited, start_ns, stop_ns, call))
                free_ns[rank] = stop_ns
    return waits


def _last_ns(calls: Mapping[int, Call]) -> int:
    return max(call.at_ns for call in calls.values())
