"""What this machine can do for a run, and why not."""

from __future__ import annotations

import errno
import importlib.util
import os
import platform
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tieroff.errors import ConfigError, StoreError
from tieroff.storage import buffers, files
from tieroff.storage.engines import available
from tieroff.storage.limits import host_limit_bytes
from tieroff.units import format_bytes


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that is there or not.

    Attributes:
        name: what was looked at.
        is_ok: it can be used.
        detail: version or value, or the reason why it cannot.
    """

    name: str
    is_ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class FolderPath:
    """How bytes reach one folder.

    Attributes:
        dir: the folder.
        path: "direct" (past the page cache), "buffered", or "none".
        reason: why it is not direct; empty when it is.
        file_system: type of the file system, or "".
        free_bytes: what this user may still write there.
    """

    dir: str
    path: str
    reason: str
    file_system: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that `tieroff doctor` says."""

    facts: tuple[Fact, ...]
    dirs: tuple[FolderPath, ...]


def diagnose(dirs: Sequence[Path]) -> Diagnosis:
    """Returns what this machine can do, and how bytes reach each folder. Nothing stays in the folders."""
    facts = (_platform(), *_torch(), _native(), _engines(), _memory(), _locked_memory())
    return Diagnosis(facts, tuple(folder_path(folder) for folder in dirs))


def folder_path(folder: Path) -> FolderPath:
    """Returns how bytes reach a folder, found by writing one page to a file there that is opened as a store's is."""
    refused = ""

    def open_and_note(*arguments: object, **options: object) -> int:
        nonlocal refused
        try:
            return os.open(*arguments, **options)  # type: ignore[arg-type]
        except OSError as error:
            refused = refused or f"{error.strerror} ({errno.errorcode.get(error.errno or 0, '?')})"
            raise

    kind = _file_system(folder)
    try:
        directory = files.open_directory(str(folder), free_bytes_min=0)
        try:
            space = os.fstatvfs(directory)
            free_bytes = space.f_bavail * space.f_frsize
            file = files.open_nameless(str(folder), directory, is_direct=True, opener=open_and_note)
        finally:
            os.close(directory)
    except (ConfigError, StoreError) as error:
        return FolderPath(str(folder), "none", str(error), kind, 0)
    try:
        os.pwrite(file.fd, memoryview(buffers.allocate(file.block_bytes))[: file.block_bytes], 0)
    except OSError as error:
        return FolderPath(str(folder), "none", f"a write failed: {error.strerror}", kind, free_bytes)
    finally:
        os.close(file.fd)
    if file.is_direct:
        return FolderPath(str(folder), "direct", "", kind, free_bytes)
    return FolderPath(str(folder), "buffered", f"O_DIRECT was refused: {refused}", kind, free_bytes)


def _file_system(folder: Path) -> str:
    """Returns the type of the file system that holds a folder, by the longest mount point above it."""
    real = Path(os.path.realpath(folder))
    mounts = [part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else ""


def _platform() -> Fact:
    text = f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}"
    return Fact("platform", platform.system() == "Linux", text)


def _torch() -> tuple[Fact, Fact]:
    try:
        import torch
    except ImportError as error:
        return Fact("torch", False, str(error)), Fact("cuda", False, "torch cannot be imported")
    is_recent = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)
    version = Fact(
        "torch", is_recent, torch.__version__ if is_recent else f"{torch.__version__}, expected 2.10 or later"
    )
    if torch.cuda.is_available():
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        left = f"{format_bytes(free_bytes)} of {format_bytes(total_bytes)} free"
        return version, Fact("cuda", True, f"{torch.cuda.get_device_name()}, {left}")
    reason = "no device is visible" if torch.version.cuda else "this torch was built without CUDA"
    return version, Fact("cuda", False, reason)


def _native() -> Fact:
    """Whether the native module was built. It is looked for, not imported: storage and planner alone do that."""
    spec = importlib.util.find_spec("tieroff._native")
    if spec is None or spec.origin is None:
        return Fact("native module", False, "not built: install with a C++ compiler there")
    return Fact("native module", True, spec.origin)


def _engines() -> Fact:
    names = available()
    return Fact("I/O engines", bool(names), ", ".join(names) or "none can be imported")


def _memory() -> Fact:
    memory = psutil.virtual_memory()
    left = host_limit_bytes()
    text = f"{format_bytes(left)} left of {format_bytes(memory.total)}"
    # The two numbers are read one after the other, so they differ a little even where no group sets a limit.
    if left < 0.9 * memory.available:
        text += f"; the machine has {format_bytes(memory.available)}, a cgroup sets the limit"
    return Fact("memory", left > 0, text)


def _locked_memory() -> Fact:
    """What may be locked. Pinned memory needs none of it, registered buffers of an I/O engine would."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Fact("locked memory", True, "no limit" if soft == resource.RLIM_INFINITY else format_bytes(soft))
