"""Address space by system call: mappings, and advice about them.

[Note: memory a child does not have] Memory that a driver pinned is advised MADV_DONTFORK: a fork would have the parent's next
write go to a copy of the page, while the device goes on with the old one. So are files that are mapped: their pages are shared,
so a child would see what its parent trains on, and could write it. A private mapping in the child would not help: of pages
that it has not written, it shows what the parent writes later. A child has nothing at these addresses and may have
mapped something else there. Ordinary memory of the host tier is inherited, copy-on-write: a child finds the values of the fork,
and its own writes are its own. No mapping is ever unmapped in another process than the one that made it. `mmap.mmap` cannot
promise that, hence the calls by ctypes.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref

PAGE_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 * 2**20

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000  # the same on x86-64 and aarch64
_MADV_PAGEOUT = 21  # since Linux 5.4
_MADV_POPULATE_WRITE = 23  # since Linux 5.14
_PROT_NONE = 0
_MAP_FAILED = ctypes.c_void_p(-1).value
_MEMORY_FILE_SYSTEMS = (0x01021994, 0x858458F6)  # tmpfs, ramfs
_SYNC_FILE_RANGE_ALL = 1 | 2 | 4  # wait for writes in flight, write, wait

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def align_up(value: int, alignment: int) -> int:
    """Returns the smallest multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


def _os_error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def _mmap(address: int | None, size_bytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    result = _libc.mmap(address, size_bytes, protection, flags, fd, offset)
    if result is None or result == _MAP_FAILED:
        raise _os_error("mmap")
    return int(result)


def advise(address: int, size_bytes: int, advice: int) -> None:
    """madvise. Raises OSError."""
    if _libc.madvise(address, size_bytes, advice) != 0:
        raise _os_error("madvise")


def advise_huge_pages(address: int, size_bytes: int) -> None:
    """Asks for huge pages; without them only speed is lost, so there is no error."""
    if size_bytes >= HUGE_PAGE_BYTES:
        _libc.madvise(address, size_bytes, mmap.MADV_HUGEPAGE)


def page_out(address: int, size_bytes: int) -> None:
    """Has the system take a range's whole pages back as if memory were short: nothing is lost. No error where it cannot."""
    start, stop = align_up(address, PAGE_BYTES), (address + size_bytes) // PAGE_BYTES * PAGE_BYTES
    if start < stop:
        _libc.madvise(start, stop - start, _MADV_PAGEOUT)


def write_back(fd: int, offset: int, size_bytes: int) -> None:
    """Writes the range's dirty pages to the drive and waits, without a commit of the file system's journal."""
    if _libc.sync_file_range(fd, offset, size_bytes, _SYNC_FILE_RANGE_ALL) != 0:
        raise _os_error("sync_file_range")


def is_in_memory(fd: int) -> bool:
    """Returns whether an open file lies in a file system that is itself memory (tmpfs, ramfs)."""
    status = ctypes.create_string_buffer(256)  # struct statfs, whose first field is the type, a word
    if _libc.fstatfs(fd, status) != 0:
        raise _os_error("fstatfs")
    kind = int.from_bytes(status.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder)
    return kind in _MEMORY_FILE_SYSTEMS


class Mapping:
    """An own stretch of address space; unmapped when its last reference dies.

    Attributes:
        address: its first byte, page-aligned.
        size_bytes: whole pages.
    """

    def __init__(self, size_bytes: int, *, is_reserved: bool, is_inherited: bool = False) -> None:
        """Maps private memory or, with `is_reserved`, address space alone that cannot be touched.

        Args:
            size_bytes: rounded up to whole pages.
            is_reserved: see above.
            is_inherited: a forked child has a copy; see [Note: memory a child does not have].

        Raises:
            OSError: the system has none left.
        """
        self.size_bytes = align_up(size_bytes, PAGE_BYTES)
        protection = _PROT_NONE if is_reserved else mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_NORESERVE if is_reserved else 0)
        self.address = _mmap(None, self.size_bytes, protection, flags, -1, 0)
        weakref.finalize(self, _unmap, self.address, self.size_bytes, os.getpid()).atexit = False
        if not is_inherited:
            advise(self.address, self.size_bytes, mmap.MADV_DONTFORK)

    def map_file(self, position: int, size_bytes: int, fd: int, offset: int) -> None:
        """Replaces the mapping at `position` by a range of a file, shared and writable. Atomic."""
        address = self.address + position
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        _mmap(address, size_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
        advise(address, size_bytes, mmap.MADV_DONTFORK)  # a new mapping starts without it

    def unmap_file(self, position: int, size_bytes: int) -> None:
        """Makes the range reserved address space again."""
        address = self.address + position
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _mmap(address, size_bytes, _PROT_NONE, flags, -1, 0)
        advise(address, size_bytes, mmap.MADV_DONTFORK)

    def give_back(self, position: int, size_bytes: int) -> None:
        """Drops the range's pages from this process; mapped files keep their bytes, private memory loses them."""
        advise(self.address + position, size_bytes, mmap.MADV_DONTNEED)

    def populate(self) -> None:
        """Populates every page now, so that no transfer waits for it later.

        Raises:
            OSError: the system has not that much.
        """
        advise_huge_pages(self.address, self.size_bytes)
        try:
            advise(self.address, self.size_bytes, _MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            for position in range(0, self.size_bytes, PAGE_BYTES):
                ctypes.memset(self.address + position, 0, 1)


class SpareMappings(Mapping):
    """Some mappings of nothing. Given up, they let a process change others that has as many as the kernel allows.

    There the kernel refuses every mapping, also one in the place of another; but not to unmap a range as it was mapped.
    """

    def __init__(self, count: int) -> None:
        """Maps them.

        Raises:
            OSError: the process has no room for them.
        """
        super().__init__((2 * count - 1) * PAGE_BYTES, is_reserved=True)
        for position in range(0, self.size_bytes, 2 * PAGE_BYTES):  # the first and the last: they join no neighbour
            if _libc.mprotect(self.address + position, PAGE_BYTES, mmap.PROT_READ) != 0:
                raise _os_error("mprotect")


def _unmap(address: int, size_bytes: int, pid: int) -> None:
    if os.getpid() == pid:  # [Note: memory a child does not have]
        _libc.munmap(address, size_bytes)
