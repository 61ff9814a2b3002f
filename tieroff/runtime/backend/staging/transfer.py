"""One tensor's way between device memory and a file, in pieces; to a store, a transfer like that of an I/O engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from enum import Enum, auto
from errno import ECANCELED, EIO
from typing import Protocol

from tieroff.runtime.backend.stamp import EventStamp
from tieroff.storage.engines.base import Transfer

log = logging.getLogger("tieroff")

_LOOK_S = 0.1  # how often one who waits looks whether it is open, should another have been interrupted with the lock
_LET_GO_S = 1.0  # so long after that one who opens it may have the lock still, on a machine that has much else to do


class Part(Protocol):
    """What uses a slot: a transfer of the I/O engine, or a copy of the device's stream."""

    @property
    def stop_ns(self) -> int: ...

    def done(self) -> bool: ...

    def wait(self, timeout_s: float | None = None) -> object: ...


class StreamPart:
    """A copy of one piece by the device's stream."""

    def __init__(self, ended: EventStamp) -> None:
        self._ended = ended

    @property
    def stop_ns(self) -> int:
        return self._ended.ns()

    def done(self) -> bool:
        return bool(self._ended.event.query())

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for its end; no time-out is kept, since a device's copy of some MiB does not hang by itself."""
        self._ended.event.synchronize()
        return True


class StagingGate:
    """Opens once. Whoever waits may be interrupted between any two instructions, and keeps nobody from opening it.

    An Event is not like that: Ctrl-C right after its lock was taken leaves it taken, and who sets it then waits forever.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._closed = threading.Lock()
        self._closed.acquire()

    def open(self) -> None:
        """Lets all pass."""
        self.is_open = True
        self._closed.release()

    def wait(self, timeout_s: float | None, is_void: Callable[[], bool] = lambda: False) -> bool:
        """Waits until it is open; returns False after the time-out, or once nobody will open it."""
        deadline = time.monotonic() + (threading.TIMEOUT_MAX if timeout_s is None else timeout_s)
        while True:
            left_s = deadline - time.monotonic()
            if self._closed.acquire(timeout=max(0.0, min(left_s, _LOOK_S))):
                self._closed.release()
                return True
            if self.is_open:  # who opens it is about to let go of the lock; or one who was interrupted has it
                if self._closed.acquire(timeout=_LET_GO_S):
                    self._closed.release()
                return True
            if left_s <= 0 or is_void():
                return False


class Decision(Enum):
    """What becomes of a transfer."""

    STARTED = auto()
    TAKEN_BACK = auto()


class StagedTransfer:
    """One tensor's way between device memory and a file; a Transfer, as an engine's.

    Args:
        size_bytes: of the tensor.
        join: makes one checksum of two, as Engine.joined_checksum; None where none are made.
    """

    def __init__(self, size_bytes: int, join: Callable[[int, int, int], int] | None) -> None:
        self.size_bytes = size_bytes
        self._join = join
        self._errno = 0
        self._moved: list[Transfer] = []  # the engine's, in order
        self._parts: list[Part] = []  # the last of each piece
        self._has_passed = StagingGate()  # all pieces went through both stages, or never will
        # The first who sets it decides, and all is said by that: `setdefault` is one operation, before or after which an
        # interrupt comes, so nothing is left half taken back.
        self._decided: dict[str, Decision] = {}

    @property
    def start_ns(self) -> int:
        """When the drive moved its first byte; 0 until then."""
        return self._moved[0].start_ns if self._moved else 0

    @property
    def stop_ns(self) -> int:
        """When its last byte was there; 0 until then."""
        # Of both, since the device's clock may stand a little behind the host's.
        return max((end.stop_ns for end in (*self._moved, *self._parts)), default=0) if self.done() else 0

    @property
    def done_bytes(self) -> int:
        """Bytes that the drive moved so far."""
        return sum(moved.done_bytes for moved in self._moved)

    @property
    def errno(self) -> int:
        """The first error, 0 for none, ECANCELED when it was taken back."""
        if self._is_taken_back:
            return ECANCELED
        return self._errno or next((moved.errno for moved in self._moved if moved.done() and moved.errno), 0)

    @property
    def checksum(self) -> int | None:
        """Of the tensor's bytes, once it has ended well and if it was asked for."""
        if self._join is None or not self.done() or self.errno:
            return None
        checksum = 0
        for index, moved in enumerate(self._moved):
            assert moved.checksum is not None
            checksum = self._join(checksum, moved.checksum, moved.size_bytes) if index else moved.checksum
        return checksum

    def done(self) -> bool:
        return self._is_taken_back or (self._has_passed.is_open and all(part.done() for part in self._parts))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for its end; returns False after the time-out."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._has_passed.wait(timeout_s, lambda: self._is_taken_back):
            return self._is_taken_back
        for part in self._parts:
            if not part.done():
                part.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self.done()

    @property
    def _is_taken_back(self) -> bool:
        return self._decided.get("it") is Decision.TAKEN_BACK

    def cancel(self) -> bool:
        """Takes it back if nothing of it has started; true, too, where it was taken back before."""
        return self._decided.setdefault("it", Decision.TAKEN_BACK) is Decision.TAKEN_BACK

    # For the line that moves it.

    def claim(self) -> bool:
        """Returns True if it is to be started, which keeps everybody from taking it back."""
        return self._decided.setdefault("it", Decision.STARTED) is Decision.STARTED

    def note_moved(self, moved: Transfer) -> None:
        """The engine has got one more piece."""
        self._moved.append(moved)

    def note_last(self, part: Part) -> None:
        """A piece ends with this."""
        self._parts.append(part)

    def fail(self, error: Exception) -> None:
        """Notes the first error."""
        if not isinstance(error, OSError):
            log.error("a copy of %d bytes between the device and a file failed: %s", self.size_bytes, error)
        self._errno = self._errno or getattr(error, "errno", None) or EIO

    def end(self) -> None:
        """All of it has passed."""
        self._has_passed.open()
