"""Whether a signal handler runs in the middle of the engine's own code.

[Note: handlers]
Python runs a signal handler between any two instructions of its main thread, so also between two lines of the engine, where
an item's state and its bytes need not agree. What a handler does with the model there must not enter the engine again. It
ends before the engine goes on, and meanwhile nothing moves in this thread: so parameters are read where they lie, no event is
noted and no op is recorded. A `state_dict()` holds copies, since the engine may be about to free what it was asked about
before. The stack tells: on the way outwards the first frame of the engine is one of those that call user code, or it was
interrupted. The traceback of an exception tells the same of where that was raised. It needs no state, which an exception in the
handler could leave wrong. An optimizer's own step counts as the engine's code: what it is about to write is lifted, and a model
that it evaluates is read where it lies, too.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from tieroff.recomputation import hooks_here, take_off_hooks

# Whose functions are overridden in this thread: all, none of subclasses, or none.
function_state: Any = torch._C._get_torch_function_state  # type: ignore[attr-defined]
set_function_state: Any = torch._C._set_torch_function_state  # type: ignore[attr-defined]
_ENGINE = str(Path(__file__).parent) + os.sep
_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Files(dict[str, bool]):
    """Whether a file is the engine's, by its path: that is asked for every frame."""

    def __missing__(self, path: str) -> bool:
        self[path] = is_own = path.startswith(_ENGINE)
        return is_own


_is_own = _Files()
_calls_out: set[CodeType] = set()  # filled as the modules are imported, and only read afterwards


def runs_user_code(function: _Function) -> _Function:
    """Marks a function of the engine that runs user code, a forward or a hook say: what it calls interrupts nothing."""
    _calls_out.add(function.__code__)
    return function


def leaves_modes_alone(function: _Function) -> _Function:
    """Has a function that runs user code and is left by an exception leave the thread's modes as it found them.

    These are whether gradients are made, whether functions are overridden, the hooks on saved tensors, and dispatch modes of
    the program's. Ctrl-C may come between the body of a `with` and its exit, which Python then leaves out.
    """

    @runs_user_code
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        makes_gradients, overriding, pair = torch.is_grad_enabled(), function_state(), hooks_here()
        modes = _modes_of_program()
        try:
            return function(*args, **kwargs)
        except BaseException:
            torch.set_grad_enabled(makes_gradients)
            set_function_state(overriding)
            take_off_hooks(pair)
            if _modes_of_program() != modes:
                _put_on_again(modes)
            raise

    return cast(_Function, call)


def _modes_of_program() -> list[TorchDispatchMode]:
    """Returns the dispatch modes in force that are not a recorder's."""
    if not torch._C._len_torch_dispatch_stack():
        return []
    return [mode for mode in _python_dispatch._get_current_dispatch_mode_stack() if not _is_own_mode(mode)]


def _put_on_again(modes: list[TorchDispatchMode]) -> None:
    """Puts these in force in the place of the program's, which the engine has taken off."""
    recorders = [mode for mode in _python_dispatch._get_current_dispatch_mode_stack() if _is_own_mode(mode)]
    while torch._C._len_torch_dispatch_stack():
        _python_dispatch._pop_mode()
    for mode in (*recorders, *modes):
        _python_dispatch._push_mode(mode)


def _is_own_mode(mode: TorchDispatchMode) -> bool:
    return type(mode).__module__.startswith("tieroff.")


def is_interrupting() -> bool:
    """True when code outside of the engine, which called the engine, was itself entered from between two of its lines."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_own[frame.f_code.co_filename]:
        frame = frame.f_back
    while frame is not None:  # of torch and of the user's modules, many for each parameter that is read
        if _is_own[frame.f_code.co_filename]:
            return frame.f_code not in _calls_out
        frame = frame.f_back
    return False


def came_from_engine(error: BaseException) -> bool:
    """True for an exception that came between two lines of the engine, as by Ctrl-C, and not from user code that it called."""
    innermost: CodeType | None = None
    place = error.__traceback__
    while place is not None:
        code = place.tb_frame.f_code
        innermost = code if _is_own[code.co_filename] else innermost
        place = place.tb_next
    return innermost is not None and innermost not in _calls_out
