"""A slot: what stands in for a method of the user's module."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tieroff.errors import StateError
from tieroff.runtime.signal_safety import runs_user_code
from tieroff.uncompiled import refusal

# The two ways that are right, in the order of how small a budget they allow.
_refuse_to_be_compiled = refusal(
    StateError,
    "torch.compile was called on a model that tieroff.wrap has already: in compiled code no tensor could move. Compile its "
    "blocks, which allows a small budget: `for block in model.blocks: block.compile()`, then `tieroff.wrap(model, optimizer)`. "
    "Or compile the whole first: `model = tieroff.wrap(torch.compile(model), optimizer)`",
)


# What calls a module's `forward` in torch; the module is its `self`.
_CALLS = frozenset({"_call_impl", "inner", "_slow_forward"})


class ForwardSlot:
    """Stands in for a module instance's `forward`, or for another of its methods that begins a step.

    A deep copy or a pickle of the module gets its class's own again. A shallow copy has the slot itself, and the class's
    own runs on the copy: as a step where the copy has all that the module has, else beside the engine.

    Attributes:
        had_own: what the instance had in this place before, or None.
        inner: the method that it stands in for.
    """

    def __init__(self, module: torch.nn.Module, around: Callable[..., Any], method: str = "forward") -> None:
        self._module = module
        self._method = method
        self.had_own = module.__dict__.get(method)
        self.inner = getattr(module, method)
        self._around = around
        self._is_removed = False
        self.engine: Any = None
        functools.update_wrapper(self, self.inner, updated=())
        for name, value in getattr(self.inner, "__dict__", {}).items():
            self.__dict__.setdefault(name, value)  # those of a slot inside this one must not take the place of its own
        self.__signature__ = inspect.signature(self.inner)
        if hasattr(self.inner, "__code__"):
            self.__code__ = self.inner.__code__  # torch.export says by it what was exported
        module.__dict__[method] = self

    @runs_user_code
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # which looks into no frames
            if not self._is_removed:
                _refuse_to_be_compiled()
            return self.inner(*args, **kwargs)
        inner, called = self.inner, _called_module()
        if called is not None and called is not self._module and self._is_of_class():
            inner = types.MethodType(getattr(type(called), self._method), called)
            if not _has_all_of(called, self._module):
                return inner(*args, **kwargs)
        if self._is_removed:  # somebody else's forward has it inside
            return inner(*args, **kwargs)
        return self._around(inner, args, kwargs)

    def _is_of_class(self) -> bool:
        """Returns whether it stands in for the class's method, which a copy would run on itself, and for no slot."""
        return self.had_own is None

    @property
    def is_in_place(self) -> bool:
        """False when the module got another method since, past this one."""
        return any(slot is self for slot in _slots_of(self._module.__dict__.get(self._method)))

    def remove(self) -> None:
        """Gives the module its own method back."""
        self._is_removed = True
        if self._module.__dict__.get(self._method) is not self:
            return
        if self.had_own is not None:
            self._module.__dict__[self._method] = self.had_own
        else:
            del self._module.__dict__[self._method]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner = memo.get(id(self._module))
        if owner is None and self._is_of_class():  # of a shallow copy
            left = object.__new__(type(self))
            left.__dict__.update(self.__dict__, engine=None, _is_removed=True)
            return left
        return types.MethodType(getattr(type(self._module), self._method), owner or self._module)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, self._method)


def _called_module() -> object:
    """Returns the module of which torch calls the slot that asks; None where something else calls it."""
    frame = sys._getframe(2)
    if frame.f_code.co_name not in _CALLS or frame.f_globals is not vars(torch.nn.modules.module):
        return None
    return frame.f_locals.get("self")


def _has_all_of(copied: object, module: torch.nn.Module) -> bool:
    """Returns whether a shallow copy has the very dicts of the module's parameters, buffers and children."""
    return all(vars(copied).get(name) is vars(module)[name] for name in ("_parameters", "_buffers", "_modules"))


def behind_slots(method: object) -> object:
    """Returns the method that slots stand in for, or what is given if it is no slot."""
    return next((slot.inner for slot in reversed([*_slots_of(method)])), method)


def _slots_of(method: object) -> Iterator[ForwardSlot]:
    while isinstance(method, ForwardSlot):
        yield method
        method = method.inner
