"""Which engines work on this machine, and which of them a store runs on."""

from __future__ import annotations

import errno
import importlib.util
import logging
import os

from tieroff.errors import ConfigError
from tieroff.storage.engines.base import Engine

_logger = logging.getLogger(__name__)


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
    """Returns a new engine. Where `uring` is refused it is `threads`, with a warning that gives the errno.

    Args:
        name: "auto", "threads", "uring", "gds" or "aiofiles".
        measured: what was found fastest on this machine; "auto" takes it where it works, and else the first available.

    Raises:
        ConfigError: unknown, or not to be had here.
    """
    names = available()
    if name == "auto" and names:
        name = measured if measured in names else names[0]
        if name == "aiofiles":
            _logger.warning(
                "the native engine is not built, so NVMe transfers run on aiofiles: buffered, and 2-10 times slower; "
                "install with a C++ compiler to have it"
            )
    if name == "gds":
        from tieroff.storage.engines.gds import GdsEngine

        return GdsEngine()  # says itself what it misses
    if name == "uring" and "threads" in names:
        return _uring_or_threads()
    if name not in names:
        raise ConfigError(
            f"expected [nvme] engine to be auto or one of {', '.join(names) or 'none (nothing is installed)'} on this "
            f"machine, got {name!r}"
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
