"""Functions that torch.compile leaves alone, as `torch.compiler.disable` makes them.

[Note: dynamo only where it is] `torch.compiler.disable` imports dynamo, and so does what PyTorch puts round each
`__torch_dispatch__` at the first op: some 80 MiB and a second, for good. Most programs have dynamo anyway, since optimizers
of `torch.optim` import it; one that changes its parameters by hand has not. What is not imported compiles nothing, so until
then the function runs as it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo import eval_frame

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Returns the function, at which compiled code breaks its graph; dynamo is not imported for it."""
    if not hasattr(eval_frame, "set_code_exec_strategy"):  # another torch
        return torch._compile._disable_dynamo(function)
    disabled: Callable[P, R] | None = None

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None:
            disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
            if disable is None:  # not there, or only begun
                return function(*args, **kwargs)
            disabled = disable(function)
        return disabled(*args, **kwargs)

    # From C++ inside a compiled region, as a dispatch mode is called, it would be compiled by itself.
    action = eval_frame._FrameAction
    eval_frame.set_code_exec_strategy(call.__code__, eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT))
    functools.update_wrapper(call, function)
    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # what `torch.compiler.disable` sets
    return call


def left_to_python(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a function that is called too often for `uncompiled`: it runs as it is, with all that it calls, at no price.

    What compiled code calls is otherwise compiled with it, also the engine's own.
    """
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # what `torch.compiler.disable` sets
    return function


def refusal(error: type[Exception], message: str) -> Callable[[], None]:
    """Returns what code calls that torch.compile must not get: it raises the error when the compiled code runs.

    Not while torch compiles, where an exception means that the code is left uncompiled. With fullgraph=True torch shows the
    message.
    """

    def refuse() -> None:
        raise error(message)

    marked: Any = refuse
    marked._torchdynamo_disable = True  # what `torch.compiler.disable` sets
    marked._torchdynamo_disable_msg = message
    return refuse
