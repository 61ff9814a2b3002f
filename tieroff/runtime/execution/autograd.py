"""Where in autograd the calling thread is."""

from __future__ import annotations

import torch

# The id of the running graph task, or -1 outside a backward.
current_graph_task = torch._C._current_graph_task_id


def training_phase() -> str:
    """Returns the phase of training that runs now, as ops of a trace name it."""
    return "forward" if current_graph_task() == -1 else "backward"


def functorch_is_active() -> bool:
    """True inside `torch.func` transforms, where nothing is hooked."""
    return torch._C._functorch.peek_interpreter_stack() is not None
