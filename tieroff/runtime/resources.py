"""What an engine runs on, opened by whoever makes the engine.

[Note: dropped models]
Device memory of a model that is dropped without `unwrap` comes back as the garbage collector frees it. The rest (pinned memory,
files, threads) cannot be given back there: a collector runs at any point of anybody's call, also of one that holds the locks
that this takes. So it is queued, by C code alone, and given back when the next model is wrapped. Until then it is held, since
transfers and updates may be under way.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field

from tieroff.core.tensor import Tier
from tieroff.runtime.backend.base import Backend
from tieroff.storage.engines import Engine as IoEngine
from tieroff.storage.homes import Death
from tieroff.storage.store import Store

_dead: deque[Death] = deque()
_awaited: dict[int, Death] = {}  # by id: a weak reference that nobody holds calls nobody


@dataclass
class Resources:
    """The device, and the stores of the tiers below it.

    Attributes:
        backend: where computing happens; it is closed first.
        stores: the tiers that have room.
        io: runs the stores' transfers; None without a store.
    """

    backend: Backend
    stores: dict[Tier, Store]
    io: IoEngine | None
    is_closed: bool = field(default=False, init=False)

    def close(self) -> None:
        """Ends an engine's part of the device, then closes the stores; once, since a backend counts its engines."""
        if self.is_closed:
            return
        self.is_closed = True
        self.backend.tune_allocator(None)
        self.backend.close()
        self.close_stores()

    def close_stores(self) -> None:
        """Closes the stores, then the I/O engine under them. Idempotent."""
        for store in self.stores.values():
            store.close()
        if self.io is not None:
            self.io.close()

    def close_after(self, engine: object) -> None:
        """Has `close_dropped` close them once their engine is gone; see [Note: dropped models]."""
        death = Death(engine, _dead.append)
        death.item = (os.getpid(), self)
        _awaited[id(death)] = death


def close_dropped() -> None:
    """Closes what engines ran on that are gone."""
    while _dead:
        death = _dead.popleft()
        _awaited.pop(id(death), None)
        pid, resources = death.item
        if pid == os.getpid():  # in a forked child the stores close their copies of descriptors, and nothing else is its own
            for store in resources.stores.values():
                store.repair()  # what nobody refers to any more was not forgotten
            resources.close()
