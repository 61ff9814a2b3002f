"""The `aiofiles` engine: pure Python, buffered. For machines without the native module; never faster."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import threading
import time
import weakref
import zlib
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from errno import ECANCELED, EIO

import aiofiles

from tieroff.errors import StateError
from tieroff.storage.engines.base import Direction, OpenFile
from tieroff.storage.locks import let_go
from tieroff.storage.memory import align_up, write_back

_CHUNK_BYTES = 4 * 2**20
_logger = logging.getLogger(__name__)


class AioTransfer:
    """A transfer of this engine.

    State      next
    queued     running (start()), ended (cancel())
    running    ended (end())
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.done_bytes = 0
        self.errno = 0
        self.start_ns = 0
        self.stop_ns = 0
        self.checksum: int | None = None
        self._lock = threading.RLock()  # between start() on the loop and cancel() on any thread
        self._ended = threading.Event()
        self._pid = os.getpid()

    def done(self) -> bool:
        """Returns whether it has ended."""
        _check_process(self._pid)
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for its end; returns False after the time-out."""
        _check_process(self._pid)
        return self._ended.wait(timeout_s)

    def cancel(self) -> bool:
        """Takes it back if it has not started."""
        _check_process(self._pid)
        with self._lock:
            if self.start_ns or self._ended.is_set():
                return False
            self.errno = ECANCELED
            self._ended.set()
            return True

    def free_lock(self) -> None:
        """After an exception between any two instructions of this thread: the loop can go on."""
        let_go(self._lock)

    def start(self) -> bool:
        """Returns whether it may run: it was not cancelled."""
        with self._lock:
            if self._ended.is_set():
                return False
            self.start_ns = time.monotonic_ns()
            return True

    def end(self, number: int) -> None:
        """Records its end, with the errno or 0."""
        self.errno = number
        self.stop_ns = time.monotonic_ns()
        self._ended.set()


def _check_process(pid: int) -> None:
    if os.getpid() != pid:
        raise StateError(
            f"this engine was made in process {pid} and called in process {os.getpid()}: an engine does not survive a fork; "
            "make one in the child"
        )


class AioEngine:
    """One thread runs an event loop; aiofiles' own threads do the calls."""

    name = "aiofiles"
    is_direct = False

    thread_count = 4  # calls at once, half of them for each direction

    def __init__(self) -> None:
        """Starts the loop."""
        _logger.warning("the aiofiles engine is buffered: bytes also lie in the page cache, and it is slow")
        self._pid = os.getpid()
        self._is_closed = False
        # Between `_submit` and `close`: nothing comes to a loop that is about to stop. It knows whose it is: see `settle`.
        self._lock = threading.RLock()
        self._transfers: weakref.WeakSet[AioTransfer] = weakref.WeakSet()
        self._loop = asyncio.new_event_loop()
        self._executor = ThreadPoolExecutor(self.thread_count, thread_name_prefix="tieroff-aio")
        per_direction = self.thread_count // 2
        self._slots = {direction: asyncio.Semaphore(per_direction) for direction in Direction}
        # A daemon: a program that never closes its engine ends all the same.
        self._thread = threading.Thread(target=self._loop.run_forever, name="tieroff-aio-loop", daemon=True)
        self._thread.start()

    def read(
        self, file: OpenFile, offset: int, address: int, size_bytes: int, *, with_checksum: bool, is_mapped: bool
    ) -> AioTransfer:
        """Starts to read into memory. Mapped pages are the page cache's own, so there is nothing to write back."""

        async def run(transfer: AioTransfer) -> None:
            view = _memory(address, size_bytes)
            async with aiofiles.open(_path(file), "rb", buffering=0, loop=self._loop, executor=self._executor) as handle:
                await handle.seek(offset)
                await _advance(transfer, view, handle.readinto)
            if with_checksum:
                transfer.checksum = zlib.crc32(view)

        return self._submit(Direction.IN, size_bytes, run)

    def write(self, file: OpenFile, offset: int, address: int, size_bytes: int, *, with_checksum: bool) -> AioTransfer:
        """Starts to write from memory; the rest of the last block becomes zeros."""

        async def run(transfer: AioTransfer) -> None:
            view = _memory(address, size_bytes)
            padding = bytes(align_up(size_bytes, file.block_bytes) - size_bytes)
            async with aiofiles.open(_path(file), "r+b", buffering=0, loop=self._loop, executor=self._executor) as handle:
                await handle.seek(offset)
                await _advance(transfer, view, handle.write)
                if padding:
                    await handle.write(padding)
            # So that an error of the drive belongs to this transfer, and dirty pages do not pile up.
            padded_bytes = size_bytes + len(padding)
            await self._loop.run_in_executor(self._executor, write_back, file.fd, offset, padded_bytes)
            if with_checksum:
                transfer.checksum = zlib.crc32(view)

        return self._submit(Direction.OUT, size_bytes, run)

    def verify(self, file: OpenFile, offset: int, size_bytes: int) -> AioTransfer:
        """Starts to read for the checksum alone, in pieces."""

        async def run(transfer: AioTransfer) -> None:
            checksum = 0
            async with aiofiles.open(_path(file), "rb", buffering=0, loop=self._loop, executor=self._executor) as handle:
                await handle.seek(offset)
                while transfer.done_bytes < size_bytes:
                    piece = await handle.read(min(_CHUNK_BYTES, size_bytes - transfer.done_bytes))
                    if not piece:
                        raise OSError(EIO, "the file is shorter than it was made")
                    checksum = zlib.crc32(piece, checksum)
                    transfer.done_bytes += len(piece)
            transfer.checksum = checksum

        return self._submit(Direction.IN, size_bytes, run)

    def copy(self, target_address: int, source_address: int, size_bytes: int, direction: Direction) -> AioTransfer:
        """Starts to copy memory."""

        async def run(transfer: AioTransfer) -> None:
            copy = ctypes.memmove
            await self._loop.run_in_executor(self._executor, copy, target_address, source_address, size_bytes)
            transfer.done_bytes = size_bytes

        return self._submit(direction, size_bytes, run)

    def joined_checksum(self, first: int, second: int, second_bytes: int) -> int:
        """Returns the checksum of two adjoining ranges: that of the first followed by zeros, and that of the second."""
        shift, power = _CRC32_ONE, _CRC32_BYTE  # x^(8 * second_bytes), by repeated squaring
        while second_bytes:
            if second_bytes & 1:
                shift = _crc32_product(shift, power)
            power = _crc32_product(power, power)
            second_bytes >>= 1
        return _crc32_product(first, shift) ^ second

    def settle(self, timeout_s: float) -> bool:
        """Waits until all that was asked for before has ended; returns False after the time-out."""
        _check_process(self._pid)
        stop_s = time.monotonic() + timeout_s
        let_go(self._lock)  # an interrupt may have left it taken by this thread
        with self._lock:
            transfers = list(self._transfers)
        for transfer in transfers:
            transfer.free_lock()
            # One that never came to the loop would not end.
            if not transfer.cancel() and not transfer.wait(max(stop_s - time.monotonic(), 0.0)):
                return False
        return True

    def close(self) -> None:
        """Cancels what has not started, waits for the rest and joins the threads."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            transfers = list(self._transfers)
        for transfer in transfers:
            if not transfer.cancel():
                transfer.wait()
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._executor.shutdown()

    def _submit(self, direction: Direction, size_bytes: int, run: Callable[[AioTransfer], Awaitable[None]]) -> AioTransfer:
        _check_process(self._pid)
        transfer = AioTransfer(size_bytes)
        with self._lock:
            if self._is_closed:
                raise StateError("this engine is closed; make a new one")
            self._transfers.add(transfer)
            asyncio.run_coroutine_threadsafe(self._run(direction, transfer, run), self._loop)
        return transfer

    async def _run(self, direction: Direction, transfer: AioTransfer, run: Callable[[AioTransfer], Awaitable[None]]) -> None:
        async with self._slots[direction]:  # first come, first served
            if not transfer.start():
                return
            try:
                await run(transfer)
            except OSError as error:
                transfer.end(error.errno or EIO)
            except BaseException:
                transfer.end(EIO)
                raise
            else:
                transfer.end(0)


# Polynomials over GF(2) modulo that of CRC-32, as zlib writes them: bit 31 is the coefficient of x^0.
_CRC32_POLYNOMIAL = 0xEDB88320
_CRC32_ONE = 1 << 31
_CRC32_BYTE = 1 << (31 - 8)  # x^8


def _crc32_product(first: int, second: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if first >> bit & 1:
            product ^= second
        second = (second >> 1) ^ (_CRC32_POLYNOMIAL if second & 1 else 0)
    return product


async def _end_tasks() -> None:
    """Waits for tasks that only have to release their transfer."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


def _path(file: OpenFile) -> str:
    # A file position of its own for each transfer, which a duplicate of the descriptor would share.
    return f"/proc/self/fd/{file.fd}"


def _memory(address: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(address)).cast("B")


async def _advance(transfer: AioTransfer, view: memoryview, call: Callable[[memoryview], Awaitable[int]]) -> None:
    """Moves the whole view, continuing short calls; raises OSError where one moves nothing."""
    while transfer.done_bytes < len(view):
        moved = await call(view[transfer.done_bytes : transfer.done_bytes + _CHUNK_BYTES])
        if not moved:
            raise OSError(EIO, "the file is shorter than it was made")
        transfer.done_bytes += moved
