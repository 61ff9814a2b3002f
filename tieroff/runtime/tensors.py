"""Tensors over the bytes of others."""

from __future__ import annotations

import torch


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
