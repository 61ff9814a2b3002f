"""Memory of the process that is given again when it was freed: to the engine's buffers, and to torch's large CPU tensors.

[Note: calls that another library makes] Torch's tensors come from the C library, by two calls of libc10.so. Once they are
served, these two go to the pool when they are for much memory; every other library, and every other call, goes on as before.
Memory stays the pool's for as long as the process lives, so a tensor may outlive the engine, and tieroff itself. Where another
tool stands in the way of these calls already (a memory profiler), the pool does not; one that comes later, and has calls of
free in libc10.so go elsewhere, would pass the pool's memory to the C library, which ends the process.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from tieroff.storage.native import _native

log = logging.getLogger("tieroff")

# Address space, which costs nothing, for what is in use and for gaps between it.
_RESERVED_OF_MEMORY = 4
_TORCH_ALLOCATES_IN = "libc10.so"
# Below it, memory stays in the C library's heap, which wastes less of it than whole pages would.
_SERVED_FROM_BYTES = 1 << 20
_NOTHING_BYTES = 2**64 - 1


@functools.cache
def page_pool() -> _native.PagePool | None:
    """Returns the process's pool; None where there is none (no Linux, or no address space)."""
    try:
        from tieroff.storage.native import _native
    except ImportError:
        return None
    try:
        return _native.process_pool(psutil.virtual_memory().total * _RESERVED_OF_MEMORY, _has_huge_pages())
    except OSError as error:
        log.info("no address space for memory that is given again (%s): all of it comes from the system", error)
        return None


def _has_huge_pages() -> bool:
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False


def serve_torch() -> bool:
    """Has torch's large CPU tensors come from the pool from now on; False where that cannot be."""
    if page_pool() is None or not _is_in_the_way():
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
def _is_in_the_way() -> bool:
    """Puts the pool in the way of torch's allocations; False where it cannot be."""
    from tieroff.storage.native import _native

    try:
        is_there = _native.serve_library(_TORCH_ALLOCATES_IN)
    except OSError as error:
        log.info("%s cannot be served (%s)", _TORCH_ALLOCATES_IN, error)
        return False
    if not is_there:
        log.info("%s allocates by other calls than were expected: freed memory is not kept", _TORCH_ALLOCATES_IN)
    return is_there
