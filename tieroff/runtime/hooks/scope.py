"""A context in which tensors saved outside the wrapped model, by a loss for example, are moved like its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from tieroff.runtime.engine import Engine
from tieroff.runtime.step.program import Mode


@contextlib.contextmanager
def scope_of(engine: Engine) -> Iterator[None]:
    """Hooks saved tensors for as long as it is entered, while a step runs.

    Enter it after the model's forward has begun the step: around the loss, or around forward and loss together.
    """
    saved = engine.executor.saved_tensors

    def pack(tensor: torch.Tensor) -> object:
        return saved.pack(tensor) if engine.executor.mode in (Mode.DEMAND, Mode.PLANNED) else tensor

    def unpack(packed: object) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else saved.unpack(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
