"""What the runtime asks of a device: how bytes get between it and a place below it."""

from __future__ import annotations

from typing import Protocol

import torch

from tieroff.errors import StoreError
from tieroff.runtime.backend.place import Place
from tieroff.storage.completion import Completion

# A transfer that has not ended after this long is reported instead of waited for.
TRANSFER_TIMEOUT_S = 120.0


class Backend(Protocol):
    """What the executor needs of a device; `lifts_homes`: see [Note: lifted or minted] in parameters.py."""

    name: str
    device: torch.device
    lifts_homes: bool

    def empty(self, size_bytes: int) -> torch.Tensor:
        """Returns uninitialised device memory as a 1-d uint8 tensor; freed when its storage's last reference dies."""

    def copy_out(self, source: torch.Tensor, place: Place) -> Completion:
        """Starts a copy of a 1-d uint8 device tensor to a place."""

    def copy_in(self, place: Place, target: torch.Tensor) -> Completion:
        """Starts a copy of a place to a 1-d uint8 device tensor."""

    def join(self, arrival: Completion) -> None:
        """Blocks the host until a completed copy's bytes may be read by anybody on the host."""

    def tune_allocator(self, mmap_threshold_bytes: int | None) -> None:
        """Makes freed memory leave the process, where that is a matter of settings; None restores the default."""

    def keep_freed(self, limit_bytes: int) -> None:
        """Keeps device memory that is freed for reuse, as far as it and what is in use come to no more than this."""

    def gave(self, device: torch.Tensor) -> bool:
        """True for memory to which that limit applies."""

    def close(self) -> None:
        """Waits for nothing; gives back what the backend itself holds."""


def await_arrival(arrival: Completion, what: str) -> None:
    """Waits for a copy, and names what was waited for when it fails."""
    try:
        arrival.wait(TRANSFER_TIMEOUT_S)
    except StoreError as error:
        error.args = (f"{what}: {error.args[0]}", *error.args[1:])
        raise
