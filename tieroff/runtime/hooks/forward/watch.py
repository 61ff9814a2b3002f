"""Watches: on a model, whether anybody changed it, asked in every step whose hooks are bypassed; on the inputs of a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tieroff.runtime.execution.state import StepState
from tieroff.runtime.hooks.forward.inputs import leaves_of
from tieroff.runtime.hooks.forward.walk import Walk
from tieroff.runtime.items.offloaded import untouched


class Watch:
    """Sees modules and parameters that were added, replaced or removed, frozen or converted, or given other memory.

    Args:
        walk: over the model as it is now.
        homes: those of its parameters whose memory counts.

    Attributes:
        trained: which of its parameters get a gradient, while it is the same.
        used: its parameters, as `Walk` has them.
    """

    def __init__(self, walk: Walk, homes: Iterable[torch.Tensor]) -> None:
        self._walk, self._homes = walk, list(homes)
        self._addresses = self._look()
        self.trained, self.used = walk.trained, walk.used

    @property
    def is_same(self) -> bool:
        """True when nobody changed anything since, and all of it is on the device still."""
        if not self._walk.is_same:
            return False
        try:
            return self._look() == self._addresses
        except RuntimeError:  # what lies below an accelerator has no address: an update's closure found it lowered
            return False

    def _look(self) -> list[int]:
        with untouched():
            return [*map(torch.Tensor.data_ptr, self._homes)]


class WatchedInputs:
    """Notes when a backward passes through to a step's inputs: of a frozen model nothing else shows it where nothing moves."""

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._handles: list[Any] = []

    def watch(self, inputs: Any) -> None:
        """Watches these instead of those of the step before."""
        for handle in self._handles:
            handle.remove()
        given = (leaf for leaf in leaves_of(inputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
        self._handles = [leaf.register_hook(self._note_backward) for leaf in given]

    def _note_backward(self, _gradient: torch.Tensor) -> None:
        self._state.saw_backward = True
