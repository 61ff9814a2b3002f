"""The `threads` engine: native threads with direct I/O."""

from __future__ import annotations

import weakref

from tieroff import _native
from tieroff.storage.engines import Direction, OpenFile


class NativeEngine:
    """Own threads per direction; a transfer is cut into chunks that several of them work on.

    Attributes:
        native: the native engine, whose fault table tests use.
    """

    name = "threads"
    is_direct = True

    def __init__(self, *, read_threads: int = 2, write_threads: int = 2, chunk_bytes: int = 2**20) -> None:
        """Starts the threads.

        Args:
            read_threads, write_threads: at least one each.
            chunk_bytes: a power of two; also the size of each thread's bounce buffer.
        """
        self.native = _native.ThreadEngine(read_threads, write_threads, chunk_bytes)
        # At exit, before memory that a transfer still touches is torn down; also when the engine is forgotten.
        self._close = weakref.finalize(self, self.native.close)

    @property
    def thread_count(self) -> int:
        """Threads that move bytes."""
        return self.native.read_threads + self.native.write_threads

    def read(
        self, file: OpenFile, offset: int, address: int, size_bytes: int, *, with_checksum: bool, is_mapped: bool
    ) -> _native.Transfer:
        """Starts to read into memory."""
        return self.native.read(
            file.fd, offset, address, size_bytes, file.block_bytes, file.memory_alignment, with_checksum,
            is_mapped and file.is_direct,
        )  # fmt: skip

    def write(
        self, file: OpenFile, offset: int, address: int, size_bytes: int, *, with_checksum: bool
    ) -> _native.Transfer:
        """Starts to write from memory."""
        return self.native.write(
            file.fd, offset, address, size_bytes, file.block_bytes, file.memory_alignment, with_checksum
        )

    def verify(self, file: OpenFile, offset: int, size_bytes: int) -> _native.Transfer:
        """Starts to read for the checksum alone, through the threads' bounce buffers."""
        return self.native.read(file.fd, offset, 0, size_bytes, file.block_bytes, file.memory_alignment, True)

    def copy(self, target_address: int, source_address: int, size_bytes: int, direction: Direction) -> _native.Transfer:
        """Starts to copy memory."""
        return self.native.copy(target_address, source_address, size_bytes, direction is Direction.IN)

    def close(self) -> None:
        """Cancels what has not started, waits for the rest and joins the threads."""
        self.native.close()
