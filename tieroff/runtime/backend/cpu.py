"""The CPU backend: the device tier is ordinary memory, and copies run on the I/O engine's threads."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext

import torch

from tieroff.runtime.backend.place import Place
from tieroff.runtime.backend.stamp import Stamp
from tieroff.storage import buffers
from tieroff.storage.completion import Completion
from tieroff.storage.host.page_pool import page_pool, pool_shares, serve_torch, stop_serving
from tieroff.storage.host.slabs import PopulatedSlabs, Slabs

_VECTOR_MATH = (
    torch.abs,
    torch.acos,
    torch.asin,
    torch.atan,
    torch.ceil,
    torch.cos,
    torch.cosh,
    torch.erf,
    torch.erfc,
    torch.erfinv,
    torch.exp,
    torch.exp2,
    torch.expm1,
    torch.floor,
    torch.lgamma,
    torch.log,
    torch.log10,
    torch.log1p,
    torch.log2,
    torch.round,
    torch.rsqrt,
    torch.sin,
    torch.sinh,
    torch.sqrt,
    torch.tan,
    torch.tanh,
    torch.trunc,
)

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


class CpuBackend:
    """The device tier is ordinary memory under the same budget."""

    name = "cpu"
    device = torch.device("cpu")
    has_host_tier = True  # within the process's memory, which is how budgets are tried out where there is no device
    near_cpus: Collection[int] = ()
    slabs: Slabs = PopulatedSlabs()

    def __init__(self, keeps_freed: bool = True) -> None:
        self._pool = page_pool()
        self._keeps_freed = keeps_freed
        self._shares = pool_shares()
        # What others have of the pool, and no budget of this backend's is about.
        self._others_bytes = self._pool.in_use_bytes if self._pool is not None else 0
        settle_vector_math()

    def empty(self, size_bytes: int) -> torch.Tensor:
        if size_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        # Not torch's allocator: page-aligned memory is read into directly, and it leaves the process when it has to.
        pages = self._pool.take(size_bytes) if self._pool is not None else buffers.allocate(size_bytes)
        return torch.frombuffer(pages, dtype=torch.uint8, count=size_bytes)

    def use_staging(self, size_bytes: int) -> None:
        """Nothing to make: files are read and written where the bytes lie."""

    def placeholder(self, value: torch.Tensor, message: str) -> torch.Tensor | None:
        """None: what lies below is memory of the host, which people may read and write there."""
        return None

    def copy_out(self, source: torch.Tensor, place: Place) -> Completion:
        return place.write(source.data_ptr(), source)

    def copy_in(self, place: Place, target: torch.Tensor) -> Completion:
        return place.read(target.data_ptr(), target)

    def begin_step(self, *, keeps_times: bool = True) -> None:
        """Nothing to note."""

    def computing(self) -> AbstractContextManager[None]:
        """There are no streams."""
        return nullcontext()

    def lending(self) -> AbstractContextManager[None]:
        """There are no streams."""
        return nullcontext()

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def wrote_elsewhere(self) -> None:
        """There are no streams."""

    def stamp(self) -> Stamp | None:
        """None: this is the host."""
        return None

    def settle(self, timeout_s: float) -> None:
        """Nothing to wait for: all copies are the I/O engine's."""

    def order_frees(self) -> None:
        """Nothing to order: work ends before the next call."""

    def flush(self) -> None:
        """Nothing more to wait for: copies end on the host."""

    def tune_allocator(self, mmap_threshold_bytes: int | None) -> None:
        """Sets glibc's mmap threshold: blocks above it return to the system when freed (measured in docs/results)."""
        libc = _libc()
        if not hasattr(libc, "mallopt"):
            return
        threshold = mmap_threshold_bytes if mmap_threshold_bytes is not None else 32 << 20
        libc.mallopt(_M_MMAP_THRESHOLD, threshold)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * threshold)

    def keep_freed(self, limit_bytes: int) -> None:
        if self._shares is not None:
            # Torch's memory is most of what the limit is about: without it the limit says nothing.
            may_keep = limit_bytes > 0 and self._keeps_freed and serve_torch()
            self._shares.set(self, limit_bytes if may_keep else 0, self._others_bytes)

    def return_freed(self) -> None:
        libc = _libc()
        if hasattr(libc, "malloc_trim"):  # glibc
            libc.malloc_trim(0)

    def allocated_bytes(self) -> None:
        """Returns None: who has memory of the host, nobody says."""

    def requested_most(self) -> None:
        """None, as above."""

    def allocated_most(self) -> None:
        """None: the C library's allocator does not say."""

    def gave(self, device: torch.Tensor) -> bool:
        return self._pool is not None and self._pool.owns(device.data_ptr())

    def close(self) -> None:
        """Gives back the memory that was kept for reuse."""
        if self._shares is not None:
            self._shares.leave(self)
        stop_serving()


@functools.cache
def _libc() -> ctypes.CDLL:
    """Returns the C library; each object for it is a cycle that only the garbage collector frees."""
    return ctypes.CDLL(None)


def settle_vector_math() -> None:
    """Runs every elementwise function of the vector math library once, on one thread.

    The library of torch's x86 builds picks a function's kernel in its first call. When several threads make that call at
    once, one of them can run a kernel of low accuracy (torch issue 188792): in one process of four, AdamW's first square
    root, and with it all that followed, differed between two runs of the same plain loop on 2 cores.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for function in _VECTOR_MATH:
            function(one)
