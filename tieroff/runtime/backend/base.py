"""Backends: how bytes get between the device and a place below it.

`CpuBackend` serves machines without a GPU: its device tier is ordinary memory, copies run on the I/O engine's threads.
`DelayedBackend` is the same with every copy late: the check of ordering where there is no GPU. `CudaBackend` is in
`runtime/backend/cuda.py`.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Protocol

import torch

from tieroff.errors import StoreError
from tieroff.runtime.items.place import Place
from tieroff.storage.host import buffers
from tieroff.storage.host.page_pool import page_pool, serve_torch, stop_serving

# A transfer that has not ended after this long is reported instead of waited for.
TRANSFER_TIMEOUT_S = 120.0

_VECTOR_MATH = (
    torch.abs, torch.acos, torch.asin, torch.atan, torch.ceil, torch.cos, torch.cosh, torch.erf, torch.erfc, torch.erfinv,
    torch.exp, torch.exp2, torch.expm1, torch.floor, torch.lgamma, torch.log, torch.log10, torch.log1p, torch.log2,
    torch.round, torch.rsqrt, torch.sin, torch.sinh, torch.sqrt, torch.tan, torch.tanh, torch.trunc,
)  # fmt: skip

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


class Arrival(Protocol):
    """A copy under way between the device and a place."""

    @property
    def start_ns(self) -> int:
        """When it began, or 0."""

    @property
    def stop_ns(self) -> int:
        """When it ended, or 0."""

    def done(self) -> bool:
        """True when `wait` would not block."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when work issued to the device from now on sees the copy complete.

        Raises:
            StoreError: the copy failed; source and target are as the store's contract says.
        """


class Backend(Protocol):
    """What the executor needs of a device; `lifts_homes`: see [Note: lifted or minted] in parameters.py."""

    name: str
    device: torch.device
    lifts_homes: bool

    def empty(self, size_bytes: int) -> torch.Tensor:
        """Returns uninitialised device memory as a 1-d uint8 tensor; freed when its storage's last reference dies."""

    def copy_out(self, source: torch.Tensor, place: Place) -> Arrival:
        """Starts a copy of a 1-d uint8 device tensor to a place."""

    def copy_in(self, place: Place, target: torch.Tensor) -> Arrival:
        """Starts a copy of a place to a 1-d uint8 device tensor."""

    def join(self, arrival: Arrival) -> None:
        """Blocks the host until a completed copy's bytes may be read by anybody on the host."""

    def tune_allocator(self, mmap_threshold_bytes: int | None) -> None:
        """Makes freed memory leave the process, where that is a matter of settings; None restores the default."""

    def keep_freed(self, limit_bytes: int) -> None:
        """Keeps device memory that is freed for reuse, as far as it and what is in use come to no more than this."""

    def gave(self, device: torch.Tensor) -> bool:
        """True for memory to which that limit applies."""

    def close(self) -> None:
        """Waits for nothing; gives back what the backend itself holds."""


class CpuBackend:
    """The device tier is ordinary memory under the same budget."""

    name = "cpu"
    device = torch.device("cpu")
    lifts_homes = True

    def __init__(self, keeps_freed: bool = True) -> None:
        self._pool = page_pool()
        self._keeps_freed = keeps_freed
        # What others have of the pool, and no budget of this backend's is about.
        self._others_bytes = self._pool.in_use_bytes if self._pool is not None else 0
        settle_vector_math()

    def empty(self, size_bytes: int) -> torch.Tensor:
        if size_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        # Not torch's allocator: page-aligned memory is read into directly, and it leaves the process when it has to.
        pages = self._pool.take(size_bytes) if self._pool is not None else buffers.allocate(size_bytes)
        return torch.frombuffer(pages, dtype=torch.uint8, count=size_bytes)

    def copy_out(self, source: torch.Tensor, place: Place) -> Arrival:
        return place.write(source.data_ptr(), source)

    def copy_in(self, place: Place, target: torch.Tensor) -> Arrival:
        return place.read(target.data_ptr(), target)

    def join(self, arrival: Arrival) -> None:
        """Nothing more to wait for: copies end on the host."""

    def tune_allocator(self, mmap_threshold_bytes: int | None) -> None:
        """Sets glibc's mmap threshold: blocks above it return to the system when freed (measured in docs/results)."""
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "mallopt"):
            return
        threshold = mmap_threshold_bytes if mmap_threshold_bytes is not None else 32 << 20
        libc.mallopt(_M_MMAP_THRESHOLD, threshold)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * threshold)

    def keep_freed(self, limit_bytes: int) -> None:
        if self._pool is not None:
            # Torch's memory is most of what the limit is about: without it the limit says nothing.
            may_keep = limit_bytes > 0 and self._keeps_freed and serve_torch()
            self._pool.set_limit(limit_bytes + self._others_bytes if may_keep else 0)

    def gave(self, device: torch.Tensor) -> bool:
        return self._pool is not None and self._pool.owns(device.data_ptr())

    def close(self) -> None:
        """Gives back the memory that was kept for reuse."""
        stop_serving()


class _LateCopy:
    """A copy that starts only when it is waited for, or after a random number of looks."""

    def __init__(self, start: Callable[[], Arrival], looks: int) -> None:
        self._start: Callable[[], Arrival] | None = start
        self._looks = looks
        self._inner: Arrival | None = None

    def _begin(self) -> Arrival:
        if self._inner is None:
            assert self._start is not None
            self._inner, self._start = self._start(), None  # lets go of source and target, as a real copy does
        return self._inner

    @property
    def start_ns(self) -> int:
        return self._inner.start_ns if self._inner is not None else 0

    @property
    def stop_ns(self) -> int:
        return self._inner.stop_ns if self._inner is not None else 0

    def done(self) -> bool:
        self._looks -= 1
        return self._looks <= 0 and self._begin().done()

    def wait(self, timeout_s: float | None = None) -> None:
        self._begin().wait(timeout_s)


class DelayedBackend(CpuBackend):
    """A CpuBackend whose copies start late, by a seed, and whose targets hold NaN until they arrive.

    A reader that does not wait for its copy, or a source that is freed or overwritten before its copy was awaited,
    gives wrong numbers here every time instead of once in a thousand runs.
    """

    name = "delayed"
    lifts_homes = False  # as on CUDA, so that minted values are tested where there is none

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def empty(self, size_bytes: int) -> torch.Tensor:
        return super().empty(size_bytes).fill_(0xFF)

    def copy_out(self, source: torch.Tensor, place: Place) -> Arrival:
        return _LateCopy(lambda: CpuBackend.copy_out(self, source, place), self._random.randrange(1, 6))

    def copy_in(self, place: Place, target: torch.Tensor) -> Arrival:
        target.fill_(0xFF)
        return _LateCopy(lambda: CpuBackend.copy_in(self, place, target), self._random.randrange(1, 6))


def settle_vector_math() -> None:
    """Has every elementwise function of the vector math library run once, on one thread.

    The library of torch's x86 builds picks a function's kernel in its first call. When several threads make that call at
    once, one of them can run a kernel of low accuracy (torch issue 188792): in one process of four, AdamW's first square
    root, and with it all that followed, differed between two runs of the same plain loop on 2 cores.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for function in _VECTOR_MATH:
            function(one)


def probe_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that shares the version counter of another and none of its memory: writes to that one show."""
    probe = tensor.detach()
    probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole storage of a tensor as a 1-d uint8 tensor that shares it."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def view_of(
    storage_bytes: torch.Tensor, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Returns a tensor of the given geometry (offset in elements) over the storage of a 1-d uint8 tensor."""
    out = torch.empty(0, dtype=dtype, device=storage_bytes.device)
    return out.set_(storage_bytes.untyped_storage(), offset, size, stride)


def await_arrival(arrival: Arrival, what: str) -> None:
    """Waits for a copy, and names what was waited for when it fails."""
    try:
        arrival.wait(TRANSFER_TIMEOUT_S)
    except StoreError as error:
        error.args = (f"{what}: {error.args[0]}", *error.args[1:])
        raise
