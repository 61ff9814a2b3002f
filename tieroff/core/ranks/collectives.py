"""The collectives that one rank called, as data: what tells, beside those of other ranks, who waited for whom."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a collective.

    Attributes:
        group: name of the process group, the same on each of its ranks.
        number: of the collective in its group, the same on each of its ranks.
        name: what it does, as "all_gather".
        shape: of what it gives, with its type, for people.
        at_ns: when the rank called it, by the clock of its machine, from the beginning of 1970.
    """

    group: str
    number: int
    name: str
    shape: str
    at_ns: int


@dataclass(frozen=True)
class Collectives:
    """The last collectives that one rank called.

    Attributes:
        rank, world: the rank's number among all, and how many they are.
        machine: whose clock it is; ranks of one machine have the same.
        calls: oldest first; of a long run the last ones. Those alone that no rank leaves before each has called it.
    """

    rank: int
    world: int
    machine: str
    calls: tuple[Call, ...] = ()
