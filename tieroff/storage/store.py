"""The protocols of a store of a lower tier: blocks and homes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tieroff.core.tensor import Tier
from tieroff.storage.completion import Completion

if TYPE_CHECKING:
    from tieroff.storage.engines.base import Engine, Mover

By: TypeAlias = "Callable[[Engine], Mover]"
"""What moves bytes in an engine's place, see Store."""


_NOTED_MOST = 4
"""So many copies outside the store a block knows of before it asks which of them are over."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Block:
    """A place for one tensor's bytes in a store; not mapped. Made by Store.allocate.

    State      entered by      legal next
    empty      allocate        write, free
    writing    write           (completion) written or failed; free
    written    completion      read, write, free
    failed     completion      write, free
    freed      free            nothing; its bytes are reused once the last transfer on them has ended

    Attributes:
        size_bytes: the tensor's bytes.
        area: index of the file or slab.
        offset: first byte in it.
        extent_bytes: bytes taken there, padding included.
        written: the last write, which has the checksum.
        transfers: those that may still touch its bytes.
        is_home: belongs to a home, which frees it.
    """

    size_bytes: int
    area: int
    offset: int
    extent_bytes: int
    written: Completion | None = None
    transfers: list[Completion] = field(default_factory=list)
    is_home: bool = False
    is_freed: bool = False

    @property
    def is_touched(self) -> bool:
        """True while a transfer that it knows of may still touch its bytes."""
        return any(not transfer.done() for transfer in self.transfers)

    def note(self, copy: Completion) -> None:
        """A copy made outside the store (by a device's stream) touches its bytes until it is done."""
        if len(self.transfers) >= _NOTED_MOST:  # each is asked of its device
            self.transfers = [transfer for transfer in self.transfers if not transfer.done()]
        self.transfers.append(copy)


class Home(Protocol):
    """Memory in a lower tier that user code may touch at any time.

    It supports the buffer protocol: `torch.frombuffer(home, dtype=torch.uint8)` keeps it alive. Its place is freed when
    its last reference, any tensor over it included, has died. A new home's content is not specified.
    """

    def __buffer__(self, flags: int, /) -> memoryview: ...

    @property
    def address(self) -> int:
        """Its first byte; it does not change."""

    @property
    def size_bytes(self) -> int:
        """The tensor's bytes."""

    def write(self, source_address: int, keep: object, by: By | None = None) -> Completion:
        """Starts to write a new value, which publish() makes visible; on HOST it is visible as it arrives."""

    def publish(self) -> None:
        """After write() has ended: the memory shows the new value.

        Raises:
            StateError: nothing was written, or the write is still under way.
            StoreError: the write failed. The memory shows the old value.
        """

    def read(self, target_address: int, keep: object, by: By | None = None) -> Completion:
        """Starts to read the memory, including writes from outside."""

    def note(self, copy: Completion) -> None:
        """A copy made outside the store (by a device's stream) touches its bytes until it is done."""

    def trim(self) -> None:
        """Drops its pages from memory and page cache; the value stays. Blocks while changed pages are written."""


class Store(Protocol):
    """Bytes in one lower tier, bounded by a capacity.

    `keep` is any object that must live until the transfer has ended, such as the owner of the memory; it is released when
    the end is noticed: by done() or wait(), or at the latest by the store's next transfer.

    `by` makes, of the store's engine, what moves bytes between its files and memory that the engine does not reach itself
    (a device's); None: the engine does. A store of host memory takes none: the device's streams copy there.
    """

    @property
    def tier(self) -> Tier:
        """The tier that it lies in."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes that blocks and homes may take, padding included."""

    @property
    def alignment_bytes(self) -> int:
        """Blocks and homes take multiples of this."""

    @property
    def used_bytes(self) -> int:
        """Bytes taken now. Freed blocks count until the last transfer on them has ended."""

    @property
    def taken_bytes(self) -> int:
        """The same without a look at transfers: what they keep still counts if they ended a moment ago."""

    @property
    def peak_bytes(self) -> int:
        """The largest used_bytes so far."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the system has given to this store so far; allocate() takes more when they do not do."""

    def reserve(self, size_bytes: int) -> None:
        """Takes room from the system ahead of time, up to this many bytes in all.

        Raises:
            StateError: more than the capacity.
            StoreError: the system has not that much.
        """

    def end_warmup(self) -> None:
        """Ends checks that were asked for the first steps only."""

    def give_back(self, address: int, size_bytes: int) -> None:
        """Drops pages of the homes in a range of addresses from memory where something else has them; values stay.

        Args:
            address, size_bytes: any range.
        """

    def allocate(self, size_bytes: int) -> Block:
        """Returns a place for one tensor.

        Raises:
            StoreError: it is full (ENOSPC).
        """

    def free(self, block: Block) -> None:
        """Gives a place back. Transfers under way on it end first. May be called from a finalizer.

        Raises:
            StateError: it was freed before.
        """

    def write(self, block: Block, source_address: int, keep: object, by: By | None = None) -> Completion:
        """Starts to write the block's bytes from memory.

        Raises:
            StateError: it is freed, or a transfer on it is under way.
        """

    def read(self, block: Block, target_address: int, keep: object, by: By | None = None) -> Completion:
        """Starts to read the block's bytes into memory.

        Raises:
            StateError: it is freed, or not written.
        """

    def home(self, size_bytes: int) -> Home:
        """Returns a new home. Raises StoreError as allocate does."""

    def free_lock(self) -> None:
        """After an exception between any two instructions of this thread: frees a lock that one of its frames held."""

    def repair(self) -> None:
        """After such an exception: frees what frames of this thread held, and ends transfers."""

    def close(self) -> None:
        """Ends all transfers (what has not started is cancelled) and leaves no thread, descriptor or file of its own.

        Idempotent. Memory of homes that are still referred to stays readable until they die.
        """
