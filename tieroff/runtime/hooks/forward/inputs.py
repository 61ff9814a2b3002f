"""The inputs of a forward, and the signature of a kind of step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def signature_of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the signature of a kind of step: shapes and types of the inputs, modes of model and autocast."""
    leaves = leaves_of((args, kwargs))
    described = tuple(
        (leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else type(leaf).__name__ for leaf in leaves
    )
    kinds = {"cpu", *(leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta")}
    return (*described, model.training, *(torch.is_autocast_enabled(kind) for kind in sorted(kinds)))


def leaves_of(values: Any) -> list[Any]:
    """Returns the leaves of a nested structure, in order; of mappings that torch does not know (a tokenizer's batch) too."""
    found: list[Any] = []
    for leaf in torch.utils._pytree.tree_leaves(values):
        if isinstance(leaf, Mapping):
            found += leaves_of(dict(leaf))
        else:
            found.append(leaf)
    return found


def storages_of(values: Any) -> set[int]:
    """Returns the identities of the storages of all plain tensors in a nested structure."""
    return {
        leaf.untyped_storage()._cdata
        for leaf in leaves_of(values)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and type(leaf) in (torch.Tensor, torch.nn.Parameter)
    }


def shapes_of(values: Any) -> tuple[tuple[int, ...], ...] | None:
    """Returns the shapes of all tensors in a nested structure; None when it holds something of unknown size."""
    shapes = []
    for leaf in leaves_of(values):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_nested:
            shapes.append(tuple(leaf.shape))
        elif not isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device, type(None))):
            return None
    return tuple(shapes)
