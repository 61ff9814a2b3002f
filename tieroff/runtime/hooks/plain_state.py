"""Pickles and copies of modules that are plain: what the engine hung on a wrapped module is not in them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from tieroff.runtime.hooks.forward.slot import ForwardSlot
from tieroff.runtime.hooks.parameters.access import FetchingDict

_METHOD = "__reduce_ex__"
_HOOKS = ("_state_dict_pre_hooks", "_state_dict_hooks")


class PlainState:
    """Stands in for a module instance's `__reduce_ex__`, as its class has it, with the engine's own taken out of the state.

    A file of `torch.save(model)` then names nothing of this library, so that `torch.load` with `weights_only` needs the same
    classes on its list as for the plain model. A shallow copy of the module shares this one, and pickles as the original.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def __call__(self, protocol: Any) -> Any:
        reduced = type(self._module).__reduce_ex__(self._module, protocol)
        if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
            return reduced  # the class has a way of its own, without an attribute dict
        return (*reduced[:2], _plain(reduced[2]), *reduced[3:])


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    plain = {}
    for name, value in state.items():
        if isinstance(value, FetchingDict):
            plain[name] = dict(value.items())
        elif isinstance(value, ForwardSlot):
            if value.had_own is not None:
                plain[name] = value.had_own
        elif name in _HOOKS:
            plain[name] = type(value)((key, hook) for key, hook in value.items() if not _is_own(hook))
        elif name != _METHOD:
            plain[name] = value
    return plain


def _is_own(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("tieroff.")


class PlainStates:
    """The `PlainState` of every module of a model, until it is removed."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._covered: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def cover(self) -> None:
        """Covers the modules that the model has now, and no others; one that has a way of its own on the instance keeps it.

        A `PlainState` and its module hold each other: one that the program took out of the model would die late.
        """
        modules = list(self._model.modules())
        _uncover(self._covered.difference(modules))
        for module in modules:
            module.__dict__.setdefault(_METHOD, PlainState(module))
        self._covered = weakref.WeakSet(modules)

    def remove(self) -> None:
        """Gives every module its class's own way again."""
        _uncover(self._model.modules())


def _uncover(modules: Iterable[torch.nn.Module]) -> None:
    for module in modules:
        if isinstance(module.__dict__.get(_METHOD), PlainState):
            del module.__dict__[_METHOD]
