"""What the runtime asks of a device: how bytes get between it and a place below it."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from tieroff.errors import StoreError
from tieroff.runtime.backend.place import Place
from tieroff.runtime.backend.stamp import Stamp
from tieroff.storage.completion import Completion
from tieroff.storage.host.slabs import Slabs

# A transfer that has not ended after this long is reported instead of waited for.
TRANSFER_TIMEOUT_S = 120.0


class Backend(Protocol):
    """What the executor needs of a device.

    Attributes:
        name: for people.
        device: where it computes.
        slabs: makes host memory that its copies reach.
        has_host_tier: False where the device's memory is the host's, so that moving to host memory would gain nothing.
        near_cpus: those of the NUMA node that it hangs on; none where there is nothing to choose.
    """

    name: str
    device: torch.device
    slabs: Slabs
    has_host_tier: bool
    near_cpus: Collection[int]

    def use_staging(self, size_bytes: int) -> None:
        """An engine begins to use this backend: makes the host memory through which bytes pass on their way to files.

        0 makes none. `close` ends this use.
        """

    def empty(self, size_bytes: int) -> torch.Tensor:
        """Returns uninitialised device memory as a 1-d uint8 tensor; freed when its storage's last reference dies."""

    def placeholder(self, value: torch.Tensor, message: str) -> torch.Tensor | None:
        """Returns what stands for a tensor that people hold while it lies below.

        A tensor of the same type, geometry and device without memory, of which every access raises RuntimeError with the
        message; None where the tensor shows its bytes below as ordinary memory of the host.
        """

    def copy_out(self, source: torch.Tensor, place: Place) -> Completion:
        """Starts a copy of a 1-d uint8 device tensor to a place."""

    def copy_in(self, place: Place, target: torch.Tensor) -> Completion:
        """Starts a copy of a place to a 1-d uint8 device tensor."""

    def begin_step(self, *, keeps_times: bool = True) -> None:
        """A step begins: its stamps count from here. Without `keeps_times` nobody asks when its copies began."""

    def computing(self) -> AbstractContextManager[None]:
        """Inside, work is given to compute's stream, whichever stream others (FSDP2's hooks) are called under."""

    def lending(self) -> AbstractContextManager[None]:
        """Inside, the caller's stream works on what compute has made so far; what compute does afterwards comes after that."""

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy that the caller's stream makes, in memory that is compute's from there on, as all that items have."""

    def wrote_elsewhere(self) -> None:
        """The caller's stream wrote memory of items: copies out that begin later come after that."""

    def stamp(self) -> Stamp | None:
        """Returns a stamp behind what compute was given so far; None where the host's clock is the device's.

        Blocks the host while the device is too far behind it.
        """

    def order_frees(self) -> None:
        """Device memory is about to be freed: its next user comes behind all that compute was given so far."""

    def flush(self) -> None:
        """Blocks the host until the bytes of all copies that were waited for may be read by anybody on the host."""

    def tune_allocator(self, mmap_threshold_bytes: int | None) -> None:
        """Makes freed memory leave the process, where that is a matter of settings; None restores the default."""

    def keep_freed(self, limit_bytes: int) -> None:
        """Keeps device memory that is freed for reuse, as far as it and what is in use come to no more than this."""

    def return_freed(self) -> None:
        """Has memory leave the process that was freed and is kept by nobody's wish, as after planning."""

    def allocated_bytes(self) -> int | None:
        """Returns what PyTorch has lent of the device now, to whomever; None where nobody counts.

        What large blocks have more than was asked for is left out.
        """

    def requested_most(self) -> int | None:
        """Returns the most bytes that were asked of PyTorch's allocator at once, since somebody last had it count anew.

        What its blocks have more than was asked for is left out. None where nobody counts.
        """

    def allocated_most(self) -> tuple[int, int] | None:
        """Returns the most bytes that PyTorch's allocator took of the device, and that tensors had; None on the host."""

    def gave(self, device: torch.Tensor) -> bool:
        """True for memory to which that limit applies."""

    def settle(self, timeout_s: float) -> None:
        """After an exception: waits for copies that may be under way and that nobody has noted.

        Raises:
            StoreError: one did not end in time (ETIMEDOUT).
        """

    def close(self) -> None:
        """An engine uses this backend no more; when none does, what the backend itself holds is given back."""


def await_arrival(arrival: Completion, what: str) -> None:
    """Waits for a copy, and names what was waited for when it fails."""
    try:
        arrival.wait(TRANSFER_TIMEOUT_S)
    except StoreError as error:
        error.args = (f"{what}: {error.args[0]}", *error.args[1:])
        raise
