"""The process's pool of freed pages, reused for the engine's buffers and for torch's large CPU tensors.

[Note: calls that another library makes] Torch's tensors come from the C library, by two calls of libc10.so. Once the pool
serves torch, these two calls go to the pool when they ask for much memory. Calls of other libraries are not changed. The
pool owns its memory until the process ends, so a tensor may outlive the engine. If another tool (a memory profiler) redirects
these calls already, the pool does not. A tool that comes later and redirects free in libc10.so would pass the pool's memory
to the C library, which ends the process.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tieroff.storage.native import _native

log = logging.getLogger("tieroff")

# Address space, which costs nothing, for what is in use and for gaps between it.
_RESERVED_OF_MEMORY = 4
TORCH_ALLOCATES_IN = "libc10.so"
# Below it, memory stays in the C library's heap, which wastes less of it than whole pages would. From there on the C library
# would map and unmap each block.
_SERVED_FROM_BYTES = 128 << 10
_NOTHING_BYTES = 2**64 - 1


@functools.cache
def page_pool() -> _native.PagePool | None:
    """Returns the process's pool; None without Linux or without address space."""
    try:
        from tieroff.storage.native import _native
    except ImportError:
        return None
    try:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return _native.process_pool(memory_bytes * _RESERVED_OF_MEMORY, _has_huge_pages())
    except OSError as error:
        log.info("no address space for the pool of freed pages (%s): all memory comes from the system", error)
        return None


def _has_huge_pages() -> bool:
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False


class PoolShares:
    """What each user of the pool may have of it, in use and kept together: a share for each model.

    [Note: shares of the pool] The pool has one limit. A step of one model runs while tensors of another are in use, as a
    generator's activations are in the discriminator's step. Under the limit of that step alone they would leave no room
    to keep anything, and each tensor would come from the system, page by page. So the limit is the sum of the shares; where
    models have one budget together, it is no more than that budget. Who must have nothing kept (a step that is
    recorded) gets that until the next one asks.
    """

    def __init__(self, pool: _native.PagePool) -> None:
        self._pool = pool
        self._shares: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    def set(self, user: object, share_bytes: int, others_bytes: int) -> None:
        """Sets a user's share, above the others' and at least what others had when it came; 0 keeps nothing from now on."""
        self._shares[user] = share_bytes
        beside_bytes = max(sum(self._shares.values()) - share_bytes, others_bytes)
        self._pool.set_limit(share_bytes + beside_bytes if share_bytes > 0 else 0)

    def leave(self, user: object) -> None:
        """Takes a user's share away, and keeps nothing until somebody asks again."""
        self._shares.pop(user, None)
        self._pool.set_limit(0)


@functools.cache
def pool_shares() -> PoolShares | None:
    """Returns the shares of the process's pool; None where there is no pool."""
    pool = page_pool()
    return PoolShares(pool) if pool is not None else None


def serve_torch() -> bool:
    """Makes torch take large CPU tensors from the pool from now on; returns False if that is impossible."""
    if page_pool() is None or not is_in_the_way():
        return False
    from tieroff.storage.native import _native

    _native.serve_from(_SERVED_FROM_BYTES)
    return True


def stop_serving() -> None:
    """Has torch's tensors come from the C library again, and keeps nothing; those there are stay where they are."""
    pool = page_pool()
    if pool is None:
        return
    from tieroff.storage.native import _native

    _native.serve_from(_NOTHING_BYTES)
    pool.set_limit(0)


@functools.cache
def is_in_the_way() -> bool:
    """Makes torch allocate from the pool; returns False where that is not possible."""
    from tieroff.storage.native import _native

    try:
        is_there = _native.serve_library(TORCH_ALLOCATES_IN)
    except OSError as error:
        log.info("%s cannot be served (%s)", TORCH_ALLOCATES_IN, error)
        return False
    if not is_there:
        log.info("%s allocates by other calls than were expected: freed memory is not kept", TORCH_ALLOCATES_IN)
    return is_there
