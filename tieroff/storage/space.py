"""What every store shares: capacity, places, the rules of a block, and how it ends."""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tieroff.core.tensor import Tier
from tieroff.errors import ConfigError, StateError, StoreError
from tieroff.storage.engines.base import Engine, Transfer
from tieroff.storage.extents import FreeList
from tieroff.storage.homes import Death
from tieroff.storage.locks import let_go
from tieroff.storage.memory import align_up
from tieroff.storage.store import Block, By, Home
from tieroff.storage.transfers import UNCHECKED, Action, Check, InFlight, StoreTransfer
from tieroff.units import format_bytes

CLOSE_TIMEOUT_S = 60.0
"""How long close() and a full allocate() wait for transfers that have started."""

# Of a block: those of the set, of the list of all, of the loop, and of the question itself.
_REFERENCES_OF_NOBODY = 4

_logger = logging.getLogger(__name__)


class SpaceStore(ABC):
    """A store over areas that grow up to a capacity.

    Attributes:
        areas: the free ranges of each file or slab.

    [Note: finalizers] Blocks and homes may die in any thread, at any point of any call, also inside this store's own
    lock. Freeing therefore only appends to a queue; calls that hold the lock empty it.
    """

    tier: Tier
    _other_way = "or move less there"  # the other remedy when it is full
    _is_checking = False  # whether checksums are written and compared

    def __init__(self, capacity_bytes: int, engine: Engine, alignment_bytes: int) -> None:
        if capacity_bytes <= 0:
            raise ConfigError(f"[budget] {self.tier}: expected a capacity above 0, got {capacity_bytes}; or leave it out")
        self.capacity_bytes = capacity_bytes
        self.engine = engine
        self.alignment_bytes = alignment_bytes
        self.in_flight = InFlight()
        self.areas: list[FreeList] = []
        self._lock = threading.RLock()  # not for calls inside of calls, but to know whose it is: see `repair`
        self._pid = os.getpid()
        self._used_bytes = 0
        self._peak_bytes = 0
        self._is_closed = False
        self._live: set[Block] = set()
        self._resting: dict[Block, None] = {}  # longest first: see `rest`
        self._freed: deque[Any] = deque()  # blocks, and deaths of homes
        self._awaited: dict[int, Death] = {}  # by id: a weak reference that nobody holds calls nobody
        self._dissolving: Any = None  # what is on the way from there to there
        self._ending: list[Block] = []  # freed, with transfers that have not ended
        self._is_draining = False

    @property
    def used_bytes(self) -> int:
        """Bytes taken now."""
        if os.getpid() == self._pid:
            self.in_flight.reap()
        self._try_drain()
        return self._used_bytes

    @property
    def taken_bytes(self) -> int:
        """The same without a look at transfers: what they keep still counts if they ended a moment ago."""
        if self._freed:
            self._try_drain()
        return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        """The largest used_bytes so far."""
        return self._peak_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the system has given to this store so far."""
        return sum(area.length_bytes for area in self.areas)

    # What a subclass adds.

    @abstractmethod
    def home(self, size_bytes: int) -> Home:
        """Returns a new home."""

    @abstractmethod
    def reserve(self, size_bytes: int) -> None:
        """Takes room from the system ahead of allocate(), up to this many bytes in all."""

    @abstractmethod
    def _grow(self, extent_bytes: int) -> str:
        """Makes room for one more extent; returns "" or the reason why it cannot. Under the lock."""

    @abstractmethod
    def _submit_write(self, block: Block, source_address: int, by: By | None) -> Transfer: ...

    @abstractmethod
    def _submit_read(self, block: Block, target_address: int, by: By | None) -> Transfer: ...

    @abstractmethod
    def _place(self, block: Block) -> tuple[str, int]:
        """Path and offset of a block, for messages."""

    @abstractmethod
    def _release(self) -> None:
        """Gives everything back to the system; all transfers have ended. Under the lock."""

    def _home_check(self, block: Block, target_address: int, by: By | None) -> Check:
        """Returns what a home's bytes are compared with."""
        return UNCHECKED

    def _area_order(self) -> list[int]:
        """Areas in the order in which they are tried."""
        return list(range(len(self.areas)))

    def _free_with(self, home: Home, item: Any) -> None:
        """Frees `item`, which `_dissolve` knows, when a home dies."""
        death = Death(home, self._freed.append)
        death.item = item
        self._awaited[id(death)] = death

    def _dissolve(self, item: Any) -> list[Block]:
        """Returns the blocks of something that was queued as freed. Under the lock."""
        return [item]

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Holds the lock of a store that is open. The process is checked first: a child may inherit the lock held."""
        self._check_process()
        with self._lock:
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._is_closed:
            raise StateError("this store is closed")

    # Places.

    def allocate(self, size_bytes: int) -> Block:
        """Returns a place for one tensor; raises StoreError (ENOSPC) when it is full."""
        if size_bytes <= 0:
            raise StateError(f"allocate: expected a size above 0, got {size_bytes}; a tensor without bytes needs no block")
        while True:
            self._check_process()
            self.in_flight.reap()
            with self._lock:
                self._check_open()
                if self._freed or self._ending or self._is_draining:
                    self._drain()
                block, reason = self._take(size_bytes)
                if block is not None:
                    return block
                ending = [transfer for block in self._ending for transfer in block.transfers]
            # Freed blocks whose transfers have not ended: their room comes back.
            if not ending or not _wait_ended(ending[0]):
                raise self._full(size_bytes, reason)

    def free(self, block: Block) -> None:
        """Gives a place back; transfers under way on it end first. May be called from a finalizer."""
        if block.is_freed:
            raise StateError(f"this block of {block.size_bytes} bytes was freed before")
        block.is_freed = True
        self._freed.append(block)  # [Note: finalizers]
        self._try_drain()

    def rest(self, block: Block) -> None:
        """Nobody needs a block's bytes any more. Its room is free, and whoever had it may `resume` it while nobody took that.

        What copied the block outside of this store has to be in order with what will copy it then.
        """
        with self._lock:
            self._resting[block] = None
            self._live.discard(block)
            self._used_bytes -= block.extent_bytes

    def resume(self, block: Block) -> bool:
        """Takes a resting block again; False where its room is somebody else's by now, or of a store that is full."""
        with self._lock:
            if block not in self._resting or self._used_bytes + block.extent_bytes > self.capacity_bytes:
                return False
            self._live.add(block)
            del self._resting[block]
            self._count_taken(block.extent_bytes)
            return True

    def _count_taken(self, extent_bytes: int) -> None:
        self._used_bytes += extent_bytes
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)

    def _take(self, size_bytes: int) -> tuple[Block | None, str]:
        extent_bytes = align_up(size_bytes, self.alignment_bytes)
        if self._used_bytes + extent_bytes > self.capacity_bytes:
            return None, "the capacity is used up"
        reason = ""
        for _attempt in range(2):
            while True:
                for index in self._area_order():
                    offset = self.areas[index].take(extent_bytes)
                    if offset is not None:
                        self._count_taken(extent_bytes)
                        block = Block(size_bytes, index, offset, extent_bytes)
                        self._live.add(block)
                        return block, ""
                if not self._end_rest():
                    break
            reason = self._grow(extent_bytes)
            if reason:
                break
        return None, reason

    def _end_rest(self) -> bool:
        """Gives the room of the block that rests longest to whoever asks; False where none rests."""
        for block in self._resting:
            if block.is_touched:
                self._live.add(block)  # taken until they are over
                self._used_bytes += block.extent_bytes
                self._ending.append(block)
                del self._resting[block]
            else:
                del self._resting[block]
                self.areas[block.area].give(block.offset, block.extent_bytes)
            return True
        return False

    def _full(self, size_bytes: int, reason: str) -> StoreError:
        path, _offset = self._where()
        largest = max((area.largest_bytes for area in self.areas), default=0)
        return StoreError(
            f"[budget] {self.tier}: no room for {format_bytes(size_bytes)}{f' ({path})' if path else ''}: "
            f"{format_bytes(self._used_bytes)} of {format_bytes(self.capacity_bytes)} are used, the largest free "
            f"extent is {format_bytes(largest)} ({reason}); raise [budget] {self.tier}, {self._other_way}",
            path=path,
            size_bytes=size_bytes,
            errno=errno.ENOSPC,
        )

    def _where(self) -> tuple[str, int]:
        return "", 0

    def _try_drain(self) -> None:
        # Never waits, and does nothing where this thread holds the lock already, further up its stack. [Note: finalizers]
        if not self._lock._is_owned() and self._lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                if not self._is_closed and os.getpid() == self._pid:
                    self._drain()
            finally:
                self._lock.release()

    def free_lock(self) -> None:
        """After an exception that may have come between any two instructions of this thread: other threads can go on."""
        let_go(self._lock)

    def repair(self) -> None:
        """After an exception that may have come between any two instructions of this thread: frees the lock, ends transfers.

        Call it where no call of this store is under way in this thread.

        Raises:
            StoreError: a transfer that only the engine knows of did not end within CLOSE_TIMEOUT_S (ETIMEDOUT).
        """
        self.free_lock()
        for transfer in self.in_flight.all():
            transfer.repair()
            transfer.wait_ended(CLOSE_TIMEOUT_S)
        is_ours = not self._is_closed and os.getpid() == self._pid
        if is_ours and not self.engine.settle(CLOSE_TIMEOUT_S):  # nor those that the exception kept this store from noting
            raise StoreError(
                f"transfers have not ended {CLOSE_TIMEOUT_S:g} s after an exception; the drive may hang", errno=errno.ETIMEDOUT
            )
        with self._lock:
            if not self._is_closed:
                self._recount()

    def _recount(self) -> None:
        """Derives what is taken from the blocks that live."""
        lost = self._blocks_in(self._dissolving) if self._dissolving is not None else []
        self._dissolving = None
        copied = [block for block in self._resting if block.is_touched]
        self._live.update(copied)  # taken until the copies are over
        self._ending += copied
        self._resting.clear()
        self._ending = [block for block in {id(b): b for b in (*self._ending, *lost)}.values() if block in self._live]
        self._forget_deaths()
        for block in list(self._live):
            if sys.getrefcount(block) <= _REFERENCES_OF_NOBODY:  # the call that took it never returned
                self._live.discard(block)
        for index, area in enumerate(self.areas):
            area.rebuild((block.offset, block.extent_bytes) for block in self._live if block.area == index)
        self._used_bytes = sum(block.extent_bytes for block in self._live)
        self._is_draining = False

    def _forget_deaths(self) -> None:
        """Drops what is neither awaited any more nor queued: an exception came after it was taken from the queue."""
        queued = {id(item) for item in tuple(self._freed)}
        for key, death in list(self._awaited.items()):
            if death() is None and key not in queued:
                del self._awaited[key]

    def _blocks_in(self, item: Any) -> list[Block]:
        """Returns the blocks of something that was queued as freed, without another effect."""
        return [item]

    def _drain(self) -> None:
        if self._is_draining:  # the last one broke off in a finalizer, out of which no exception comes for whoever repairs
            self._recount()
        self._is_draining = True
        while self._freed:
            freed = self._freed.popleft()
            if isinstance(freed, Death):
                self._awaited.pop(id(freed), None)
                freed = freed.item
            self._dissolving = freed
            self._ending.extend(self._dissolve(self._dissolving))
            self._dissolving = None
        still_ending = []
        for block in self._ending:
            block.transfers = [transfer for transfer in block.transfers if not transfer.done()]
            if block.transfers:
                still_ending.append(block)
            elif block in self._resting:
                del self._resting[block]
                self.areas[block.area].give(block.offset, block.extent_bytes)
            elif block in self._live:  # else it rested, and its room is somebody else's
                self._live.discard(block)  # first: what lives is taken, see `repair`
                self.areas[block.area].give(block.offset, block.extent_bytes)
                self._used_bytes -= block.extent_bytes
        self._ending = still_ending
        self._is_draining = False

    # Transfers.

    def write(self, block: Block, source_address: int, keep: object, by: By | None = None) -> StoreTransfer:
        """Starts to write the block's bytes from memory."""
        self._check_process()
        self.in_flight.reap()
        with self._lock:
            self._check_open()
            self._check_block(block)
            if block.transfers:
                raise StateError(
                    f"a block was written while {len(block.transfers)} of its transfers are in flight; wait for them first"
                )
            block.written = None
            transfer = self._submit_write(block, source_address, by)
            return self._started(block, transfer, "write", keep)

    def read(self, block: Block, target_address: int, keep: object, by: By | None = None) -> StoreTransfer:
        """Starts to read the block's bytes into memory."""
        self._check_process()
        self.in_flight.reap()
        with self._lock:
            self._check_open()
            self._check_block(block)
            written = block.written
            if not isinstance(written, StoreTransfer) or not written.has_succeeded():
                raise StateError(
                    f"a block was read {'that was never written' if written is None else 'whose write has not succeeded'}; "
                    "wait for the write first"
                )
            transfer = self._submit_read(block, target_address, by)
            return self._started(block, transfer, "read", keep, Check(written.checksum if self._is_checking else None))

    def read_home(self, block: Block, target_address: int, keep: object, by: By | None = None) -> StoreTransfer:
        """Starts to read a home's block as it is now, since user code may have written into it."""
        self._check_process()
        self.in_flight.reap()
        with self._lock:
            self._check_open()
            self._check_block(block)
            check = self._home_check(block, target_address, by)
            transfer = self._submit_read(block, target_address, by)
            return self._started(block, transfer, "read", keep, check)

    def _started(self, block: Block, transfer: Transfer, action: str, keep: object, check: Check = UNCHECKED) -> StoreTransfer:
        started = StoreTransfer(transfer, Action(action, *self._place(block)), keep, self.in_flight, check)
        block.transfers.append(started)
        if action == "write":
            block.written = started
        return started

    def _check_block(self, block: Block) -> None:
        if block.is_freed or block not in self._live:
            raise StateError(f"this block of {block.size_bytes} bytes was freed, or belongs to another store")
        block.transfers = [transfer for transfer in block.transfers if not transfer.done()]

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                f"this store was made in process {self._pid} and called in process {os.getpid()}: a store does not survive a "
                "fork"
            )

    def close(self) -> None:
        """Ends all transfers and releases everything; reports blocks that were never freed. Idempotent.

        Raises:
            StoreError: a transfer did not end within CLOSE_TIMEOUT_S; its memory and file are left as they are.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self.in_flight.end_all(CLOSE_TIMEOUT_S)
        self._await_noted()
        with self._lock:
            self._drain()
            leaked = self._leaked()
            if leaked:
                _logger.warning(
                    "%s store closed with %d blocks that were never freed, %s: %s",
                    self.tier,
                    len(leaked),
                    format_bytes(sum(block.extent_bytes for block in leaked)),
                    ", ".join(str(block.size_bytes) for block in leaked[:8]),
                )
            self._release()

    def _await_noted(self) -> None:
        """Waits for what others copy from or to blocks, or update there: their memory goes next."""
        with self._lock:
            noted = [copy for block in (*self._live, *self._resting) for copy in block.transfers]
        if not all(map(_wait_ended, noted)):
            raise StoreError(f"what uses memory of the {self.tier} store has not ended in time", errno=errno.ETIMEDOUT)

    def _leaked(self) -> list[Block]:
        """Blocks that should have been freed by now; those of homes are freed when their tensors die."""
        return [block for block in self._live if not block.is_home]


def _wait_ended(transfer: Any) -> bool:
    return bool(transfer.wait_ended(CLOSE_TIMEOUT_S))
