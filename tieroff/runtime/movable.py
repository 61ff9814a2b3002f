"""Which tensors can move, and where a tensor holds its bytes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tieroff.errors import StateError

# Subclasses of Parameter that hold their bytes themselves, and what describes these in plain objects: (package, classes).
# Nothing else of these packages is named anywhere. What any other class does with its memory nobody knows, so it stays.
_KNOWN_KINDS = (("bitsandbytes", frozenset({"Params4bit", "Int8Params"})),)
_DEPTH = 3  # of objects in objects: a quantization state has another one inside for its own scales


def refuse_lazy(model: torch.nn.Module, remedy: str) -> None:
    """Returns when all parameters have sizes.

    Raises:
        StateError: a module has lazy parameters. `remedy` says what to run, and when.
    """
    for module in model.modules():
        if any(p is not None and torch.nn.parameter.is_lazy(p) for p in module._parameters.values()):
            raise StateError(f"{type(module).__name__} has lazy parameters, whose sizes nobody knows yet; run {remedy}")


def refuse_copies(model: torch.nn.Module) -> None:
    """Returns when no module copies others to several devices in each forward.

    Raises:
        StateError: one does.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.DataParallel) and len(module.device_ids) > 1:
            raise StateError(
                f"torch.nn.DataParallel copies the model to {len(module.device_ids)} devices in each forward, which no budget "
                "covers: start one process per device with `tieroff launch` or torchrun, and DistributedDataParallel or FSDP2"
            )


def why_unmovable(tensor: torch.Tensor) -> str:
    """Returns why this tensor cannot have a home below, or "" when it can."""
    reason = _why_unmovable_alone(tensor)
    if reason:
        return reason
    storage = tensor.untyped_storage()
    if tensor.storage_offset() != 0 or storage.nbytes() != tensor.numel() * tensor.element_size():
        return "a view of a larger storage"
    # Two references are this function's own: the tensor's and the Python storage object's.
    if torch._C._storage_Use_Count(storage._cdata) > 2:
        return "its memory is shared with another tensor"
    if not tensor.is_contiguous() and not is_dense(tensor):
        return "its elements overlap or leave gaps"
    return ""


def _why_unmovable_alone(tensor: torch.Tensor) -> str:
    """The same, by what a tensor is, whatever else lies in its memory."""
    kind = type(tensor)
    is_plain = kind in (torch.Tensor, torch.nn.Parameter) or package_of(kind)
    if tensor.is_nested or tensor.layout is not torch.strided or not is_plain:
        return f"of a class that nobody knows here, {kind.__name__}" if tensor.layout is torch.strided else "no strided tensor"
    if tensor.is_quantized or tensor.is_inference() or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        return "a quantized, inference or lazily transformed tensor"
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return "it has no bytes"
    if tensor.is_cpu and tensor.is_shared():
        return "it lies in memory shared between processes"
    return ""


def movable_together(parts: Sequence[torch.Tensor]) -> list[torch.Tensor] | str:
    """Returns those of some tensors that can have one home below, or why not even the first can.

    Some may lie in the same storage: these go together, or not at all.
    """
    if not parts:
        return "it has no bytes"
    owners: dict[int, int] = {}
    reasons: dict[int, str] = {}
    whole = {part.untyped_storage()._cdata for part in parts if is_whole(part)}
    for part in parts:
        reason = _why_unmovable_alone(part)
        if not reason and part.device != parts[0].device:
            reason = "its parts lie on several devices"
        if not reason and not is_dense(part) and part.untyped_storage()._cdata not in whole:
            reason = "its elements overlap or leave gaps"
        reasons[id(part)] = reason
        if part.layout is torch.strided:
            storage = part.untyped_storage()._cdata
            owners[storage] = owners.get(storage, 0) + (not reason)
    for part in parts:
        # One more is the Python storage object's.
        storage = 0 if reasons[id(part)] else part.untyped_storage()._cdata
        if storage and torch._C._storage_Use_Count(storage) - 1 > owners[storage]:
            reasons[id(part)] = "its memory is shared with another tensor"
    return reasons[id(parts[0])] or [part for part in parts if not reasons[id(part)]]


def is_wrapper(value: object) -> bool:
    """True for a tensor whose bytes are those of other tensors, as its class says; a `DTensor` has a part in this process."""
    if not isinstance(value, torch.Tensor) or type(value) in (torch.Tensor, torch.nn.Parameter):
        return False
    return is_traceable_wrapper_subclass(value) and local_of(value) is value


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the plain tensors that hold a tensor's bytes: of a wrapper subclass those inside, of any other one itself."""
    if not is_wrapper(tensor):
        return [local_of(tensor)]
    outer: Any = tensor
    inner = (getattr(outer, name) for name in outer.__tensor_flatten__()[0])
    return [part for one in inner if isinstance(one, torch.Tensor) for part in plain_parts(one)]


def with_parts(tensor: torch.Tensor, parts: Iterator[torch.Tensor]) -> torch.Tensor:
    """Returns what a tensor is with other parts, which come in the order of `plain_parts`."""
    if not is_wrapper(tensor):
        return with_local(tensor, next(parts))
    outer: Any = tensor
    names, context = outer.__tensor_flatten__()
    inner = {name: with_parts(getattr(outer, name), parts) for name in names}
    made: torch.Tensor = outer.__tensor_unflatten__(inner, context, outer.shape, outer.stride())
    return made


def package_of(kind: type) -> str:
    """Returns the package of a class of parameters that is known to hold its own bytes, or ""."""
    for package, names in _KNOWN_KINDS:
        if kind.__qualname__ in names and f"{kind.__module__}.".startswith(f"{package}."):
            return package
    return ""


def parts_of(parameter: torch.Tensor, model: torch.nn.Module) -> list[torch.Tensor]:
    """Returns the tensors that may move together as a parameter of a model, first that which stands for it.

    Of a wrapper subclass, its parts; of a quantized parameter, itself, and what objects of it or of its modules hold; of any
    other one, the tensor that holds its bytes.
    """
    package = package_of(type(parameter))
    if not package:
        return plain_parts(parameter)
    found = {id(parameter): parameter}
    owners = [module for module in model.modules() if any(p is parameter for p in module._parameters.values())]
    for value in vars(parameter).values():
        _collect(value, found, _DEPTH)
    for value in (value for owner in owners for value in vars(owner).values()):
        if f"{type(value).__module__}.".startswith(f"{package}.") and not isinstance(value, torch.nn.Module):
            _collect(value, found, _DEPTH)
    together = movable_together(list(found.values()))
    return together if isinstance(together, list) else [parameter]


def is_alone(tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    """True where a tensor's only part is itself, or this rank's of a `DTensor`."""
    return len(parts) == 1 and parts[0] is local_of(tensor)


def why_kept(value: object, parts: Sequence[torch.Tensor]) -> str:
    """Returns why a tensor, or an object, of these parts cannot have a home below, or "" when it can."""
    if isinstance(value, torch.Tensor) and is_alone(value, parts):
        return why_unmovable(parts[0])
    together = movable_together(parts)
    if isinstance(together, str):
        return together
    return "" if len(together) == len(parts) else "a part of it cannot move"


def tensors_in(value: object) -> list[torch.Tensor]:
    """Returns the plain tensors that hold the bytes of an entry of optimizer state: a tensor, or an object with some inside."""
    if isinstance(value, torch.Tensor):
        return plain_parts(value)
    found: dict[int, torch.Tensor] = {}
    _collect(value, found, _DEPTH)
    return list(found.values())


def _collect(value: object, found: dict[int, torch.Tensor], depth: int) -> None:
    """Adds the plain tensors that an object of somebody's class holds; modules are no such objects.

    Of a view that is all that is left of a result, such as a matrix's first singular vectors, the whole result stays in memory:
    it comes before that view.
    """
    if isinstance(value, torch.Tensor):
        for part in plain_parts(value) if value.numel() else ():
            base = part._base if not is_wrapper(value) else None
            if base is not None and is_whole(base):
                found.setdefault(id(base), base)
            found.setdefault(id(part), part)
    elif depth and isinstance(value, (list, tuple)):
        for one in value:
            _collect(one, found, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)):
        for one in vars(value).values():
            _collect(one, found, depth - 1)


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


def is_whole(tensor: torch.Tensor) -> bool:
    """True for a strided tensor whose elements fill its storage exactly once."""
    if tensor.layout is not torch.strided or tensor.storage_offset() != 0 or not is_dense(tensor):
        return False
    return bool(tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size())


def is_dense(tensor: torch.Tensor) -> bool:
    """True when the elements fill their storage exactly once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.size(), tensor.stride(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
