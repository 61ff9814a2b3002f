"""Which tensors can move, and where a tensor holds its bytes."""

from __future__ import annotations

import sys
from typing import Any

import torch

from tieroff.errors import StateError


def refuse_lazy(model: torch.nn.Module, remedy: str) -> None:
    """Returns when all parameters have sizes.

    Raises:
        StateError: a module has lazy parameters. `remedy` says what to run, and when.
    """
    for module in model.modules():
        if any(p is not None and torch.nn.parameter.is_lazy(p) for p in module._parameters.values()):
            raise StateError(f"{type(module).__name__} has lazy parameters, whose sizes nobody knows yet; run {remedy}")


def why_unmovable(tensor: torch.Tensor) -> str:
    """Returns why this tensor cannot have a home below, or "" when it can."""
    if tensor.is_nested or tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return "no plain strided tensor"
    if tensor.is_quantized or tensor.is_inference() or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        return "a quantized, inference or lazily transformed tensor"
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return "it has no bytes"
    if tensor.is_cpu and tensor.is_shared():
        return "it lies in memory shared between processes"
    storage = tensor.untyped_storage()
    if tensor.storage_offset() != 0 or storage.nbytes() != tensor.numel() * tensor.element_size():
        return "a view of a larger storage"
    # Two references are this function's own: the tensor's and the Python storage object's.
    if torch._C._storage_Use_Count(storage._cdata) > 2:
        return "its memory is shared with another tensor"
    if not tensor.is_contiguous() and not is_dense(tensor):
        return "its elements overlap or leave gaps"
    return ""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the plain tensor that holds a tensor's bytes in this process.

    Of a `DTensor` that is this rank's shard: the very object that the `DTensor` computes on, so that its `.data` may lie
    here or there as that of any other tensor. Everything else holds its bytes itself.
    """
    distributed = sys.modules.get("torch.distributed.tensor")  # without it there is no DTensor; importing it takes long
    if distributed is None or not isinstance(tensor, distributed.DTensor):
        return tensor
    names, _ = tensor.__tensor_flatten__()  # `to_local` makes another tensor on the same memory, of a parameter
    local: torch.Tensor = getattr(tensor, names[0])
    return local


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Returns what a tensor is with other bytes of this process: the local tensor, or a `DTensor` with it as its part."""
    if local_of(tensor) is tensor:
        return local
    outer: Any = tensor
    names, context = outer.__tensor_flatten__()
    parts = {name: getattr(outer, name) for name in names} | {names[0]: local}
    made: torch.Tensor = outer.__tensor_unflatten__(parts, context, outer.shape, outer.stride())
    return made


def is_dense(tensor: torch.Tensor) -> bool:
    """True when the elements fill their storage exactly once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.size(), tensor.stride(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
