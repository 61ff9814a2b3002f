"""Stamps: when a device gets to a point of its work.

The host only issues work, so its clock says when that was issued. A stamp is a timing event in the order of the compute
stream; what it says can be read once the device has come by, and is asked for after the step.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Protocol

import torch

_NS_PER_MS = 1e6
_READINGS = 3  # of which another process may come into one or two


class Stamp(Protocol):
    """A point of a device's work."""

    def ns(self) -> int:
        """Returns when the device came by, on the host's monotonic clock; waits for it."""

    def ahead_ns(self) -> int:
        """Returns how long after the host asked for it that was; next to nothing where the device waits for the host."""


Time = int | Stamp


def ns_of(when: Time) -> int:
    """Returns a time of the host, or of a device that is waited for."""
    return when if isinstance(when, int) else when.ns()


def clock_ns(when: Time) -> int:
    """Returns a time as the machine's clock tells it, from the beginning of 1970; a device is waited for."""
    return ns_of(when) + min(_ahead() for _ in range(_READINGS))[1]


def _ahead() -> tuple[int, int]:
    """Returns how far the two clocks may have been read apart, and by how much the machine's is ahead of the monotonic one."""
    before_ns, clock, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
    return after_ns - before_ns, clock - (before_ns + after_ns) // 2


class Events:
    """Timing events of one device, used again and again: a step in which nobody reads the time makes none.

    What waits for an event waits for the work before its last record at that moment, so an event may be recorded again as soon
    as nobody holds it. Nobody gives it back: an exception that comes as Python destroys a stamp (Ctrl-C) would be lost.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recorded: deque[torch.Event] = deque()  # by when
        self._held: deque[torch.Event] = deque()  # those that somebody still had when it was their turn
        self._has_looked = False

    def begin_step(self) -> None:
        """A step begins: once in it those are looked at that were held, should it have too few."""
        self._has_looked = False

    def record(self, stream: torch.Stream) -> torch.Event:
        """Returns an event behind what a stream was given so far."""
        event = self._free_of(self._recorded)
        if event is None and not self._has_looked:
            self._has_looked = True
            while (event := self._free_of(self._held)) is not None:
                self._recorded.append(event)
            event = self._free_of(self._recorded)
        if event is None:
            event = torch.Event(self._device, enable_timing=True)
        event.record(stream)
        self._recorded.append(event)
        return event

    def _free_of(self, events: deque[torch.Event]) -> torch.Event | None:
        """Takes the first that nobody holds out of some; it is nobody else's from there on, also where several threads come."""
        for _ in range(len(events)):
            try:
                event = events.popleft()
            except IndexError:  # another thread took the last
                return None
            if sys.getrefcount(event) == _REFERENCES_OF_OWN:
                return event
            self._held.append(event)
        return None


def _references_of_own() -> int:
    event = object()
    return sys.getrefcount(event)


_REFERENCES_OF_OWN = _references_of_own()  # of what one variable holds, and the call that counts


class Anchor:
    """What a step's device times are counted from.

    [Note: two clocks] Events tell the time between them, and with milliseconds as single-precision numbers they tell it well
    only over seconds. So each step counts from an event of its own, whose place on the host's clock follows from the step
    before. The two clocks drift apart; but the device came by no earlier than the event was recorded and no later than it was
    seen to be over, which brings them together again wherever the device waits for the host or the host for the device.

    Args:
        before: the anchor of the step before; None: the device does nothing, so that it comes by at once.
    """

    __slots__ = ("_before", "_events", "_host_ns", "_recorded_ns", "event")

    def __init__(self, events: Events, stream: torch.Stream, before: Anchor | None = None) -> None:
        self._events = events
        self.event = events.record(stream)
        self._recorded_ns = time.monotonic_ns()
        self._before = before
        self._host_ns = 0
        if before is None:
            self.event.synchronize()  # an idle device is there at once, so now, by the host's clock, is when it came by
            self._host_ns = time.monotonic_ns()
        elif before.event.query():
            before.ns()  # or nobody's reading would let the chain grow

    def ns(self) -> int:
        """Returns when the device came by, on the host's monotonic clock; waits for it."""
        before = self._before
        if before is not None:
            self.event.synchronize()  # no time can be asked of an event that is not over
            follows_ns = before.ns() + round(before.event.elapsed_time(self.event) * _NS_PER_MS)
            self._host_ns = min(max(follows_ns, self._recorded_ns), time.monotonic_ns())
            self._before = None
        return self._host_ns

    def stamp(self, stream: torch.Stream) -> EventStamp:
        """Returns a stamp behind what a stream was given so far, counted from here."""
        return EventStamp(self._events, stream, self)


class EventStamp:
    """A timing event on a stream."""

    __slots__ = ("_anchor", "_ns", "_recorded_ns", "event")

    def __init__(self, events: Events, stream: torch.Stream, anchor: Anchor) -> None:
        self._anchor, self._ns = anchor, 0
        self.event = events.record(stream)
        self._recorded_ns = time.monotonic_ns()

    def ns(self) -> int:
        if not self._ns:
            self.event.synchronize()  # no time can be asked of an event that is not over
            self._ns = self._anchor.ns() + round(self._anchor.event.elapsed_time(self.event) * _NS_PER_MS)
        return self._ns

    def ahead_ns(self) -> int:
        return max(self.ns() - self._recorded_ns, 0)
