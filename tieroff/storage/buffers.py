"""Memory of the engine's own: whole pages that go back to the system at once when nobody refers to them."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import OrderedDict, deque

from tieroff.storage.memory import PAGE_BYTES, advise_huge_pages, align_up


class Buffer(mmap.mmap):
    """Private anonymous memory, page-aligned and zeroed; freed to the system with its last reference.

    `torch.frombuffer(buffer, dtype=torch.uint8)` refers to it for as long as a tensor over that storage lives.

    Attributes:
        address: its first byte.
        size_bytes: whole pages, at least what was asked for.
    """

    address: int
    size_bytes: int


def allocate(size_bytes: int) -> Buffer:
    """Returns memory of at least `size_bytes`, in whole pages, huge ones where the system gives them.

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


class BufferPool:
    """Buffers whose last reference died, kept for the next tensor of the same size.

    Memory fresh from the system is zeroed page by page as it is first touched: on a drive that reads a gigabyte a second
    this took as long as the reading. Kept memory stays resident, so `trim` is what holds it to a budget.

    Attributes:
        kept_bytes: bytes of buffers that nobody refers to.
    """

    def __init__(self) -> None:
        self.kept_bytes = 0
        self._free: OrderedDict[int, Buffer] = OrderedDict()  # by address, the one freed first in front
        # A last reference can die anywhere, in the middle of a method of this pool too: that only adds to a queue.
        self._returned: deque[Buffer] = deque()
        self._watched: dict[int, weakref.ref[memoryview]] = {}
        self._is_closed = False

    def take(self, size_bytes: int) -> memoryview:
        """Returns memory as `allocate` does, its content undefined; it comes back with the view's last reference."""
        self._collect()
        whole_bytes = align_up(max(size_bytes, 1), PAGE_BYTES)
        address = next((a for a in reversed(self._free) if self._free[a].size_bytes == whole_bytes), None)
        if address is None:
            buffer = allocate(size_bytes)
        else:
            buffer = self._free.pop(address)
            self.kept_bytes -= whole_bytes
        view = memoryview(buffer)
        self._watched[buffer.address] = weakref.ref(view, lambda _: self._give_back(buffer))
        return view

    def close(self) -> None:
        """Keeps nothing any more: what is still referred to goes to the system with its last reference."""
        self._is_closed = True
        self.trim(0)

    def trim(self, limit_bytes: int) -> None:
        """Gives the longest unused buffers back to the system until no more than `limit_bytes` are kept."""
        self._collect()
        while self.kept_bytes > max(limit_bytes, 0):
            _, buffer = self._free.popitem(last=False)
            self.kept_bytes -= buffer.size_bytes

    def _give_back(self, buffer: Buffer) -> None:
        if not self._is_closed:
            self._returned.append(buffer)

    def _collect(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            del self._watched[buffer.address]
            self._free[buffer.address] = buffer
            self.kept_bytes += buffer.size_bytes
