"""Slabs: large pieces of host memory, taken from the system whole, and how they are pinned."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection
from typing import Protocol

from tieroff.storage.host import numa
from tieroff.storage.memory import Mapping


class Slab(Protocol):
    """One piece, page-aligned; it lives as long as it is referred to.

    Attributes:
        address: its first byte.
        size_bytes: whole pages.
    """

    @property
    def address(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...


class Slabs(Protocol):
    """Makes slabs and takes them back.

    Attributes:
        is_backed: False for address space alone, which takes nothing of the machine's memory.
    """

    is_backed: bool

    def make(self, size_bytes: int) -> Slab:
        """Returns a slab of this size, rounded up to pages, every page of it in memory.

        Raises:
            OSError: the system, or the device's driver (StoreError), refused.
        """

    def release(self, slab: Slab) -> None:
        """The device uses it no more; tensors over it stay valid."""


class PopulatedSlabs:
    """Ordinary memory, of which a forked child has a copy."""

    is_backed = True
    _is_inherited = True

    def make(self, size_bytes: int) -> Mapping:
        slab = Mapping(size_bytes, is_reserved=False, is_inherited=self._is_inherited)
        slab.populate()
        return slab

    def release(self, slab: Slab) -> None:
        """Nothing to undo."""


class RegisteredSlabs(PopulatedSlabs):
    """Ordinary memory that the driver pins, and no child inherits.

    [Note: slabs that nobody got] To pin takes seconds, in which Ctrl-C comes. Memory that is unmapped and still pinned is lost,
    and what is mapped at its address later cannot be pinned. So a slab that dies before it was given back is unpinned first.

    Args:
        register: called with (address, size in bytes); raises StoreError where it is refused.
        unregister: called with the address.
        cpus: whose memory it shall be; none for that of the CPU that asks.
    """

    _is_inherited = False

    def __init__(
        self, register: Callable[[int, int], None], unregister: Callable[[int], None], cpus: Collection[int] = ()
    ) -> None:
        self._register, self._unregister, self._cpus = register, unregister, cpus
        self._pinned: set[int] = set()  # addresses

    def make(self, size_bytes: int) -> Mapping:
        with numa.running_on(self._cpus):  # pages belong to the node of whoever touches them first
            slab = super().make(size_bytes)
            # Called before the mapping's own, since it is the younger one.
            weakref.finalize(slab, self._drop, slab.address, os.getpid()).atexit = False
            self._pinned.add(slab.address)  # first: see [Note: slabs that nobody got]
            try:
                self._register(slab.address, slab.size_bytes)
            except OSError:
                self._pinned.discard(slab.address)
                raise
        return slab

    def release(self, slab: Slab) -> None:
        self._unregister(slab.address)
        self._pinned.discard(slab.address)

    def _drop(self, address: int, pid: int) -> None:
        if address in self._pinned and os.getpid() == pid:
            self._pinned.discard(address)
            self._unregister(address)
