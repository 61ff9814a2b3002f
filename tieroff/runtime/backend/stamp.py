"""Stamps: when a device gets to a point of its work.

The host only issues work, so its clock says when that was issued. A stamp is a timing event in the order of the compute
stream; what it says can be read once the device has come by, and is asked for after the step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch

_NS_PER_MS = 1e6


class Stamp(Protocol):
    """A point of a device's work."""

    def ns(self) -> int:
        """Returns when the device came by, on the host's monotonic clock; waits for it."""


Time = int | Stamp


def ns_of(when: Time) -> int:
    """Returns a time of the host, or of a device that is waited for."""
    return when if isinstance(when, int) else when.ns()


@dataclass(frozen=True, slots=True)
class Anchor:
    """What a step's device times are counted from: an event, and the host's time when it was recorded."""

    event: torch.Event
    host_ns: int

    @classmethod
    def now(cls, stream: torch.Stream) -> Anchor:
        """Returns an anchor at this point of a stream's work."""
        event = torch.Event(stream.device, enable_timing=True)
        event.record(stream)
        return cls(event, time.monotonic_ns())


class EventStamp:
    """A timing event on a stream."""

    __slots__ = ("_anchor", "_ns", "event")

    def __init__(self, stream: torch.Stream, anchor: Anchor) -> None:
        self.event = torch.Event(stream.device, enable_timing=True)
        self.event.record(stream)
        self._anchor = anchor
        self._ns = 0

    def ns(self) -> int:
        if not self._ns:
            self.event.synchronize()
            self._ns = self._anchor.host_ns + round(self._anchor.event.elapsed_time(self.event) * _NS_PER_MS)
        return self._ns
