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
    """Yields the storages of all plain tensors in a nested structure and in objects there; one twice that two of them share."""
    for leaf in _data_in(values):
        if type(leaf) in PLAIN and leaf.layout is torch.strided:
            yield leaf.untyped_storage()


def nodes_behind(values: Any, given: Any = ()) -> Iterator[Any]:
    """Yields the nodes of autograd behind tensors in a nested structure, up to those that made what was given."""
    seen = {leaf.grad_fn for leaf in leaves_of(given) if isinstance(leaf, torch.Tensor)}
    left = [leaf.grad_fn for leaf in leaves_of(values) if isinstance(leaf, torch.Tensor)]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            left += [following for following, _ in node.next_functions]


def leaves_behind(values: Any) -> list[torch.Tensor]:
    """Returns the leaves, parameters aside, to which a backward from these would bring gradients."""
    leaves = (node.variable for node in nodes_behind(values) if hasattr(node, "variable"))
    return [leaf for leaf in leaves if not isinstance(leaf, torch.nn.Parameter)]


def elements_in(values: Any) -> int:
    """Returns how many elements the tensors in a nested structure have."""
    return sum(leaf.numel() for leaf in leaves_of(values) if isinstance(leaf, torch.Tensor) and not leaf.is_nested)


def shapes_of(values: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of all tensors and arrays in a nested structure, and in objects there.

    Of a sparse tensor with how many elements it has.
    """
    return tuple(_shape_of(leaf) for leaf in _data_in(values))


def _data_in(values: Any) -> Iterator[Any]:
    """Yields the tensors and arrays in a nested structure, and in attributes of objects there (a cache of keys and values).

    Of an object of which the parts are ever more, those nearest to it.
    """
    ahead, seen = deque(leaves_of(values)), set[int]()
    while ahead:
        leaf = ahead.popleft()
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, _WITHOUT_SIZE) or id(leaf) in seen:
            continue
        elif hasattr(type(leaf), "shape") and isinstance(leaf.shape, tuple):  # an array of another library
            yield leaf
        elif len(seen) < _OBJECTS_MAX:
            seen.add(id(leaf))
            ahead += leaves_of(list(_attributes(leaf)))


# Of whoever is given as an input, some are parts of the program and no data.
_PARTS = (torch.nn.Module, torch.optim.Optimizer, type, ModuleType)
_WITHOUT_SIZE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None), *_PARTS)
_OBJECTS_MAX = 256


def _shape_of(value: Any) -> tuple[int, ...]:
    if not isinstance(value, torch.Tensor):
        return tuple(size for size in value.shape if isinstance(size, int))
    if value.is_nested:
        return (value.size(0), value.numel())
    is_sparse = value.layout is not torch.strided and value.layout is not torch._mkldnn  # type: ignore[attr-defined]
    return (*value.shape, value._nnz()) if is_sparse else tuple(value.shape)


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
    """Returns the inputs on an accelerator; for the CPU as they are.

    A program that has put one of them there places its inputs itself: others are on the host for a reason (lengths of packed
    sequences), as in the plain run.
    """
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    if device.type == "cpu" or any(isinstance(leaf, torch.Tensor) and leaf.device == device for leaf in leaves):
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
