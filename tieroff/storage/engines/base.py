"""What an engine is: it moves bytes between memory and files, and between memory and memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from tieroff.storage.completion import Timed


class Direction(StrEnum):
    """Whose queue a memory copy waits in: OUT to a lower tier with the writes, IN from it with the reads."""

    OUT = "out"
    IN = "in"


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file as an engine needs it.

    Attributes:
        fd: its descriptor.
        path: the directory that it lies in, for messages.
        is_direct: opened with O_DIRECT.
        block_bytes: transfers start and end in the file on multiples of this; a power of two.
        memory_alignment: memory that is not aligned to this is bounced; 1 where the file is buffered.
    """

    fd: int
    path: str
    is_direct: bool
    block_bytes: int
    memory_alignment: int


class Transfer(Timed, Protocol):
    """One transfer of an engine. It owns neither memory nor file: both must stay until it has ended.

    A store makes a `Completion` of it, which knows the place and what was to be found there.
    """

    @property
    def size_bytes(self) -> int:
        """Bytes asked for."""

    @property
    def done_bytes(self) -> int:
        """Bytes moved so far; after a failure, those that were."""

    @property
    def errno(self) -> int:
        """The first error, 0 for none, ECANCELED when it was taken back."""

    @property
    def checksum(self) -> int | None:
        """Of the tensor's bytes, once it has ended well and if it was asked for; comparable within one engine."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for its end without the interpreter's lock; returns False after the time-out."""

    def cancel(self) -> bool:
        """Takes it back if nothing of it has started; returns whether it did."""


class Mover(Protocol):
    """Moves bytes between memory and files asynchronously, first in, first out per direction."""

    def read(
        self, file: OpenFile, offset: int, address: int, size_bytes: int, *, with_checksum: bool, is_mapped: bool
    ) -> Transfer:
        """Starts to read into memory. `is_mapped`: dirty pages of the range are written back first."""

    def write(self, file: OpenFile, offset: int, address: int, size_bytes: int, *, with_checksum: bool) -> Transfer:
        """Starts to write from memory; the rest of the last block becomes zeros."""


class Engine(Mover, Protocol):
    """A mover between memory of the host and files, and within that memory.

    In a forked child every call but close() raises StateError.
    """

    @property
    def name(self) -> str:
        """As in the config."""

    @property
    def is_direct(self) -> bool:
        """Whether it wants its files opened with O_DIRECT."""

    @property
    def thread_count(self) -> int:
        """Threads that move bytes."""

    def verify(self, file: OpenFile, offset: int, size_bytes: int) -> Transfer:
        """Starts to read what lies there for its checksum alone; the bytes go nowhere."""

    def copy(self, target_address: int, source_address: int, size_bytes: int, direction: Direction) -> Transfer:
        """Starts to copy memory; the ranges do not overlap."""

    def joined_checksum(self, first: int, second: int, second_bytes: int) -> int:
        """Returns the checksum of two adjoining ranges from those of each, and the size of the second."""

    def settle(self, timeout_s: float) -> bool:
        """Waits until all that was asked for before has ended; returns False after the time-out.

        After an exception between any two instructions there may be transfers that nobody holds. What somebody holds has to
        have ended: what has not started may be taken back.
        """

    def close(self) -> None:
        """Cancels what has not started, waits for the rest and joins its threads. Idempotent."""
