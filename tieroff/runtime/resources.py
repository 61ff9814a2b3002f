"""What an engine runs on, opened by whoever makes the engine."""

from __future__ import annotations

from dataclasses import dataclass

from tieroff.core.tensor import Tier
from tieroff.runtime.backend.base import Backend
from tieroff.storage.engines import Engine as IoEngine
from tieroff.storage.store import Store


@dataclass(frozen=True)
class Resources:
    """The device, and the stores of the tiers below it.

    Attributes:
        backend: where computing happens; an engine closes it first.
        stores: the tiers that have room.
        io: runs the stores' transfers; None without a store.
    """

    backend: Backend
    stores: dict[Tier, Store]
    io: IoEngine | None

    def close_stores(self) -> None:
        """Closes the stores, then the I/O engine under them. Idempotent."""
        for store in self.stores.values():
            store.close()
        if self.io is not None:
            self.io.close()
