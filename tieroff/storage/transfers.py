"""A store's transfers: what they keep alive, and how their failures become errors."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tieroff.errors import StoreError
from tieroff.storage.engines.base import Transfer
from tieroff.storage.locks import let_go

READS_MAX = 4
"""How often a home is read until two reads agree."""


class Action(NamedTuple):
    """What a transfer does and where, for messages.

    Attributes:
        name: "write", "read" or "read back".
        path: the directory; "" for host memory.
        offset: first byte there.
    """

    name: str
    path: str
    offset: int


@dataclass(frozen=True, slots=True)
class Check:
    """What the bytes of a read are compared with.

    Attributes:
        checksum: of what was written; None where nothing is compared.
        read_again: reads once more, see [Note: values that user code may change]; None where one read decides.
    """

    checksum: int | None = None
    read_again: Callable[[], Transfer] | None = None


UNCHECKED = Check()


class StoreTransfer:
    """An engine's transfer with its place; implements Completion.

    [Note: values that user code may change] A home's bytes may differ from those that were written because user code wrote
    into its memory, which is allowed and leaves no trace. A home that differs is therefore read again, into the same target.
    When two reads agree, that is its value: random errors on the way from the drive do not repeat. Once this store has seen
    its drive change bytes, it accepts no home that differs.
    """

    __slots__ = (
        "_action",
        "_believed",
        "_checksums",
        "_expected_checksum",
        "_in_flight",
        "_is_good",
        "_keep",
        "_lock",
        "_read_again",
        "_transfer",
    )

    def __init__(self, transfer: Transfer, action: Action, keep: object, in_flight: InFlight, check: Check = UNCHECKED) -> None:
        self._transfer = transfer
        self._action = action
        self._keep: object = keep
        self._in_flight = in_flight
        self._expected_checksum = check.checksum
        self._read_again = check.read_again
        self._checksums: tuple[int | None, ...] = ()  # of earlier reads, under [Note: values that user code may change]
        self._believed: tuple[int | None, ...] = ()  # those of them that the last one may equal
        self._lock = threading.RLock()  # one thread at a time decides on another read
        self._is_good = False  # known to have ended well
        in_flight.add(self)

    @property
    def size_bytes(self) -> int:
        """Bytes asked for."""
        return self._transfer.size_bytes

    @property
    def start_ns(self) -> int:
        """When its first byte was moved, CLOCK_MONOTONIC; 0 until then."""
        return self._transfer.start_ns

    @property
    def stop_ns(self) -> int:
        """When it ended; 0 until then."""
        return self._transfer.stop_ns

    @property
    def checksum(self) -> int | None:
        """Of the tensor's bytes, once it has ended well and if it was asked for."""
        return self._transfer.checksum

    def done(self) -> bool:
        """Returns whether it has ended, well or not."""
        if not self._transfer.done() or not self._is_last():
            return False
        self._settle()
        return True

    def has_succeeded(self) -> bool:
        """Returns whether it has ended well."""
        if not self._is_good:
            self._is_good = self.done() and self._failure() is None
        return self._is_good

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when it has ended well; raises StoreError otherwise (see Completion.wait)."""
        if not self.wait_ended(timeout_s):
            raise self._error(errno.ETIMEDOUT, f"not ended after {timeout_s} s; the drive may hang")
        failure = None if self._is_good else self._failure()
        if failure is not None:
            raise failure

    def wait_ended(self, timeout_s: float | None = None) -> bool:
        """Waits for its end, well or not; returns False after the time-out.

        Also of one that has ended: a device's stream waits by this call, and only by it.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._transfer.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
            if self._is_last():
                self._settle()
                return True
        return False

    def _is_last(self) -> bool:
        """Returns whether the transfer that has ended is the last one; if not, another read may have been started."""
        if self._read_again is None:
            return True
        # Never waits: a finalizer may ask in the middle of this very method, further up the same thread's stack.
        if self._lock._is_owned() or not self._lock.acquire(blocking=False):  # type: ignore[attr-defined]
            return False
        try:
            return self._decide()
        finally:
            self._lock.release()

    def repair(self) -> None:
        """Frees the lock that a frame of this thread still holds which an exception interrupted."""
        let_go(self._lock)

    def _decide(self) -> bool:
        if self._read_again is None:
            return True
        if not self._transfer.done():
            return False
        believed = () if self._in_flight.has_seen_changed_bytes else self._checksums
        is_right = self._transfer.checksum in (self._expected_checksum, *believed)
        if self._transfer.errno != 0 or is_right or len(self._checksums) == READS_MAX - 1:
            # Final: from here on nothing keeps the target's memory for another read.
            self._believed, self._read_again = believed, None
            return True
        again = self._read_again()
        self._checksums += (self._transfer.checksum,)
        self._transfer = again
        return False

    def cancel(self) -> bool:
        """Takes it back if nothing of it has started."""
        is_cancelled = self._transfer.cancel()
        if is_cancelled:
            self._settle()
        return is_cancelled

    def _settle(self) -> None:
        self._in_flight.discard(self)
        self._keep = None

    def _failure(self) -> StoreError | None:
        number = self._transfer.errno
        if number == errno.ECANCELED:
            return self._error(number, "cancelled before it had ended")
        if number == errno.ENOSPC:
            return self._error(number, "no space left: free some, or name another directory under [nvme] dirs")
        if number != 0:
            return self._error(number, f"{os.strerror(number)}: see the system's log for this drive")
        if self._transfer.done_bytes != self.size_bytes:
            return self._error(errno.EIO, "the engine reported completion before the last byte")
        expected = self._expected_checksum
        if expected is not None and (found := self._transfer.checksum) not in (expected, *self._believed):
            self._in_flight.has_seen_changed_bytes = True
            shown = "none" if found is None else f"{found:#010x}"
            return self._error(
                errno.EBADMSG, f"checksum {shown}, written was {expected:#010x}: the drive or its path changed bytes"
            )
        return None

    def _error(self, number: int, reason: str) -> StoreError:
        action = self._action
        place = f"{action.path or 'host memory'} at offset {action.offset}"
        done = self._transfer.done_bytes
        return StoreError(
            f"{action.name} of {self.size_bytes} bytes, {place}: {done} bytes done: {reason}",
            path=action.path,
            offset=action.offset,
            size_bytes=self.size_bytes,
            done_bytes=done,
            errno=number,
        )


class InFlight:
    """The transfers in flight of one store; the only reference to them that is certain to stay.

    It has no lock: each method is one operation on a set, which is atomic, and finalizers may run in between.

    Attributes:
        has_seen_changed_bytes: a transfer found other bytes than were written.
    """

    def __init__(self) -> None:
        self.has_seen_changed_bytes = False
        self._transfers: set[StoreTransfer] = set()

    def __len__(self) -> int:
        return len(self._transfers)

    def add(self, transfer: StoreTransfer) -> None:
        """Keeps a transfer, and with it the objects that it keeps."""
        self._transfers.add(transfer)

    def discard(self, transfer: StoreTransfer) -> None:
        """Releases a transfer."""
        self._transfers.discard(transfer)

    def all(self) -> list[StoreTransfer]:
        """Returns the transfers that have not ended, or whose end nobody has seen."""
        return list(self._transfers)

    def reap(self) -> None:
        """Releases every transfer that has ended."""
        if self._transfers:
            for transfer in self._transfers.copy():
                transfer.done()

    def end_all(self, timeout_s: float) -> None:
        """Cancels what has not started and waits for the rest.

        Raises:
            StoreError: one has not ended in time (ETIMEDOUT).
        """
        transfers = self._transfers.copy()
        for transfer in transfers:
            transfer.cancel()
        deadline = time.monotonic() + timeout_s
        for transfer in transfers:
            left_s = max(0.0, deadline - time.monotonic())
            if not transfer.wait_ended(left_s):
                raise transfer._error(errno.ETIMEDOUT, f"not complete {timeout_s} s after close(); the drive may hang")
