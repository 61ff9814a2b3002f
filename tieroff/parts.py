"""The plain tensors that a tensor is made of: a wrapper subclass has no bytes, its parts have them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor holds its bytes in other tensors: a `DTensor`, a quantized weight of torchao."""
    return type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor)


def parts_of(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that hold a tensor's bytes in this process, each with its path: the tensor itself, under "", if plain.

    By `__tensor_flatten__`, at any depth; the path is of attributes, such as "quantized.scale". What a wrapper counts among
    its parts and is no tensor (a DTensor's mesh of devices) has no bytes.
    """
    if not is_wrapper(tensor):
        yield "", tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):
            for path, plain in parts_of(part):
                yield (f"{name}.{path}" if path else name), plain
