"""What this machine can do for a run, and why it cannot do the rest."""

from __future__ import annotations

import errno
import importlib.util
import os
import platform
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import psutil

from tieroff.config import EngineName
from tieroff.errors import ConfigError, StoreError, TieroffError
from tieroff.probe import kernel
from tieroff.probe.drives import drive, file_system
from tieroff.probe.gds import KVIKIO, cuda_version, gds_path, version_of
from tieroff.storage import buffers
from tieroff.storage.buffers import Buffer
from tieroff.storage.engines import Engine, OpenFile, Transfer, available, choose
from tieroff.storage.limits import host_limit
from tieroff.storage.nvme import files
from tieroff.units import format_bytes

ENGINES: tuple[str, ...] = tuple(name for name in get_args(EngineName) if name != "auto")
TIMEOUT_S = 10.0

_CUFILE = ("nvidia-cufile", "nvidia-cufile-cu12")


@dataclass(frozen=True, slots=True)
class Fact:
    """One property of the machine.

    Attributes:
        name: what was checked.
        is_ok: it can be used.
        detail: version or value, or the reason why it cannot.
    """

    name: str
    is_ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class EnginePath:
    """How bytes reach a folder by one engine, found by writing some bytes there and reading them back.

    Attributes:
        engine: its name.
        path: "direct", "buffered" or "none"; of gds "nvidia-fs", "cufile", "compatibility" or "none".
        reason: why there is no better path; empty when there is none.
    """

    engine: str
    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class FolderPath:
    """How bytes reach one folder.

    Attributes:
        dir: the folder.
        path: "direct" (past the page cache), "buffered", or "none".
        reason: why it is not direct; empty when it is.
        file_system: type of the file system, or "".
        free_bytes: what this user may still write there.
        drive: models or names of the drives, or "".
        engines: the same for every engine; none where the folder cannot be used.
    """

    dir: str
    path: str
    reason: str
    file_system: str
    free_bytes: int
    drive: str = ""
    engines: tuple[EnginePath, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that `tieroff doctor` prints."""

    facts: tuple[Fact, ...]
    dirs: tuple[FolderPath, ...]


def diagnose(dirs: Sequence[Path]) -> Diagnosis:
    """Returns what this machine can do, and how bytes reach each folder. Nothing stays in the folders."""
    facts = (_platform(), *_torch(), _native(), _engines(), _uring(), *_gpu_storage(), _memory(), _locked_memory())
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

    kind = file_system(folder)
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
    reason = f"O_DIRECT was refused: {refused}" if refused else "the file system is memory, not a drive"
    engines = tuple(engine_path(folder, name) for name in ENGINES)
    if file.is_direct:
        return FolderPath(str(folder), "direct", "", kind, free_bytes, drive(folder), engines)
    return FolderPath(str(folder), "buffered", reason, kind, free_bytes, drive(folder), engines)


def engine_path(folder: Path, name: str) -> EnginePath:
    """Returns how bytes reach a folder by an engine: a block is written to a nameless file there and read back.

    The gds engine is asked instead, since it moves the device's memory.
    """
    if name == "gds":
        return EnginePath(name, *gds_path(folder))
    if name not in available():
        return EnginePath(name, "none", _why_absent(name))
    try:
        engine = choose(name)
        try:
            if engine.name != name:
                return EnginePath(name, "none", kernel.uring_refusal() or f"it falls back to {engine.name}")
            directory = files.open_directory(str(folder), free_bytes_min=0)
            try:
                file = files.open_nameless(str(folder), directory, is_direct=engine.is_direct)
            finally:
                os.close(directory)
            try:
                memory = buffers.allocate(file.block_bytes), buffers.allocate(file.block_bytes)
                reason = _round_trip(engine, file, *memory)
            finally:
                engine.close()  # before the file and the memory: a transfer may still be under way
                os.close(file.fd)
        finally:
            engine.close()
    except (TieroffError, ImportError, OSError) as error:
        return EnginePath(name, "none", str(error))
    if reason:
        return EnginePath(name, "none", reason)
    if file.is_direct:
        return EnginePath(name, "direct", "")
    return EnginePath(name, "buffered", "O_DIRECT is refused here" if engine.is_direct else "the engine is buffered")


def _round_trip(engine: Engine, file: OpenFile, source: Buffer, target: Buffer) -> str:
    """Writes a block and reads it back; returns what went wrong, or ""."""
    size = file.block_bytes
    source[:size] = os.urandom(size)
    files.preallocate(file, 0, size)
    failed = _failure(engine.write(file, 0, source.address, size, with_checksum=False), "write") or _failure(
        engine.read(file, 0, target.address, size, with_checksum=False, is_mapped=False), "read"
    )
    if failed:
        return failed
    return "" if source[:size] == target[:size] else "read other bytes than were written"


def _failure(transfer: Transfer, what: str) -> str:
    if not transfer.wait(TIMEOUT_S):
        return f"a {what} has not ended after {TIMEOUT_S:g} s"
    if transfer.errno or transfer.done_bytes != transfer.size_bytes:
        return f"a {what} failed: {os.strerror(transfer.errno)}, {transfer.done_bytes} of {transfer.size_bytes} bytes"
    return ""


def _why_absent(name: str) -> str:
    if name == "uring":
        return kernel.uring_refusal() or "the native module was built without it"
    return "the native module is not built" if name == "threads" else f"{name} is not installed"


def _platform() -> Fact:
    text = f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}"
    return Fact("platform", platform.system() == "Linux", text)


def _torch() -> tuple[Fact, Fact]:
    try:
        import torch
    except ImportError as error:
        return Fact("torch", False, str(error)), Fact("cuda", False, "torch cannot be imported")
    is_recent = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)
    version = Fact("torch", is_recent, torch.__version__ if is_recent else f"{torch.__version__}, expected 2.10 or later")
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


def _uring() -> Fact:
    refusal = kernel.uring_refusal()
    return Fact("io_uring", not refusal, refusal or "a ring was made")


def _gpu_storage() -> tuple[Fact, ...]:
    """What lies between a GPU and a drive: without any of it, bytes pass through host memory."""
    kvikio, cufile = version_of(KVIKIO), version_of(_CUFILE)
    is_allowed, where = kernel.cufile_compatibility()
    return (
        Fact("kvikio", kvikio is not None, kvikio or "not installed: pip install tieroff[gds]"),
        Fact("cuFile", cufile is not None, cufile or "not installed as a Python package; CUDA's own may be there"),
        Fact("cuFile compatibility mode", is_allowed, where),
        Fact("nvidia-fs", *kernel.nvidia_fs()),
        Fact("P2PDMA", *kernel.p2pdma(cuda_version())),
    )


def _memory() -> Fact:
    memory = psutil.virtual_memory()
    limit = host_limit()
    left = limit.left_bytes
    text = f"{format_bytes(left)} left of {format_bytes(memory.total)}"
    # The two numbers are read one after the other, so they differ a little even where no group sets a limit.
    if left < 0.9 * memory.available:
        text += f"; the machine has {format_bytes(memory.available)}, {limit.limiter} sets the limit"
    else:
        text += "; no cgroup sets a lower limit"
    return Fact("memory", left > 0, text)


def _locked_memory() -> Fact:
    """What may be locked. Pinned memory needs none of it, registered buffers of an I/O engine would."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Fact("locked memory", True, "no limit" if soft == resource.RLIM_INFINITY else format_bytes(soft))
