"""Vendors: what PyTorch has no common call for, behind one protocol."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from tieroff.errors import StoreError
from tieroff.storage.host import numa
from tieroff.storage.host.slabs import RegisteredSlabs, Slab, Slabs
from tieroff.storage.memory import PAGE_BYTES, align_up

log = logging.getLogger("tieroff")


class Vendor(Protocol):
    """What a kind of device has of its own."""

    def slabs(self, device: torch.device) -> Slabs:
        """Returns what makes pinned host memory that this device copies to and from."""

    def near_cpus(self, device: torch.device) -> Collection[int]:
        """Returns those of the NUMA node that the device hangs on; none where there is nothing to choose."""

    def forbid_access(self, storage: torch.UntypedStorage, message: str) -> None:
        """Has every access of a storage's memory raise RuntimeError with this message, where there is a way."""

    def is_integrated(self, device: torch.device) -> bool:
        """True where the device's memory is the host's."""


class TorchSlab:
    """Memory that PyTorch's allocator has pinned, for devices that have no call to pin what is there already."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = align_up(size_bytes, PAGE_BYTES)
        self._memory = _pinned_by_torch(self.size_bytes)
        if self._memory.data_ptr() % PAGE_BYTES:  # asked for second: a page more may take twice as much
            self._memory = _pinned_by_torch(self.size_bytes + PAGE_BYTES)
        self.address = align_up(self._memory.data_ptr(), PAGE_BYTES)


def _pinned_by_torch(size_bytes: int) -> torch.Tensor:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        message = f"expected to pin {size_bytes} bytes of host memory, PyTorch refused: {error}"
        raise StoreError(message, size_bytes=size_bytes, errno=errno.ENOMEM) from error


class TorchSlabs:
    """Memory from PyTorch's allocator of pinned memory, which rounds sizes up to powers of two."""

    is_backed = True

    def make(self, size_bytes: int) -> TorchSlab:
        return TorchSlab(size_bytes)

    def release(self, slab: Slab) -> None:
        """Nothing to undo: PyTorch keeps it for what is pinned next."""


class AnyVendor:
    """A device of which nothing is known but what PyTorch says: memory is pinned by PyTorch's own allocator."""

    def slabs(self, device: torch.device) -> Slabs:
        return TorchSlabs()

    def near_cpus(self, device: torch.device) -> Collection[int]:
        return ()

    def forbid_access(self, storage: torch.UntypedStorage, message: str) -> None:
        forbid_access(storage, message)

    def is_integrated(self, device: torch.device) -> bool:
        return False


@dataclass(frozen=True)
class Cuda:
    """NVIDIA's devices, and AMD's, whose runtime has the same calls under PyTorch's names."""

    def slabs(self, device: torch.device) -> Slabs:
        return RegisteredSlabs(partial(_register, device), partial(_unregister, device), self.near_cpus(device))

    def near_cpus(self, device: torch.device) -> Collection[int]:
        properties: Any = torch.cuda.get_device_properties(device)  # its stub lacks what is asked for
        return numa.cpus_near(numa.pci_address(properties))

    def forbid_access(self, storage: torch.UntypedStorage, message: str) -> None:
        forbid_access(storage, message)

    def is_integrated(self, device: torch.device) -> bool:
        return bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))


_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


def _register(device: torch.device, address: int, size_bytes: int) -> None:
    code = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, _PORTABLE))
    if code:
        _take_error(device)
        raise refused(size_bytes, "cudaHostRegister", code)


def _unregister(device: torch.device, address: int) -> None:
    code = int(torch.cuda.cudart().cudaHostUnregister(address))
    if code:
        _take_error(device)
        log.warning("cudaHostUnregister returned %d: memory of the host stays pinned until the process ends", code)


def _take_error(device: torch.device) -> None:
    """Takes the error that a refused call leaves behind, which the next kernel would report: this one does.

    PyTorch has no call that does so.
    """
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        log.debug("left behind by a refused call: %s", error)


def refused(size_bytes: int, call: str, code: int) -> StoreError:
    """Returns the error for memory that could not be pinned."""
    return StoreError(
        f"expected to pin {size_bytes} bytes of host memory, {call} returned {code}; lower [budget] host or raise the limit on "
        "locked memory",
        size_bytes=size_bytes,
        errno=errno.ENOMEM,
    )


def forbid_access(storage: torch.UntypedStorage, message: str) -> None:
    """Has every access of a storage's memory raise, by what PyTorch's CUDA graphs use.

    Builds without CUDA do not have it. There an address that is asked for and a write raise, with a message of PyTorch's own; a
    read by a kernel that got the tensor past every Python function, where its class would have brought the bytes up,
    works at address 0, which is an error of the device.
    """
    forbid: Callable[[int, str], None] | None = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
    if forbid is not None:
        forbid(storage._cdata, message)
        return
    forbid_write: Callable[[torch.Tensor], None] | None = getattr(torch._C, "_set_throw_on_mutable_data_ptr", None)
    if forbid_write is not None:
        forbid_write(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))


_VENDORS: dict[str, Vendor] = {"cuda": Cuda()}


def register_vendor(device_type: str, vendor: Vendor) -> None:
    """Says what a kind of device has of its own, such as "xpu"; the last word counts."""
    _VENDORS[device_type] = vendor


def vendor_of(device: torch.device) -> Vendor:
    """Returns what is known of a device's vendor."""
    return _VENDORS.get(device.type) or AnyVendor()
