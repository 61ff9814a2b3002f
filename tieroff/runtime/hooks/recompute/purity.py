"""Whether a module's forward can run again unnoticed: compares what it may read and change apart from its inputs.

Globals, closures and files cannot be seen; whoever names a layer in `[plan] recompute_layers` vouches for those.
"""

from __future__ import annotations

import collections
import random
import sys
import types
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from tieroff.runtime.items.offloaded import PLAIN

# Entries of a module's `__dict__` that are compared elsewhere (buffers are put back), or are not the layer's own.
_SKIPPED = frozenset({"_parameters", "_buffers", "_modules", "forward"})
_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
_GLOBAL_HOOKS = "_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks"
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout, slice)
_CODE = types.FunctionType, types.BuiltinFunctionType, types.MethodType
_DEPTH = 4  # of containers and objects inside each other
_LARGEST, _LONGEST = 1 << 20, 10_000  # bytes of arrays, entries of containers that are compared each time


def attributes_of(module: torch.nn.Module) -> tuple[Any, ...]:
    """Returns the attributes of a module and those inside it, and the versions of what is no trained parameter."""
    found: list[Any] = []
    for each in module.modules():
        found += [(id(each), name, _frozen(value, _DEPTH)) for name, value in each.__dict__.items() if name not in _SKIPPED]
        parameters = dict.values(each._parameters)  # the homes themselves: this is no use of them
        found += [(id(p), p._version) for p in parameters if p is not None and not p.requires_grad]
    return tuple(found)


def random_state() -> tuple[Any, ...]:
    """Returns the state of Python's and NumPy's global generators; torch's is put back for a second run."""
    numpy = sys.modules.get("numpy")
    drawn = _frozen(numpy.random.get_state(legacy=False), _DEPTH) if numpy is not None else None
    return random.getstate(), drawn


def has_hooks(layer: torch.nn.Module) -> bool:
    """True when hooks observe calls of its modules: they would observe a second run too."""
    if any(getattr(torch_module, kind, None) for kind in _GLOBAL_HOOKS):
        return True
    return any(getattr(module, kind, None) for module in layer.modules() for kind in _HOOKS)


def is_plain(value: Any) -> bool:
    """True for ordinary tensors and values that cannot change, and tuples of them."""
    if isinstance(value, tuple):
        return all(is_plain(each) for each in value)
    if isinstance(value, torch.Tensor):
        return type(value) in PLAIN and value.layout is torch.strided and not value.is_inference()
    return isinstance(value, _CONSTANTS)


def _frozen(value: Any, depth: int) -> Any:
    """Returns something that compares equal while a value is unchanged, as far as changes can be detected."""
    if isinstance(value, _CONSTANTS):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), -1 if value.is_inference() else value._version
    if isinstance(value, (type, torch.nn.Module, *_CODE)) or depth == 0:
        return id(value)
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    if isinstance(value, random.Random):
        return value.getstate()
    if hasattr(value, "bit_generator"):  # NumPy's
        return _frozen(value.bit_generator.state, depth - 1)
    if hasattr(value, "tobytes"):  # an array
        return value.tobytes() if value.nbytes <= _LARGEST else id(value)
    if isinstance(value, (dict, list, tuple, set, frozenset, collections.deque)) and len(value) > _LONGEST:
        return id(value), len(value)
    if isinstance(value, dict):
        return tuple((id(key), _frozen(each, depth - 1)) for key, each in value.items())
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return tuple(_frozen(each, depth - 1) for each in value)
    return id(value), _frozen(getattr(value, "__dict__", {}), depth - 1)
