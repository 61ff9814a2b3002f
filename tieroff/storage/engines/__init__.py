"""Engines: what moves bytes between memory and files, and between memory and memory."""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from tieroff.errors import ConfigError

_logger = logging.getLogger(__name__)


class Direction(StrEnum):
    """Whose queue a memory copy waits in: OUT to a lower tier with the writes, IN from it with the reads."""

    OUT = "out"
    IN = "in"


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file as an engine needs it.

    Attributes:
        fd: its descriptor.
        path: the directory that it lies in, for messages.
        is_direct: opened with O_DIRECT.
        block_bytes: transfers start and end in the file on multiples of this; a power of two.
        memory_alignment: memory that is not aligned to this is bounced; 1 where the file is buffered.
    """

    fd: int
    path: str
    is_direct: bool
    block_bytes: int
    memory_alignment: int


class Transfer(Protocol):
    """One transfer of an engine. It owns neither memory nor file: both must stay until it has ended."""

    @property
    def size_bytes(self) -> int:
        """Bytes asked for."""

    @property
    def done_bytes(self) -> int:
        """Bytes moved so far; after a failure, those that were."""

    @property
    def errno(self) -> int:
        """The first error, 0 for none, ECANCELED when it was taken back."""

    @property
    def start_ns(self) -> int:
        """When its first byte was moved, CLOCK_MONOTONIC; 0 until then."""

    @property
    def stop_ns(self) -> int:
        """When it ended; 0 until then."""

    @property
    def checksum(self) -> int | None:
        """Of the tensor's bytes, once it has ended well and if it was asked for; comparable within one engine."""

    def done(self) -> bool:
        """Returns whether it has ended."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for its end without the interpreter's lock; returns False after the time-out."""

    def cancel(self) -> bool:
        """Takes it back if nothing of it has started; returns whether it did."""


class Engine(Protocol):
    """Moves bytes asynchronously, first in, first out per direction.

    In a forked child every call but close() raises StateError.
    """

    @property
    def name(self) -> str:
        """As in the config."""

    @property
    def is_direct(self) -> bool:
        """Whether it wants its files opened with O_DIRECT."""

    @property
    def thread_count(self) -> int:
        """Threads that move bytes."""

    def read(
        self, file: OpenFile, offset: int, address: int, size_bytes: int, *, with_checksum: bool, is_mapped: bool
    ) -> Transfer:
        """Starts to read into memory. `is_mapped`: dirty pages of the range are written back first."""

    def write(self, file: OpenFile, offset: int, address: int, size_bytes: int, *, with_checksum: bool) -> Transfer:
        """Starts to write from memory; the rest of the last block becomes zeros."""

    def verify(self, file: OpenFile, offset: int, size_bytes: int) -> Transfer:
        """Starts to read what lies there for its checksum alone; the bytes go nowhere."""

    def copy(self, target_address: int, source_address: int, size_bytes: int, direction: Direction) -> Transfer:
        """Starts to copy memory; the ranges do not overlap."""

    def close(self) -> None:
        """Cancels what has not started, waits for the rest and joins its threads. Idempotent."""


def available() -> list[str]:
    """Returns the names of the engines that work here, the one that `auto` takes first."""
    names = []
    if _is_there("tieroff._native"):
        names.append("threads")
        if _uring_refusal() == 0:
            names.append("uring")
        if _is_there("kvikio") and _has_cuda_driver():
            names.append("gds")
    if _is_there("aiofiles"):
        names.append("aiofiles")
    return names


def choose(name: str = "auto", *, measured: str | None = None) -> Engine:
    """Returns a new engine. If the kernel refuses `uring`, it is `threads`, with a warning that gives the errno.

    Args:
        name: "auto", "threads", "uring", "gds" or "aiofiles".
        measured: the engine measured fastest on this machine; "auto" takes it if it works here, else the first available.

    Raises:
        ConfigError: the engine is unknown or not available here.
    """
    names = available()
    if name == "auto" and names:
        name = measured if measured in names else names[0]
        if name == "aiofiles":
            _logger.warning(
                "the native engine is not built, so NVMe transfers run on aiofiles: buffered, and 2-10 times slower; "
                "install tieroff with a C++ compiler"
            )
    if name == "gds":
        from tieroff.storage.engines.gds import GdsEngine

        return GdsEngine()  # its own error names what is missing
    if name == "uring" and "threads" in names:
        return _uring_or_threads()
    if name not in names:
        raise ConfigError(
            f"[nvme] engine = {name!r} does not work on this machine; set it to auto or one of "
            f"{', '.join(names) or 'none (no engine is installed)'}"
        )
    if name == "threads":
        from tieroff.storage.engines.native import NativeEngine

        return NativeEngine()
    from tieroff.storage.engines.aio import AioEngine

    return AioEngine()


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _uring_refusal() -> int:
    from tieroff.storage.engines.native import uring_refusal

    return uring_refusal()


def _has_cuda_driver() -> bool:
    from tieroff.storage.engines.cuda_memory import CudaMemory

    try:
        CudaMemory()
    except ConfigError:
        return False
    return True


def _uring_or_threads() -> Engine:
    from tieroff.storage.engines.native import NativeEngine, UringEngine

    try:
        return UringEngine()
    except OSError as error:
        number = error.errno or 0
        _logger.warning(
            "expected an io_uring for [nvme] engine uring, got errno %d (%s, %s): NVMe transfers run on threads; %s",
            number,
            errno.errorcode.get(number, "unknown"),
            os.strerror(number),
            "build with liburing 2.3 or later, on Linux 5.6 or later"
            if number == errno.ENOSYS
            else "allow it (sysctl kernel.io_uring_disabled, the container's seccomp profile), or ask for threads",
        )
        return NativeEngine()
