"""Tensors over the bytes of others."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

# Inside of it no dispatch mode sees what runs: a recorder would take some 20 us to note each call. Only for memory that every
# recorder knows: what another model's engine has just fetched is seen here first, and else counts from the step's begin.
unseen = torch._C._DisableTorchDispatch
_use_count: Callable[[int], int] = torch._C._storage_Use_Count


def outside_inference() -> AbstractContextManager[Any]:
    """Inside, inference mode is off: what is made there outlives whatever runs now.

    By the guard of C++, and where that mode is on: one that an interrupt leaves entered dies with the traceback, and sets what
    was when it was entered, dispatch modes included. Between an entry in C and the block no interrupt comes.
    """
    return torch._C._InferenceMode(False) if torch.is_inference_mode_enabled() else nullcontext()


def probe_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that shares the version counter of another and none of its memory: writes to that one show."""
    probe = alias_of(tensor)
    if type(probe) is torch.Tensor:
        probe.data = _nothing(tensor.dtype, tensor.device)
    else:
        probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a tensor without elements, whose storage all probes share."""
    with outside_inference(), _disable_current_modes():
        return torch.empty(0, dtype=dtype, device=device)


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor.detach()`; of a plain tensor unseen by dispatch modes, since the program makes no such call."""
    if type(tensor) is not torch.Tensor:
        return tensor.detach()
    with unseen():
        return tensor.detach()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole storage of a tensor as a 1-d uint8 tensor that shares it."""
    storage = tensor.untyped_storage()
    with unseen():
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def view_of(
    storage_bytes: torch.Tensor, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Returns a tensor of the given geometry (offset in elements) over the storage of a 1-d uint8 tensor."""
    out = torch.empty(0, dtype=dtype, device=storage_bytes.device)
    return out.set_(storage_bytes.untyped_storage(), offset, size, stride)


def count_together(known: torch.Tensor, tensor: torch.Tensor) -> bool:
    """True when two tensors on one storage count their versions together: a write to the one shows at the other.

    Equal numbers do not say so: parts of one storage may count apart (`unsafe_chunk`, in every GRU), and each may have been
    written as often as the other.
    """
    if tensor.is_inference() or known._version != tensor._version:
        return False
    version = known._version
    set_version = torch._C._autograd._unsafe_set_version_counter
    set_version((tensor,), (version + 1,))
    try:
        return known._version != version
    finally:
        set_version((tensor,), (version,))


def storage_of(tensor: torch.Tensor) -> int:
    """Returns what names a plain tensor's storage for `owners_by` while that lives."""
    return int(tensor.untyped_storage()._cdata)


def owners_by(storage: int) -> int:
    """Returns how many tensors (and other owners) share a storage that `storage_of` named.

    The Python object of a storage is an owner too. `storage_of` made it, and the storage keeps it from then on.
    """
    return _use_count(storage) - 1


def is_storage_held(tensor: torch.Tensor) -> bool:
    """True while Python code holds the storage of a plain tensor itself, which is no owner of its own in `owners_by`."""
    return _references(tensor) > _REFERENCES_OF_OWN


def _references(tensor: torch.Tensor) -> int:
    return sys.getrefcount(tensor.untyped_storage())


# Those of an object of a storage that nobody else holds: of the storage, and of the call that counts.
_REFERENCES_OF_OWN = _references(torch.empty(1, device="cpu"))
