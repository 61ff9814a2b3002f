"""A slot: what stands in for a method of the user's module."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch


class ForwardSlot:
    """Stands in for a module instance's `forward`, or for another of its methods that begins a step.

    A copy or a pickle of the module gets its class's own again.
    """

    def __init__(self, module: torch.nn.Module, around: Callable[..., Any], method: str = "forward") -> None:
        self._module = module
        self._method = method
        self._had_own = module.__dict__.get(method)
        self.inner = getattr(module, method)
        self._around = around
        self._is_removed = False
        self.engine: Any = None
        functools.update_wrapper(self, self.inner, updated=())
        for name, value in getattr(self.inner, "__dict__", {}).items():
            self.__dict__.setdefault(name, value)  # those of a slot inside this one must not take the place of its own
        self.__signature__ = inspect.signature(self.inner)
        module.__dict__[method] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_removed:  # somebody else's forward has it inside
            return self.inner(*args, **kwargs)
        return self._around(self.inner, args, kwargs)

    def remove(self) -> None:
        """Gives the module its own method back."""
        self._is_removed = True
        if self._module.__dict__.get(self._method) is not self:
            return
        if self._had_own is not None:
            self._module.__dict__[self._method] = self._had_own
        else:
            del self._module.__dict__[self._method]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner = memo.get(id(self._module), self._module)
        return types.MethodType(getattr(type(self._module), self._method), owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, self._method)
