"""Places below the device: where one tensor's bytes lie in a lower tier, behind one small protocol."""

from __future__ import annotations

from typing import Any, Protocol

from tieroff.core.tensor import Tier
from tieroff.storage.completion import Completion
from tieroff.storage.engines.gds import GdsEngine
from tieroff.storage.host.pool import HostHome, HostStore
from tieroff.storage.nvme.file_store import FileStore
from tieroff.storage.store import Block, By, Home, Store


class Place(Protocol):
    """Room for one tensor's bytes in a lower tier."""

    tier: Tier
    size_bytes: int
    may_rest: bool
    """Between two steps `rest` may give its room back for as long as nobody needs it."""

    @property
    def address(self) -> int | None:
        """Where the bytes lie in host memory, or None when they lie in a file."""

    @property
    def takes_device_memory(self) -> bool:
        """Whether `write` and `read` take an address in device memory too, once no stream uses it any more."""

    def write(self, source_address: int, keep: object, by: By | None = None) -> Completion:
        """Starts a copy of `size_bytes` from memory (see Store for `by`); the old value stays until `publish`."""

    def publish(self) -> None:
        """After a completed `write`: the place now holds the new value."""

    def read(self, target_address: int, keep: object, by: By | None = None) -> Completion:
        """Starts a copy of `size_bytes` to memory."""

    def note(self, copy: Completion) -> None:
        """A copy that the store does not make itself uses the room until it is over."""

    def rest(self) -> None:
        """Its bytes are void, and nothing copies them."""

    def resume(self) -> bool:
        """After `rest`: it has its room again; False where that went to somebody else."""

    def free(self) -> None:
        """Gives the room back; the store gives it to nobody else before the copies that it knows of are over."""


def _takes_device_memory(store: Store) -> bool:
    return store.tier is Tier.NVME and isinstance(store, FileStore) and isinstance(store.engine, GdsEngine)


class BlockPlace:
    """Room that only the engine reads and writes: an activation's."""

    def __init__(self, store: Store, size_bytes: int) -> None:
        self.tier = store.tier
        self.size_bytes = size_bytes
        self.takes_device_memory = _takes_device_memory(store)
        self._store = store
        self._block: Block | None = store.allocate(size_bytes)
        self._host = store if isinstance(store, HostStore) else None
        self.may_rest = self._host is not None

    @property
    def address(self) -> int | None:
        if self._block is None or self._host is None:
            return None
        return self._host.address(self._block)

    def write(self, source_address: int, keep: object, by: By | None = None) -> Completion:
        assert self._block is not None
        return self._store.write(self._block, source_address, keep, by)

    def publish(self) -> None:
        """Nothing to switch: nobody else sees a block."""

    def read(self, target_address: int, keep: object, by: By | None = None) -> Completion:
        assert self._block is not None
        return self._store.read(self._block, target_address, keep, by)

    def note(self, copy: Completion) -> None:
        assert self._block is not None
        self._block.note(copy)

    def rest(self) -> None:
        assert self._host is not None and self._block is not None
        self._host.rest(self._block)

    def resume(self) -> bool:
        assert self._host is not None and self._block is not None
        return self._host.resume(self._block)

    def free(self) -> None:
        if self._block is not None:
            self._store.free(self._block)
            self._block = None


class HomePlace:
    """Room that people can touch: a parameter's, a gradient's or an optimizer state's. Freed with its last tensor."""

    def __init__(self, store: Store, size_bytes: int) -> None:
        self.tier = store.tier
        self.size_bytes = size_bytes
        self.takes_device_memory = _takes_device_memory(store)
        self.home: Home = store.home(size_bytes)
        self.may_rest = False  # people may hold it

    @property
    def address(self) -> int | None:
        return self.home.address if isinstance(self.home, HostHome) else None

    def write(self, source_address: int, keep: object, by: By | None = None) -> Completion:
        return self.home.write(source_address, keep, by)

    def publish(self) -> None:
        if not isinstance(self.home, HostHome):  # bytes in host memory show as they arrive, whoever copied them there
            self.home.publish()

    def read(self, target_address: int, keep: object, by: By | None = None) -> Completion:
        return self.home.read(target_address, keep, by)

    def end_transfers(self) -> None:
        """Blocks the host until no copy that it knows of touches its bytes, of a place in host memory."""
        assert isinstance(self.home, HostHome)
        transfer: Any  # of a store or a stream, which both can be waited for by the host
        for transfer in self.home.block.transfers:
            transfer.wait_ended()

    def note(self, copy: Completion) -> None:
        self.home.note(copy)

    def rest(self) -> None:
        raise AssertionError("a home is never void")

    def resume(self) -> bool:
        raise AssertionError("a home is never void")

    def free(self) -> None:
        """Nothing to do: the memory goes back when its last tensor dies."""
