"""The native engines with direct I/O: `threads`, and `uring` on the kernel's io_uring."""

from __future__ import annotations

import os
import weakref

from tieroff.storage.engines.base import Direction, OpenFile
from tieroff.storage.native import _native

# A tensor of some MiB is worked on by all calls of its direction at once. With chunks of a whole tensor, several tensors
# share the drive and each arrives late, while plans take transfers to be first in, first out.
_CHUNK_BYTES = 2**20


class _NativeBase:
    """What the native engines have in common.

    Attributes:
        name: as in the config.
        is_direct: both want O_DIRECT.
        native: the native engine, whose fault table tests use.
        thread_count: threads that move bytes.
    """

    name: str
    is_direct = True

    def __init__(self, native: _native.Engine, thread_count: int) -> None:
        self.native = native
        self.thread_count = thread_count
        # At exit, before memory that a transfer still touches is torn down; also when the engine is forgotten.
        self._close = weakref.finalize(self, native.close)

    def read(
        self, file: OpenFile, offset: int, address: int, size_bytes: int, *, with_checksum: bool, is_mapped: bool
    ) -> _native.Transfer:
        """Starts to read into memory."""
        return self.native.read(
            file.fd,
            offset,
            address,
            size_bytes,
            file.block_bytes,
            file.memory_alignment,
            with_checksum,
            is_mapped and file.is_direct,
        )

    def write(self, file: OpenFile, offset: int, address: int, size_bytes: int, *, with_checksum: bool) -> _native.Transfer:
        """Starts to write from memory."""
        return self.native.write(file.fd, offset, address, size_bytes, file.block_bytes, file.memory_alignment, with_checksum)

    def verify(self, file: OpenFile, offset: int, size_bytes: int) -> _native.Transfer:
        """Starts to read for the checksum alone, through the engine's bounce buffers."""
        return self.native.read(file.fd, offset, 0, size_bytes, file.block_bytes, file.memory_alignment, True)

    def copy(self, target_address: int, source_address: int, size_bytes: int, direction: Direction) -> _native.Transfer:
        """Starts to copy memory."""
        return self.native.copy(target_address, source_address, size_bytes, direction is Direction.IN)

    def joined_checksum(self, first: int, second: int, second_bytes: int) -> int:
        """Returns the checksum of two adjoining ranges."""
        return _native.crc32c_combine(first, second, second_bytes)

    def settle(self, timeout_s: float) -> bool:
        """Waits until all that was asked for before has ended; returns False after the time-out."""
        return self.native.settle(timeout_s)

    def close(self) -> None:
        """Cancels what has not started, waits for the rest and joins the threads."""
        self.native.close()


class NativeEngine(_NativeBase):
    """Own threads per direction; a transfer is cut into chunks that several of them work on."""

    name = "threads"

    def __init__(self, *, read_threads: int = 2, write_threads: int = 2, chunk_bytes: int = _CHUNK_BYTES) -> None:
        """Starts the threads.

        Args:
            read_threads, write_threads: at least one each; with one, the calls of a direction are made in order.
            chunk_bytes: a power of two; bytes that go through a bounce buffer or are copied move by at most 1 MiB.
        """
        super().__init__(_native.ThreadEngine(read_threads, write_threads, chunk_bytes), read_threads + write_threads)


class UringEngine(_NativeBase):
    """One io_uring and one thread per direction; a transfer's chunks, and those of the next ones, are under way at once.

    After a fork the child closes the rings. Should the kernel refuse to go on with a ring (a seccomp profile that
    comes later), new transfers raise StateError with the errno, and those under way end with it at close(): not before,
    since until the ring's thread has ended the kernel may still use their memory.
    """

    name = "uring"

    def __init__(self, *, queue_depth: int = 8, bounce_count: int = 4, chunk_bytes: int = _CHUNK_BYTES) -> None:
        """Sets up the rings and starts the threads.

        Args:
            queue_depth: calls under way at once per direction, 1 to 1024; with 1 they are made in order.
            bounce_count: chunks at once, per direction, whose memory is not aligned; each takes up to 1 MiB of memory.
            chunk_bytes: a power of two, as for NativeEngine.

        Raises:
            OSError: io_uring is not to be had: ENOSYS from a build without liburing or an old kernel, EPERM from a
                seccomp profile or kernel.io_uring_disabled.
        """
        super().__init__(_native.RingEngine(queue_depth, bounce_count, chunk_bytes), 2)
        _open_engines.add(self)


_open_engines: weakref.WeakSet[UringEngine] = weakref.WeakSet()


def _close_rings_in_child() -> None:
    for engine in list(_open_engines):
        engine.close()


def uring_refusal() -> int:
    """Returns the errno with which io_uring is refused here, 0 where it works; found by setting up a small ring."""
    return _native.ring_refusal()


# The interpreter keeps such calls until it exits, so there is one for all engines.
os.register_at_fork(after_in_child=_close_rings_in_child)
