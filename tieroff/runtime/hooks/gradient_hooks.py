"""The hooks on parameters that say when a gradient arrives."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tieroff.runtime.execution.autograd import edges_of
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.hooks.gradients import Gradients
from tieroff.runtime.step.mode import IDLE


class GradientFollower(Protocol):
    """Updates parameters in backward, as their gradients arrive."""

    def before_gradient(self) -> None:
        """Another gradient arrives: hooks of users on the one before have run."""

    def gradient_arrived(self, parameter: torch.Tensor) -> None:
        """A parameter's gradient is there, of this backward and of those before it in the step."""


@dataclass(frozen=True, slots=True)
class _Hooked:
    """The handles of one parameter's hooks; what they hang on is held: a parameter holds its node only weakly."""

    arrived: Any
    before: Any
    node: object
    parameter: torch.Tensor


class GradientHooks:
    """The hooks on one model's parameters.

    [Note: hooks that hold nobody] A parameter's memory has owners that the garbage collector cannot see. A hook that refers to
    the engine would keep it, and with it the model, for as long as the process lives: so hooks refer to this weakly.

    Attributes:
        follower: acts on gradients as they arrive, or None.
    """

    def __init__(self, context: StepContext, gradients: Gradients) -> None:
        self._context, self._gradients = context, gradients
        self._hooked: dict[int, _Hooked] = {}
        self._bypassed: dict[int, torch.Tensor] = {}
        self._is_open = True
        self.follower: GradientFollower | None = None

    def add(self, parameters: Iterable[torch.Tensor]) -> set[int]:
        """Hooks parameters that can get a gradient, each once; returns the ids of those that had no hooks."""
        new = {id(p): p for p in parameters if id(p) not in self._hooked and p.requires_grad and p.is_leaf and _has_node(p)}
        for parameter, edge in zip(new.values(), edges_of([*new.values()]), strict=True):
            self._add(parameter, edge.node)
        return set(new)

    def _add(self, parameter: torch.Tensor, node: Any) -> None:
        weak = weakref.ref(self)  # [Note: hooks that hold nobody]

        def about_to_accumulate(grads: Any) -> None:
            hooks = weak()
            if hooks is not None:
                hooks._about_to_accumulate(parameter)

        def has_arrived(home: torch.Tensor) -> None:
            hooks = weak()
            if hooks is not None:
                hooks._arrived(home)

        arrived = parameter.register_post_accumulate_grad_hook(has_arrived)
        self._hooked[id(parameter)] = _Hooked(arrived, node.register_prehook(about_to_accumulate), node, parameter)

    def hang_on(self, parameter: torch.Tensor) -> None:
        """Hooks a parameter anew that has other memory: with that comes another node that accumulates its gradients."""
        self.remove([id(parameter)])
        self.add([parameter])

    def hang_elsewhere(self, parameters: Iterable[torch.Tensor]) -> set[int]:
        """Returns the ids of those whose hooks do not hang on the node that accumulates their gradients, if they have one."""
        asked = [p for p in parameters if id(p) in self._hooked and p.requires_grad and not p.is_inference()]
        return {id(p) for p, edge in zip(asked, edges_of(asked), strict=True) if edge.node is not self._hooked[id(p)].node}

    def _about_to_accumulate(self, parameter: torch.Tensor) -> None:
        if id(parameter) in self._gradients.quiet:
            return
        item = self._context.homes.parameter(parameter)
        if item is not None and self._is_open:
            self._context.state.inside += 1  # not in a `finally`: see `StepState.inside`
            self._gradients.about_to_accumulate(item)
            self._context.state.inside -= 1

    def _arrived(self, home: torch.Tensor) -> None:
        gradients = self._gradients
        if id(home) in gradients.quiet:  # none, once all is given back
            gradients.arrived_quietly(home)
            return
        if not self._is_open:
            return
        self._context.state.inside += 1
        lock, follower = self._context.state.lock, self.follower
        if follower is not None:
            with lock:
                follower.before_gradient()  # before the tick of this gradient
        item = self._context.homes.parameter(home)
        if item is not None:
            gradients.arrived(item)
        else:
            gradients.stays(home)
        if follower is not None and self._context.state.mode is not IDLE:
            with lock:
                follower.gradient_arrived(home)
        self._context.state.inside -= 1

    def bypass(self, last: torch.Tensor | None) -> None:
        """Takes the hooks off all parameters but one, the last that gets its gradient: it says that there was a backward."""
        self._bypassed = {key: hooked.parameter for key, hooked in self._hooked.items() if hooked.parameter is not last}
        self.remove(self._bypassed)

    def come_back(self) -> None:
        """Hooks what had no hooks for a while."""
        self.add(self._bypassed.values())
        self._bypassed = {}

    def remove(self, ids: Collection[int]) -> None:
        """Takes the hooks off parameters that have some."""
        for key in ids:
            hooked = self._hooked.get(key)
            if hooked is not None:
                hooked.arrived.remove()
                hooked.before.remove()
                del self._hooked[key]  # last: an exception may come between any two lines

    def keep_only(self, ids: Collection[int]) -> None:
        """Takes the hooks off all other parameters."""
        self.remove([key for key in self._hooked if key not in ids])

    def close(self) -> None:
        """Takes all hooks off; those that run just now do nothing more."""
        self._is_open, self._bypassed = False, {}
        self.keep_only(())


def _has_node(parameter: torch.Tensor) -> bool:
    """Returns whether there is a node that accumulates a leaf's gradients.

    One on the meta device gets another with its value. A sparse one never moves, and has no view through which to find its
    node. Memory of inference mode has none.
    """
    return not parameter.is_meta and parameter.layout is torch.strided and not parameter.is_inference()
