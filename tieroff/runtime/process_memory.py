"""Memory that is not the step's: of other engines; on the CPU backend of the process, which a budget in bytes is about."""

from __future__ import annotations

import weakref
from collections.abc import Collection

import torch

from tieroff.core.io.resident import LOADING, resident_bytes
from tieroff.core.tensor import Tier
from tieroff.runtime.backend.base import Backend
from tieroff.runtime.engine import Engine
from tieroff.runtime.items.offloaded import PLAIN
from tieroff.runtime.movable import local_of

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def shares_process(engine: Engine) -> None:
    """An engine is there: what it has on a device is its own."""
    _engines.add(engine)


def elsewhere_bytes(engine: Engine) -> int:
    """Returns what other engines than this one have on its device."""
    others = (other for other in _engines if other is not engine and not other.is_closed and other.device == engine.device)
    return sum(other.own_device_bytes for other in others)


class ProcessMemory:
    """Memory of the process that holds no tensor, on the CPU backend: library code and scratch, heap, thread stacks."""

    def __init__(self, model: torch.nn.Module, backend: Backend, others: Collection[Engine] = ()) -> None:
        """Takes what is resident now, but for what loading this library took.

        Args:
            model: about to be wrapped.
            backend: returns what the heap has kept of freed memory, which is nobody's: whole parameters that were sharded, say.
            others: the engines of other models under the same budget.
        """
        every = map(local_of, (*model.parameters(), *model.buffers()))  # of a DTensor, the part that lies here
        held = (t for t in every if type(t) in PLAIN and t.layout is torch.strided and not t.is_meta)
        tensors = {t.data_ptr(): t for t in held}
        tensor_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        self._backend = backend
        backend.return_freed()
        self._baseline_bytes = resident_bytes() - LOADING.take() - tensor_bytes - _held_bytes(others)

    def overhead_bytes(self, *engines: Engine) -> int:
        """Returns what loading this library took and the growth since wrap that no tensor of the engines accounts for, >= 0."""
        self._backend.return_freed()
        return max(resident_bytes() - self._baseline_bytes - _held_bytes(engines), 0)


def _held_bytes(engines: Collection[Engine]) -> int:
    """Returns the bytes of memory that engines hold, which may share their host pool."""
    pools = {id(pool): pool for engine in engines if (pool := engine.stores.get(Tier.HOST)) is not None}
    return sum(engine.device_bytes for engine in engines) + sum(pool.reserved_bytes for pool in pools.values())
