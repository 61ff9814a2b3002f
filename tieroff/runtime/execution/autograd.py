"""Where in autograd the calling thread is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

# The id of the running graph task, or -1 outside a backward.
current_graph_task = torch._C._current_graph_task_id


def training_phase() -> str:
    """Returns the phase of training that runs now, as ops of a trace name it."""
    return "forward" if current_graph_task() == -1 else "backward"


def functorch_is_active() -> bool:
    """True inside `torch.func` transforms, where nothing is hooked."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def makes_fakes() -> bool:
    """True under a `FakeTensorMode`, where nothing is computed."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@contextlib.contextmanager
def as_the_engine() -> Iterator[None]:
    """Moves tensors in whatever mode the program is, and unseen by whoever records the step."""
    with contextlib.ExitStack() as stack:
        if functorch_is_active():
            stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_disable_current_modes())
        yield
