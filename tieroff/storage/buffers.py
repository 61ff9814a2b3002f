"""The engine's own memory: whole pages that return to the system with their last reference."""

from __future__ import annotations

import ctypes
import mmap

from tieroff.storage.memory import PAGE_BYTES, advise_huge_pages, align_up


class Buffer(mmap.mmap):
    """Private anonymous memory, page-aligned and zeroed; freed to the system with its last reference.

    `torch.frombuffer(buffer, dtype=torch.uint8)` refers to it for as long as a tensor over that storage lives.

    Attributes:
        address: its first byte.
        size_bytes: whole pages, at least the requested size.
    """

    address: int
    size_bytes: int


def allocate(size_bytes: int) -> Buffer:
    """Returns memory of at least `size_bytes`, in whole pages, huge ones if the system has them.

    Args:
        size_bytes: 0 or more; 0 gives one page.

    Raises:
        OSError: the system has no memory or address space left.
    """
    whole_bytes = align_up(max(size_bytes, 1), PAGE_BYTES)
    buffer = Buffer(-1, whole_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    buffer.size_bytes = whole_bytes
    advise_huge_pages(buffer.address, whole_bytes)
    return buffer
