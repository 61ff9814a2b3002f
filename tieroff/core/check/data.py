"""The checker's model of data: which version of some bytes each tier holds, event by event.

[Note: versions]
Every write makes a new version. A tier that is resident holds a version or no valid data; the newest version is the
current one. Ops, copies and updates need the current version; a repeat needs the version that its op's first run read,
and gives what it writes the version that the first run wrote. Bytes of a persistent tensor are followed round the ring,
each round from tick 0 to tick n: the first begins with valid data in every tier in which they are resident, the second
with what the first left, unless that is the same and nothing was under way. A third would find nothing new: a copy of
anything but the current version is refused, so what a round leaves depends on what it was given only through tiers that
nothing wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from tieroff.core.check.rules import Rule, refuse
from tieroff.core.plan import HostUpdate, Residency, Transfer
from tieroff.core.tensor import Tier


class Kind:
    """Events at a tick, in their order; see [Note: order of events at a tick] in the module of plans.

    Plain integers, since there are hundreds of thousands of events in a large plan.
    """

    DUE = 0  # the place of an op that the host runs: from here on no op may touch what it changes
    ISSUE_FIRST = 1
    UPDATE_FIRST = 2
    READY_OUT = 3
    UPDATED = 4
    END = 5
    BEGIN = 6
    ISSUE = 7
    UPDATE = 8
    READY_IN = 9
    REPEAT = 10
    OP = 11


Event = tuple[int, Any]
"""`tick << 4 | kind`, by which events sort, and what happens."""


@dataclass(slots=True)  # not frozen: that would triple the time to make one, and there are hundreds of thousands
class Use:
    """One op's use of a tensor, in round `base / n` of the ring: a run on the device, a repeat of one, or an update."""

    op: int
    writes: bool
    base: int = 0
    update: HostUpdate | None = None


@dataclass(slots=True)
class Job:
    """A transfer in one round; `version` is None when it was issued in the round before the first."""

    transfer: Transfer
    version: int | None = None
    overwrites: int = 0


class Versions:
    """Follows the bytes of one part of a tensor; see [Note: versions]."""

    def __init__(
        self, name: str, *, resident: set[Tier], is_persistent: bool, needed_until: int, birth: int, has_repeats: bool
    ) -> None:
        """Starts with valid data where anything is resident.

        Args:
            name: of the tensor, for messages.
            resident: tiers in which the bytes are at the start of the ring.
            is_persistent: the data is always needed.
            needed_until: last tick at which an op, a hold or the program needs the data.
            birth: tick at which data that is not persistent begins, on the device.
            has_repeats: a repeat writes the bytes, so they may be gone for a while.
        """
        self._name = name
        self._is_persistent = is_persistent
        self._needed_until = needed_until
        self._birth = birth
        self._can_come_back = has_repeats
        self._current = 0
        self._overwrites = 0
        self._at_op: dict[int, int] = {}
        self._pending: dict[int, Use] = {}
        self._lost: object = None
        self._at_first = resident
        # The version in each tier that is resident; None: no valid data.
        self._valid: dict[Tier, int | None] = dict.fromkeys(resident, 0)

    @property
    def is_as_at_first(self) -> bool:
        """True when valid data is in the tiers in which it was at the start, and in no other."""
        return {tier for tier, version in self._valid.items() if version == self._current} == self._at_first

    def follow(self, events: list[Event], *, until: int) -> None:
        """Applies events; one that a rule forbids raises InvalidPlanError.

        Args:
            events: in any order; those of one tick and kind keep theirs.
            until: last tick that counts.
        """
        actions: tuple[Callable[[int, Any], None], ...] = (
            self._due,
            self._issue,
            self._update,
            self._ready,
            self._updated,
            self._end,
            self._begin,
            self._issue,
            self._update,
            self._ready,
            self._repeat,
            self._run,
        )
        end = until + 1 << 4
        for key, item in sorted(events, key=itemgetter(0)):
            if key >= end:
                break
            actions[key & 15](key >> 4, item)
        if self._lost is not None:
            self._refuse_lost()

    def _begin(self, tick: int, r: Residency) -> None:
        is_birth = not self._is_persistent and r.tier is Tier.DEVICE and tick == self._birth
        self._valid.setdefault(r.tier, self._current if is_birth else None)

    def _end(self, tick: int, r: Residency) -> None:
        if self._valid.pop(r.tier, None) == self._current:
            self._leave(tick, r)

    def _leave(self, tick: int, cause: object) -> None:
        """The current version has left a tier."""
        if self._current in self._valid.values():
            return
        if self._is_persistent or tick <= self._needed_until:
            self._lost = cause
            if not self._can_come_back:
                self._refuse_lost()

    def _refuse_lost(self) -> None:
        message = f"{self._name} has no other valid copy when this ends, and is needed later: {self._lost}"
        refuse(Rule.LOST_DATA, message)

    def _issue(self, tick: int, job: Job) -> None:
        if self._valid.get(job.transfer.source) != self._current:
            if self._lost:
                self._refuse_lost()
            source = job.transfer.source.value
            refuse(Rule.INVALID_COPY, f"{self._name} has no valid copy in {source} when this is issued: {job.transfer}")
        job.version = self._current
        job.overwrites = self._overwrites

    def _ready(self, tick: int, job: Job) -> None:
        if job.version is not None and (job.version != self._current or job.overwrites != self._overwrites):
            refuse(Rule.STALE_COPY, f"{self._name} is written while this copies it: {job.transfer}")
        self._valid[job.transfer.target] = self._current

    def _run(self, tick: int, use: Use) -> None:
        if self._valid.get(Tier.DEVICE) != self._current:
            if self._lost:
                self._refuse_lost()
            refuse(Rule.NOT_READY, f"{self._name} is used at op {use.op} and its data is not on the device yet")
        for other in self._pending.values():
            if other.writes or use.writes:
                refuse(Rule.HOST_UPDATE, f"op {use.op} touches {self._name} before this is awaited: {other.update}")
        if use.writes:
            self._current += 1
            self._valid[Tier.DEVICE] = self._current
        self._at_op[tick] = self._current

    def _repeat(self, tick: int, use: Use) -> None:
        what = f"op {use.op} that runs again at tick {tick - use.base}"
        if Tier.DEVICE not in self._valid:
            refuse(Rule.REPEAT, f"{self._name} is not on the device for {what}")
        version = self._at_op[use.base + use.op]
        found = self._valid[Tier.DEVICE]
        if not use.writes:
            if found != version:
                if self._lost and version == self._current:
                    self._refuse_lost()
                refuse(Rule.REPEAT, f"{self._name} does not hold for {what} what its first run read")
            return
        self._valid[Tier.DEVICE] = version
        if found != version:
            self._overwrites += 1  # a copy that is under way from or to the device is mixed up
        if version == self._current:
            if tick > self._needed_until and self._lost:
                self._refuse_lost()  # it comes back for another repeat only, after it was needed
            self._lost = None
        elif found == self._current:
            self._leave(tick, what)

    def _due(self, tick: int, use: Use) -> None:
        self._pending[use.base + use.op] = use

    def _update(self, tick: int, use: Use) -> None:
        own = use.base + use.op
        if self._valid.get(Tier.HOST) != self._current:
            refuse(Rule.HOST_UPDATE, f"{self._name} has no valid copy in host at the start of {use.update}")
        for op, other in self._pending.items():
            if op < own and (other.writes or use.writes):
                refuse(Rule.HOST_UPDATE, f"{self._name} is still in use by {other.update} at the start of {use.update}")
        if use.writes:
            self._current += 1
            self._valid[Tier.HOST] = None

    def _updated(self, tick: int, use: Use) -> None:
        # An update that was issued in the round before the first is not pending: the first begins with its result.
        if self._pending.pop(use.base + use.op, None) is not None and use.writes:
            self._valid[Tier.HOST] = self._current
