"""How much of a device a program takes, by a count that the engine has no part in.

On an accelerator it is the allocator's own. On the CPU it is the same: an allocator that counts takes the place of torch's, so
that what an operator, a kernel inside of it or compiled code makes shows, in whatever thread. Lower tiers are mapped
memory and no allocator's. What the backend gives as device memory (`CpuBackend.empty`) is not torch's either, and is added.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import os
import subprocess
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tieroff.rehearsal.build import cache_folder
from tieroff.runtime.backend.cpu import CpuBackend

_SOURCE = Path(__file__).with_name("counting.cpp")
_FLAGS = ("-std=c++20", "-O1", "-DNDEBUG", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")


class DeviceBytes:
    """What is taken of a device since this was made; what others had of it by then is not counted.

    Args:
        device: the CPU, or an accelerator whose allocator counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()  # what others have left would die in between
        if device.type == "cpu":
            self._base_bytes = int(_counting().bytes_live())
        else:
            self._base_bytes = torch.accelerator.memory_allocated(device)
        self.begin()

    def begin(self) -> None:
        """From here on the peak is another one."""
        if self._device.type == "cpu":
            _counting().bytes_begin()
        else:
            torch.accelerator.reset_peak_memory_stats(self._device)

    @property
    def live_bytes(self) -> int:
        """What is taken now."""
        if self._device.type == "cpu":
            return int(_counting().bytes_live()) - self._base_bytes
        return torch.accelerator.memory_allocated(self._device) - self._base_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was taken at once since `begin`."""
        if self._device.type == "cpu":
            return int(_counting().bytes_peak()) - self._base_bytes
        return torch.accelerator.max_memory_allocated(self._device) - self._base_bytes


class Scratch(TorchDispatchMode):
    """Inside, the most that one op takes for itself and gives back is measured, of ops on no tensor as large as `below_bytes`.

    A recorded step looks at larger ones only: see tieroff/tracing/recording/scratch.py.

    Attributes:
        most_bytes: what was found.
    """

    def __init__(self, device: torch.device, below_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._taken, self._below_bytes = DeviceBytes(device), below_bytes
        self.most_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before_bytes = self._taken.live_bytes
        self._taken.begin()
        out = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if all(leaf.numel() * leaf.element_size() < self._below_bytes for leaf in given):
            scratch_bytes = self._taken.peak_bytes - max(before_bytes, self._taken.live_bytes)
            self.most_bytes = max(self.most_bytes, scratch_bytes)
        return out


@contextmanager
def aside() -> Iterator[None]:
    """What this thread makes on the CPU inside of `with` is the test's own, and not counted."""
    library = _counting()
    library.bytes_aside(1)
    try:
        yield
    finally:
        library.bytes_aside(-1)


@functools.cache
def _counting() -> Any:
    """Has torch's CPU tensors, and device copies of the CPU backend, counted from here on; returns the library that does."""
    library: Any = ctypes.CDLL(str(_built()))
    library.bytes_live.restype = library.bytes_peak.restype = ctypes.c_int64
    library.bytes_add.argtypes = [ctypes.c_int64]
    library.bytes_install()
    give: Any = CpuBackend.empty

    def empty(self: CpuBackend, size_bytes: int) -> torch.Tensor:
        """Returns device memory, which counts until the last tensor over it dies."""
        given: torch.Tensor = give(self, size_bytes)
        if size_bytes:
            library.bytes_add(size_bytes)
            weakref.finalize(given.untyped_storage(), library.bytes_add, -size_bytes)
        return given

    backend: Any = CpuBackend
    backend.empty = empty
    return library


def _built() -> Path:
    """Returns the library, built where it is not there yet; less than a second."""
    torch_folder = Path(torch.__file__).resolve().parent
    digest = hashlib.sha256(" ".join([torch.__version__, str(torch_folder), *_FLAGS]).encode() + _SOURCE.read_bytes())
    made = cache_folder("counting_allocator") / f"{digest.hexdigest()[:16]}.so"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        unfinished = made.with_suffix(f".{os.getpid()}")  # several processes of one test run may come here at once
        links = [f"-L{torch_folder / 'lib'}", f"-Wl,-rpath,{torch_folder / 'lib'}", "-lc10"]
        headers = ["-isystem", str(torch_folder / "include")]
        subprocess.run(["g++", *_FLAGS, *headers, "-shared", str(_SOURCE), *links, "-o", str(unfinished)], check=True)
        unfinished.rename(made)
    return made
