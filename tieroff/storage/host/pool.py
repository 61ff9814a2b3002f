"""Pinned host memory: exact slabs under a hard limit, and leases in them."""

from __future__ import annotations

import errno
from typing import Any, cast

from tieroff.core.tensor import Tier
from tieroff.errors import ConfigError, StateError, StoreError
from tieroff.storage.completion import Completion
from tieroff.storage.engines.base import Direction, Engine, Transfer
from tieroff.storage.extents import FreeList
from tieroff.storage.homes import HomeMemory, check_published, place_home
from tieroff.storage.host.slabs import PopulatedSlabs, Slab, Slabs
from tieroff.storage.limits import HostLimit, host_limit, locked_limit_bytes
from tieroff.storage.memory import PAGE_BYTES, align_up
from tieroff.storage.space import SpaceStore
from tieroff.storage.store import Block, By
from tieroff.storage.transfers import StoreTransfer
from tieroff.units import format_bytes

SLAB_BYTES = 64 * 2**20
"""A slab made because allocate() found no room; reserve() makes one of the size asked for."""


class HostStore(SpaceStore):
    """Tier HOST. Leases are page-aligned ranges of slabs of anonymous memory.

    A slab is populated, and pinned where a device copies from it, when it is made. No lease spans two slabs: a copy by the
    device must not cross two registrations. A lease never moves either, since people may hold tensors over it: so free
    memory can come to lie in pieces, and a lease that none of them holds is refused.
    """

    tier = Tier.HOST
    _other_way = "or name a folder under [nvme] dirs for what finds no room, or let less be moved there"

    def __init__(
        self, capacity_bytes: int, engine: Engine, slabs: Slabs | None = None, *, slab_bytes: int = SLAB_BYTES
    ) -> None:
        """Makes an empty store; no memory is taken yet.

        Args:
            capacity_bytes: hard limit on the leases, in bytes; whole pages of it are used.
            engine: makes the copies; the caller closes it after the store.
            slabs: makes the memory, pinned where there is a device to pin it for; None makes ordinary memory.
            slab_bytes: the least that is taken from the system at once, when nothing was reserved.

        Raises:
            ConfigError: more than the machine or its smallest cgroup limit has left.
        """
        super().__init__(capacity_bytes, engine, PAGE_BYTES)
        self._maker: Slabs = slabs if slabs is not None else PopulatedSlabs()
        limit = host_limit() if self._maker.is_backed else HostLimit(capacity_bytes)
        if capacity_bytes > limit.left_bytes:
            raise ConfigError(
                f"[budget] host: {format_bytes(capacity_bytes)} is too much, {limit.limiter} leaves at most "
                f"{format_bytes(limit.left_bytes)}; lower it, or give the container more memory"
            )
        self._slab_bytes = slab_bytes
        self._slabs: list[Slab] = []
        self._home_types: dict[int, Any] = {}

    def end_warmup(self) -> None:
        """Nothing to end: memory is not checked."""

    def give_back(self, address: int, size_bytes: int) -> None:
        """Nothing to drop: nothing else has what lies in memory."""

    def reserve(self, size_bytes: int) -> None:
        """Makes the slabs this large in all (whole pages), by one more slab, in which leases may lie side by side.

        Raises:
            StateError: more than the capacity.
            StoreError: the system refused.
        """
        with self._open():
            size = align_up(size_bytes, PAGE_BYTES)
            if size > align_up(self.capacity_bytes, PAGE_BYTES):
                raise StateError(f"expected to reserve at most {self.capacity_bytes} bytes, got {size_bytes}")
            if size > self.reserved_bytes:
                self._make_slab(size - self.reserved_bytes)

    def address(self, block: Block) -> int:
        """Returns where a block lies in memory; valid until it is freed. Copies by the device use it directly."""
        return self._slabs[block.area].address + block.offset

    def home(self, size_bytes: int) -> HostHome:
        """Returns a new home: a lease that lives as long as its references."""
        block = self.allocate(size_bytes)
        with self._open():
            home = cast(HostHome, place_home(HostHome, size_bytes, self.address(block), self._home_types))
            home.store = self
            home.block = block
            home.slab = self._slabs[block.area]
            block.is_home = True
        self._free_with(home, block)
        return home

    def _make_slab(self, size_bytes: int) -> None:
        left = host_limit() if self._maker.is_backed else HostLimit(size_bytes)
        if size_bytes > left.left_bytes:  # asked before, since the system would end this process instead of refusing
            raise _no_memory(size_bytes, f"{format_bytes(left.left_bytes)} that {left.limiter} has left", errno.ENOMEM)
        try:
            slab = self._maker.make(size_bytes)
        except OSError as error:
            limit = locked_limit_bytes()
            may_lock = "no limit on locked memory" if limit is None else f"{format_bytes(limit)} left to lock (ulimit -l)"
            raise _no_memory(size_bytes, f"{error}; this process has {may_lock}", error.errno) from error
        area = FreeList()
        area.extend(slab.size_bytes)
        self._slabs.append(slab)
        self.areas.append(area)

    def _grow(self, extent_bytes: int) -> str:
        left = align_up(self.capacity_bytes, PAGE_BYTES) - self.reserved_bytes
        if left < extent_bytes:
            return "the free memory is in pieces"
        self._make_slab(min(max(extent_bytes, self._slab_bytes), left))
        return ""

    def _recount(self) -> None:
        del self._slabs[len(self.areas) :]  # one that has no area yet is nobody's
        super()._recount()

    def _submit_write(self, block: Block, source_address: int, by: By | None) -> Transfer:
        return self.engine.copy(self.address(block), source_address, block.size_bytes, Direction.OUT)

    def _submit_read(self, block: Block, target_address: int, by: By | None) -> Transfer:
        return self.engine.copy(target_address, self.address(block), block.size_bytes, Direction.IN)

    def _place(self, block: Block) -> tuple[str, int]:
        return "", block.offset

    def _release(self) -> None:
        for slab in self._slabs:
            self._maker.release(slab)
        self._slabs.clear()  # homes that are still referred to hold their slab
        self.areas.clear()


def _no_memory(size_bytes: int, found: str, number: int | None) -> StoreError:
    return StoreError(
        f"[budget] host: cannot take {format_bytes(size_bytes)} of host memory: {found}; lower it, or give this process more",
        size_bytes=size_bytes,
        errno=number,
    )


class HostHome(HomeMemory):
    """A home in host memory: a lease that shows what is copied into it at once."""

    store: HostStore
    block: Block
    slab: Slab

    def write(self, source_address: int, keep: object, by: By | None = None) -> StoreTransfer:
        """Starts to copy a new value in; it is visible as it arrives."""
        return self.store.write(self.block, source_address, (self, keep))

    def publish(self) -> None:
        """Does nothing but check: the value is visible since its copy.

        Raises:
            StateError: nothing was written, or the copy is still in flight.
            StoreError: the copy failed; the memory shows a mixture of old and new.
        """
        check_published(self.block)

    def read(self, target_address: int, keep: object, by: By | None = None) -> StoreTransfer:
        """Starts to copy out what the memory holds now."""
        return self.store.read_home(self.block, target_address, (self, keep))

    def note(self, copy: Completion) -> None:
        """A copy that a device's stream makes touches its bytes until it is done."""
        self.block.note(copy)

    def trim(self) -> None:
        """Does nothing: this memory is the home's only place."""
