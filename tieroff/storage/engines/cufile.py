"""Files of kvikio's: how they are opened, and which way their bytes go."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tieroff.errors import ConfigError

Path = Literal["nvidia-fs", "cufile", "compatibility", "none"]


@dataclass(frozen=True, slots=True)
class GdsStatus:
    """How this engine's bytes reach one directory.

    Attributes:
        dir: the directory.
        path: "nvidia-fs": from device to drive by the kernel's module, past the host's memory. "cufile": cuFile took the
            file without that module: directly by PCIe peer-to-peer where kernel and driver have it, else through
            cuFile's own host memory; cuFile does not say which. "compatibility": kvikio reads and writes the file with
            ordinary calls, and every byte passes through host memory. "none": it does not work there.
        reason: why it is not "nvidia-fs"; empty when it is.
    """

    dir: str
    path: Path
    reason: str


class CuFile(Protocol):
    """What is used of a file of kvikio's."""

    def pread(self, buf: object, size: int, file_offset: int, task_size: int) -> Any:
        """Starts a read; the result's get() gives the bytes read."""

    def pwrite(self, buf: object, size: int, file_offset: int, task_size: int) -> Any:
        """Starts a write; the result's get() gives the bytes written."""

    def fileno(self) -> int:
        """Its descriptor without O_DIRECT."""

    def close(self) -> None:
        """Lets go of the file."""


def load_kvikio() -> Any:
    """Returns the module, with its settings; imported late, since it is an extra.

    Raises:
        ConfigError: it is not installed, or cannot be loaded.
    """
    try:
        for name in ("kvikio.defaults", "kvikio.cufile_driver"):
            importlib.import_module(name)
        return importlib.import_module("kvikio")
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f'[nvme] engine = "gds" needs kvikio: {error}; pip install tieroff[gds] (CUDA 13) or tieroff[gds-cu12]'
        ) from error


def open_cufile(path: str, directory: str) -> tuple[CuFile, GdsStatus]:
    """Opens an existing file for reading and writing, as directly as it goes; its bytes stay.

    Args:
        path: of the file, such as one in /proc/self/fd.
        directory: where it lies, for the status.

    Raises:
        RuntimeError: kvikio's words for why it cannot be opened.
    """
    kvikio = load_kvikio()
    modes, mode = kvikio.CompatMode, kvikio.defaults.get("compat_mode")
    if kvikio.defaults.is_compat_mode_preferred():
        return kvikio.CuFile(path, "r+"), GdsStatus(directory, "compatibility", _why_compatible(mode == modes.ON))
    try:
        # Not AUTO, which falls back for a single file without a word.
        with kvikio.defaults.set({"compat_mode": modes.OFF}):
            file = kvikio.CuFile(path, "r+")
    except RuntimeError as error:
        with kvikio.defaults.set({"compat_mode": modes.ON}):
            return kvikio.CuFile(path, "r+"), GdsStatus(directory, "compatibility", f"cuFile refused the file: {error}")
    if kvikio.cufile_driver.get("is_gds_available"):
        return file, GdsStatus(directory, "nvidia-fs", "")
    return file, GdsStatus(directory, "cufile", "the kernel module nvidia-fs is not loaded")


def _why_compatible(is_asked_for: bool) -> str:
    if is_asked_for:
        return "KVIKIO_COMPAT_MODE asks for it"
    if not os.access("/run/udev", os.R_OK):
        return "/run/udev cannot be read, which cuFile needs (in a container: mount it)"
    return "the library cuFile cannot be used here"
