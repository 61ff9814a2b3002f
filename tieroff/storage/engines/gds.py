"""The `gds` engine: device memory to files and back by kvikio, without a bounce through this library's memory."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait

from tieroff.errors import ConfigError, StateError
from tieroff.storage import buffers
from tieroff.storage.engines.base import Direction, Engine, OpenFile, Transfer
from tieroff.storage.engines.cuda_memory import CudaMemory
from tieroff.storage.engines.cufile import CuFile, GdsStatus, load_kvikio, open_cufile
from tieroff.storage.locks import let_go
from tieroff.storage.memory import align_up, write_back

THREAD_COUNT = 8
"""Calls at once. The library's own default is one thread, which leaves a drive idle most of the time."""

TASK_BYTES = 8 * 2**20
"""Into pieces of this size a transfer is cut."""

SMALL_BYTES = 16 * 2**10
"""Below this the set-up of a direct transfer costs more than a copy through the host."""

_CHECKSUM_BYTES = 4 * 2**20
_PER_DIRECTION = 2  # transfers under way at once: the tail of one and the head of the next
_logger = logging.getLogger(__name__)


class _DeviceBytes:
    """Bytes at an address, as kvikio takes them."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class GdsTransfer:
    """A transfer of this engine: a job that a thread makes from start to end.

    kvikio does not say how far a failed transfer came, so `done_bytes` is all or nothing.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.done_bytes = 0
        self.start_ns = 0
        self.stop_ns = 0
        self.checksum: int | None = None
        self.job: Future[None] = Future()  # replaced by the engine before any other thread sees this
        self._errno = 0
        self._pid = os.getpid()

    @property
    def errno(self) -> int:
        """The first error, 0 for none, ECANCELED when it was taken back."""
        return errno.ECANCELED if self.job.cancelled() else self._errno

    def done(self) -> bool:
        """Returns whether it has ended."""
        _check_process(self._pid)
        return self.job.done()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for its end; returns False after the time-out."""
        _check_process(self._pid)
        try:
            self.job.exception(timeout_s)
        except CancelledError:
            return True
        except TimeoutError:
            return False
        return True

    def cancel(self) -> bool:
        """Takes it back if it has not started."""
        _check_process(self._pid)
        return not self.job.cancelled() and self.job.cancel()

    def run(self, move: Callable[[GdsTransfer], None]) -> None:
        """Makes it, on a thread of the engine."""
        self.start_ns = time.monotonic_ns()
        try:
            move(self)
            self.done_bytes = self.size_bytes
        except OSError as error:
            self._fail(error, error.errno or errno.EIO)
        except RuntimeError as error:  # what kvikio makes of every error; the number is only in its words
            self._fail(error, errno_in(str(error)))
        except BaseException:
            self._errno = errno.EIO
            raise
        finally:
            self.stop_ns = time.monotonic_ns()

    def _fail(self, error: Exception, number: int) -> None:
        self._errno = number
        self.checksum = None
        _logger.error("a gds transfer of %d bytes failed: %s", self.size_bytes, error)


def _check_process(pid: int) -> None:
    if os.getpid() != pid:
        raise StateError(
            f"this engine was made in process {pid} and called in process {os.getpid()}: an engine does not survive a fork; "
            "make one in the child"
        )


def errno_in(message: str) -> int:
    """Returns the error number whose text ends a message; EIO if there is none."""
    numbers = {os.strerror(number): number for number in errno.errorcode}
    found = [text for text in numbers if message.rstrip(" .\n").endswith(text)]
    return numbers[max(found, key=len)] if found else errno.EIO


class GdsEngine:
    """Device memory goes by kvikio; host memory, such as that of homes and slabs, by the `threads` engine.

    Transfers of device memory do not wait for work on any stream: the caller has waited for what wrote the memory, and
    uses it only after the end. (kvikio itself waits for the legacy default stream before it starts, and
    where it copies through the host, its copies are ordered with that stream.)

    A write's last block that is not whole goes through the page cache and is on the drive when the write ends. Checksums
    are taken of the device memory itself, after it was read and before it is written, by copying it to the host; they
    are those of the `threads` engine.

    kvikio's settings are the process's. They are set when the engine is made and restored by close(). A file that a
    store has closed is released at the next new file, or by close().

    Attributes:
        statuses: how bytes reach each directory used so far.
        bounce_bytes: host memory that kvikio pins where a transfer is not direct, outside of any budget.
    """

    name = "gds"
    is_direct = True

    def __init__(
        self,
        *,
        thread_count: int = THREAD_COUNT,
        task_bytes: int = TASK_BYTES,
        memory: CudaMemory | None = None,
        open_file: Callable[[str, str], tuple[CuFile, GdsStatus]] = open_cufile,
    ) -> None:
        """Starts the threads.

        Args:
            thread_count: kvikio's threads, at least 1.
            task_bytes: pieces into which a transfer is cut; a multiple of 4096.
            memory: what knows device addresses; tests pass their own.
            open_file: as open_cufile; tests pass one whose files fail.

        Raises:
            ConfigError: kvikio, the CUDA driver or the native module is missing.
        """
        try:
            from tieroff.storage.engines.native import NativeEngine
        except ImportError as error:
            raise ConfigError(
                f'[nvme] engine = "gds" also needs the native module: {error}; install tieroff with a C++ compiler'
            ) from error
        kvikio = load_kvikio()
        self._memory = memory if memory is not None else CudaMemory()
        self._open_file = open_file
        self.thread_count, self._task_bytes = thread_count, task_bytes
        self.bounce_bytes = thread_count * task_bytes
        self.statuses: dict[str, GdsStatus] = {}
        self._files: dict[tuple[int, int], tuple[CuFile, int]] = {}  # by device and inode: kvikio's, the store's
        self._lock = threading.RLock()  # over the open files, for the threads
        self._pid = os.getpid()
        self._is_closed = False
        self._host: Engine = NativeEngine()
        self._settings = kvikio.defaults.set(
            {
                "num_threads": thread_count,
                "task_size": task_bytes,
                "bounce_buffer_size": task_bytes,
                "gds_threshold": SMALL_BYTES,
                "auto_direct_io_read": True,
                "auto_direct_io_write": True,
            }
        )
        self._free_bounce_buffers: Callable[[], int] = kvikio.bounce_buffer_free
        # Own threads each way, in which kvikio's calls block: reads that are awaited do not queue behind writes.
        self._threads = {way: ThreadPoolExecutor(_PER_DIRECTION, f"tieroff-gds-{way}") for way in Direction}
        _open_engines.add(self)

    def read(
        self, file: OpenFile, offset: int, address: int, size_bytes: int, *, with_checksum: bool, is_mapped: bool
    ) -> Transfer:
        """Starts to read into device or host memory."""
        _check_process(self._pid)
        if not self._memory.holds(address):
            return self._host.read(file, offset, address, size_bytes, with_checksum=with_checksum, is_mapped=is_mapped)

        def move(transfer: GdsTransfer) -> None:
            if is_mapped:
                write_back(file.fd, offset, align_up(size_bytes, file.block_bytes))
            started = self._cufile(file).pread(_DeviceBytes(address, size_bytes), size_bytes, offset, self._task_bytes)
            _check_count(started.get(), size_bytes, "read")
            if with_checksum:
                transfer.checksum = self._checksum(address, size_bytes)

        return self._submit(Direction.IN, size_bytes, move)

    def write(self, file: OpenFile, offset: int, address: int, size_bytes: int, *, with_checksum: bool) -> Transfer:
        """Starts to write from device or host memory; the rest of the last block becomes zeros."""
        _check_process(self._pid)
        if not self._memory.holds(address):
            return self._host.write(file, offset, address, size_bytes, with_checksum=with_checksum)

        def move(transfer: GdsTransfer) -> None:
            checksum = self._checksum(address, size_bytes) if with_checksum else None
            target = self._cufile(file)
            started = target.pwrite(_DeviceBytes(address, size_bytes), size_bytes, offset, self._task_bytes)
            _check_count(started.get(), size_bytes, "write")
            if size_bytes % file.block_bytes:
                _end_block(target.fileno(), offset + size_bytes, file.block_bytes)
            transfer.checksum = checksum

        return self._submit(Direction.OUT, size_bytes, move)

    def verify(self, file: OpenFile, offset: int, size_bytes: int) -> Transfer:
        """Starts to read for the checksum alone, through the host."""
        _check_process(self._pid)
        return self._host.verify(file, offset, size_bytes)

    def copy(self, target_address: int, source_address: int, size_bytes: int, direction: Direction) -> Transfer:
        """Starts to copy host memory."""
        _check_process(self._pid)
        return self._host.copy(target_address, source_address, size_bytes, direction)

    def joined_checksum(self, first: int, second: int, second_bytes: int) -> int:
        """Returns the checksum of two adjoining ranges."""
        return self._host.joined_checksum(first, second, second_bytes)

    def settle(self, timeout_s: float) -> bool:
        """Waits until all that was asked for before has ended; returns False after the time-out."""
        _check_process(self._pid)
        stop_s = time.monotonic() + timeout_s
        let_go(self._lock)  # an interrupt may have left it taken by this thread
        for threads in self._threads.values():
            all_there = threading.Barrier(_PER_DIRECTION)  # its threads, which come to it behind what they were asked for
            jobs = [threads.submit(all_there.wait, timeout_s) for _ in range(_PER_DIRECTION)]
            if wait(jobs, timeout_s).not_done or any(job.exception() is not None for job in jobs):
                for job in jobs:
                    job.cancel()  # all threads may hang, and would come to it when nobody waits
                return False
        return self._host.settle(max(stop_s - time.monotonic(), 0.0))

    def close(self) -> None:
        """Cancels what has not started, waits for the rest and joins the threads."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        for threads in self._threads.values():
            threads.shutdown(cancel_futures=True)
        self._host.close()
        if was_closed:
            return
        for cufile, _fd in self._files.values():
            cufile.close()
        self._files.clear()
        self._settings.__exit__(None, None, None)
        self._free_bounce_buffers()

    def _submit(self, direction: Direction, size_bytes: int, move: Callable[[GdsTransfer], None]) -> GdsTransfer:
        transfer = GdsTransfer(size_bytes)
        with self._lock:
            if self._is_closed:
                raise StateError("this engine is closed; make a new one")
            transfer.job = self._threads[direction].submit(transfer.run, move)
        return transfer

    def _cufile(self, file: OpenFile) -> CuFile:
        """Returns kvikio's side of a file. Known by inode, which stays its own as long as kvikio has it open."""
        key = _identity(file.fd)
        with self._lock:
            if key not in self._files:
                self._forget_closed()
                cufile, status = self._open_file(f"/proc/self/fd/{file.fd}", file.path)
                self._files[key] = cufile, file.fd
                self._note(status)
            return self._files[key][0]

    def _forget_closed(self) -> None:
        for key, (cufile, fd) in list(self._files.items()):
            if _identity(fd) != key:
                cufile.close()
                del self._files[key]

    def _note(self, status: GdsStatus) -> None:
        if self.statuses.get(status.dir) != status and status.path != "nvidia-fs":
            _logger.warning(
                "[nvme] engine gds does not go by nvidia-fs in %s but by path %s, since %s; where that is through host "
                "memory, compare it with engine threads",
                status.dir,
                status.path,
                status.reason,
            )
        self.statuses[status.dir] = status

    def _checksum(self, address: int, size_bytes: int) -> int:
        from tieroff.storage.native import _native

        host = buffers.allocate(min(size_bytes, _CHECKSUM_BYTES))
        checksum = 0
        for position in range(0, size_bytes, host.size_bytes):
            part_bytes = min(host.size_bytes, size_bytes - position)
            self._memory.copy_to_host(host.address, address + position, part_bytes)
            checksum = _native.crc32c(memoryview(host)[:part_bytes], checksum)
        return checksum

    def _let_go_in_child(self) -> None:
        """After a fork: gives up the files, without a call to cuFile, which does not survive it.

        kvikio's objects stay, since to destroy them would call it; so their descriptors get another file.
        """
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        ours = {fd for _cufile, fd in self._files.values()}  # the store's, which it closes itself
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd not in ours and _identity(fd) in self._files:
                os.dup2(null, fd, inheritable=False)
        os.close(null)
        for cufile, _fd in self._files.values():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(cufile))


def _check_count(found_bytes: int, size_bytes: int, action: str) -> None:
    """Raises OSError (EIO) for any other count than the requested one; kvikio does not report which piece was short."""
    if found_bytes != size_bytes:
        raise OSError(errno.EIO, f"expected to {action} {size_bytes} bytes, kvikio reports {found_bytes}")


def _end_block(fd: int, end: int, block_bytes: int) -> None:
    """Fills the file's block with zeros from `end` on, and has the block on the drive and not in memory."""
    start = end // block_bytes * block_bytes
    zeros = bytes(start + block_bytes - end)
    written = os.pwrite(fd, zeros, end)
    _check_count(written, len(zeros), "write")
    write_back(fd, start, block_bytes)
    os.posix_fadvise(fd, start, block_bytes, os.POSIX_FADV_DONTNEED)


def _identity(fd: int) -> tuple[int, int]:
    """Returns device and inode of what is open at a descriptor, (-1, -1) for nothing."""
    try:
        status = os.fstat(fd)
    except OSError:
        return -1, -1
    return status.st_dev, status.st_ino


_open_engines: weakref.WeakSet[GdsEngine] = weakref.WeakSet()


def _let_go_all_in_child() -> None:
    for engine in list(_open_engines):
        if engine._files:
            engine._let_go_in_child()
    if "kvikio" in sys.modules:
        # On the way out kvikio joins its threads, of which a child has none: it would hang for ever. Called at exit, and
        # before what was registered earlier, _exit itself takes the status and leaves.
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)


# The interpreter keeps such calls until it exits, so there is one for all engines.
os.register_at_fork(after_in_child=_let_go_all_in_child)
