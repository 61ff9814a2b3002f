"""A step that begins before its forward: FSDP2 gathers what a root module holds itself before that module's forward."""

from __future__ import annotations

from typing import Any

import torch

from tieroff.runtime.custody.model import Custody
from tieroff.runtime.execution.autograd import functorch_is_active
from tieroff.runtime.executor import Executor
from tieroff.runtime.hooks.forward.inputs import makes_graph, signature_of, to_device
from tieroff.runtime.lifecycle.steps import Steps


class EarlyBegin:
    """Begins the steps of a model that is a root of FSDP2's, in front of FSDP2's own hook."""

    def __init__(self, custody: Custody, steps: Steps) -> None:
        """Hooks the model."""
        self._custody, self._steps = custody, steps
        self._handle = custody.model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        custody, executor = self._custody, self._custody.executor
        if custody.is_closed or executor.gate.depth or functorch_is_active():
            return
        if not makes_graph(module, args, kwargs):
            return
        walk = custody.walk()
        if walk.has_substitutes:
            return
        custody.check_alive()
        if custody.stepper is not None:
            custody.stepper.early.check_forward()
        args, kwargs = to_device(custody.backend.device, args, kwargs)
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
