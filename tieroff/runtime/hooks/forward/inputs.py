"""The inputs of a forward, and the signature of a kind of step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from types import MemberDescriptorType, ModuleType
from typing import Any

import torch

from tieroff.runtime.items.offloaded import PLAIN

Signature = tuple[Any, ...]


def modules_in(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns each module of a model once, in some order that stays; as `modules` does, in a fraction of its time."""
    found, seen = [model], {id(model)}
    for module in found:  # it grows
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def signature_of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], trained: bytes) -> Signature:
    """Returns the signature of a kind of step: inputs (shapes, types, who gets gradients), modes of model and autocast.

    A model that steps in turn with others (a discriminator) has a kind of step of its own, and one through which gradients
    flow to another model, perhaps with its own parameters frozen meanwhile.

    Args:
        model: its modes and parameters count.
        args, kwargs: the inputs.
        trained: which of its parameters get a gradient: a byte each.
    """
    leaves = leaves_of((args, kwargs))
    described = tuple(
        (leaf.dtype, tuple(leaf.shape), leaf.requires_grad) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        for leaf in leaves
    )
    kinds = {"cpu", *(leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta")}
    return (*described, trained, model.training, *(torch.is_autocast_enabled(kind) for kind in sorted(kinds)))


def is_given_gradients(values: Any) -> bool:
    """True when gradients flow through some input, to whatever made it."""
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves_of(values))


def leaves_of(values: Any) -> list[Any]:
    """Returns the leaves of a nested structure, in order; of mappings that torch does not know (a tokenizer's batch) too."""
    found: list[Any] = []
    for leaf in torch.utils._pytree.tree_leaves(values):
        if isinstance(leaf, Mapping):
            found += leaves_of(dict(leaf))
        else:
            found.append(leaf)
    return found


def storages_in(values: Any) -> Iterator[torch.UntypedStorage]:
    """Yields the storages of all plain tensors in a nested structure; one twice that two of them share."""
    for leaf in leaves_of(values):
        if type(leaf) in PLAIN and leaf.layout is torch.strided:
            yield leaf.untyped_storage()


def elements_in(values: Any) -> int:
    """Returns how many elements the tensors in a nested structure have."""
    return sum(leaf.numel() for leaf in leaves_of(values) if isinstance(leaf, torch.Tensor) and not leaf.is_nested)


def shapes_of(values: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of all tensors and arrays in a nested structure, and in attributes of objects there.

    Of a sparse tensor with how many elements it has; of an object of which the parts are ever more, those nearest to it.
    """
    shapes: list[tuple[int, ...]] = []
    ahead, seen = deque(leaves_of(values)), set[int]()
    while ahead:
        leaf = ahead.popleft()
        if isinstance(leaf, torch.Tensor):
            shapes.append(_shape_of(leaf))
        elif isinstance(leaf, _WITHOUT_SIZE) or id(leaf) in seen:
            continue
        elif hasattr(type(leaf), "shape") and isinstance(shape := leaf.shape, tuple):  # an array of another library
            shapes.append(tuple(size for size in shape if isinstance(size, int)))
        elif len(seen) < _OBJECTS_MAX:
            seen.add(id(leaf))
            ahead += leaves_of(list(_attributes(leaf)))
    return tuple(shapes)


# Of whoever is given as an input, some are parts of the program and no data.
_PARTS = (torch.nn.Module, torch.optim.Optimizer, type, ModuleType)
_WITHOUT_SIZE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None), *_PARTS)
_OBJECTS_MAX = 256


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    if tensor.is_nested:
        return (tensor.size(0), tensor.numel())
    is_sparse = tensor.layout is not torch.strided and tensor.layout is not torch._mkldnn  # type: ignore[attr-defined]
    return (*tensor.shape, tensor._nnz()) if is_sparse else tuple(tensor.shape)


def _attributes(value: object) -> Iterator[Any]:
    """Yields what an object's attributes hold, without running code of its own."""
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            descriptor = vars(kind).get(name)
            if isinstance(descriptor, MemberDescriptorType) and hasattr(value, name):
                yield getattr(value, name)


def makes_graph(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True where a backward may follow: not under no_grad, nor of a frozen model (a teacher) on plain inputs."""
    if not torch.is_grad_enabled():
        return False
    return any(parameter.requires_grad for parameter in model.parameters()) or is_given_gradients((args, kwargs))


def to_device(device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the inputs on an accelerator; for the CPU as they are."""
    if device.type == "cpu":
        return args, kwargs

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) and leaf.device != device else leaf

    args, kwargs = torch.utils._pytree.tree_map(move, (args, kwargs))
    return args, kwargs


def as_computed(dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the inputs in the type that the model computes in."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    args, kwargs = torch.utils._pytree.tree_map(cast, (args, kwargs))
    return args, kwargs
