"""A step that begins before its forward: FSDP2 gathers what a root module holds itself before that module's forward."""

from __future__ import annotations

from typing import Any

import torch

from tieroff.runtime.execution.autograd import functorch_is_active
from tieroff.runtime.executor import Executor
from tieroff.runtime.hooks.forward.inputs import makes_graph, signature_of, to_device
from tieroff.runtime.lifecycle.steps import Steps
from tieroff.runtime.managed.model import ManagedModel


class EarlyBegin:
    """Begins the steps of a model that is a root of FSDP2's, in front of FSDP2's own hook."""

    def __init__(self, managed: ManagedModel, steps: Steps) -> None:
        """Hooks the model."""
        self._managed, self._steps = managed, steps
        self._handle = managed.model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        managed, executor = self._managed, self._managed.executor
        if managed.is_closed or executor.reads.depth or functorch_is_active():
            return
        if not makes_graph(module, args, kwargs):
            return
        walk = managed.walk()
        if walk.has_substitutes:
            return
        managed.check_alive()
        if managed.stepper is not None:
            managed.stepper.early.check_forward()
        args, kwargs = to_device(managed.backend.device, args, kwargs)
        self._steps.begin_forward(signature_of(module, args, kwargs, walk.trained), args, kwargs, walk)
        executor.shards.is_beginning = True
        executor.state.inside += 1  # until the forward: an exception between the two leaves it

    def remove(self) -> None:
        """Takes the hook off."""
        self._handle.remove()


def has_begun(executor: Executor) -> bool:
    """Returns whether the step of the forward that comes now has begun already; the next one has not."""
    if not executor.shards.is_beginning:
        return False
    executor.shards.is_beginning = False
    executor.state.inside -= 1
    return True
