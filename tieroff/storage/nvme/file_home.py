"""A tensor's value on a drive, mapped into memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tieroff.storage.homes import HomeMemory, check_published
from tieroff.storage.memory import Mapping
from tieroff.storage.store import Block, By
from tieroff.storage.transfers import StoreTransfer


@dataclass(slots=True, eq=False, weakref_slot=True)
class MappedExtents:
    """Where a home lies; outlives the home, to be freed.

    Attributes:
        space: the address space that it is mapped in.
        position: first byte there.
        shown: the extent that the memory shows.
        shadow: the extent of a value that is written and not published yet.
    """

    space: Mapping
    position: int
    shown: Block
    shadow: Block | None = None

    @property
    def address(self) -> int:
        """The home's first byte."""
        return self.space.address + self.position


class HomeStore(Protocol):
    """What a home asks of the store that it lies in."""

    def allocate(self, size_bytes: int) -> Block:
        """Returns an extent."""

    def write(self, block: Block, source_address: int, keep: object, by: By | None = None) -> StoreTransfer:
        """Starts to write an extent."""

    def read_home(self, block: Block, target_address: int, keep: object, by: By | None = None) -> StoreTransfer:
        """Starts to read an extent that user code may have written into."""

    def verify(self, place: MappedExtents) -> None:
        """While checksums are on, reads the shadow back. Raises StoreError if it differs from what was written."""

    def switch(self, place: MappedExtents) -> None:
        """Makes the memory show the shadow, and frees what it showed before."""

    def trim(self, place: MappedExtents) -> None:
        """Drops the pages of what is shown from memory and page cache."""


class FileHome(HomeMemory):
    """A home on a drive. It works like memory, at the drive's speed.

    [Note: no direct write to mapped bytes] A page that is written through its mapping while a direct write to it is
    under way can keep the old bytes, with every call reporting success. So a new value goes to an extent that is not
    mapped anywhere (the shadow), and publish() switches the mapping.
    """

    store: HomeStore
    place: MappedExtents

    def write(self, source_address: int, keep: object, by: By | None = None) -> StoreTransfer:
        """Starts to write a new value; the memory shows the old one until publish()."""
        if self.place.shadow is None:
            shadow = self.store.allocate(self.size_bytes)
            shadow.is_home = True
            self.place.shadow = shadow
        return self.store.write(self.place.shadow, source_address, (self, keep), by)

    def publish(self) -> None:
        """Switches the memory to the value of the last write(); while checksums are on, waits until it is read back.

        Raises:
            StateError: nothing was written, or the write is still under way.
            StoreError: the write failed, or the drive holds something else (EBADMSG). The memory shows the old value.
        """
        check_published(self.place.shadow)
        self.store.verify(self.place)
        self.store.switch(self.place)

    def read(self, target_address: int, keep: object, by: By | None = None) -> StoreTransfer:
        """Starts to read what the memory shows; changed pages are written to the drive first.

        While checksums are on, a value that is not the published one is read until two reads agree, see
        [Note: values that user code may change].
        """
        return self.store.read_home(self.place.shown, target_address, (self, keep), by)

    def trim(self) -> None:
        """Drops its pages from memory and page cache; the value stays. Blocks while changed pages are written."""
        self.store.trim(self.place)
