"""Recurrent layers, which read their weights from a list of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tieroff.runtime.execution.autograd import current_graph_task, functorch_is_active
from tieroff.runtime.hooks.forward.slot import ForwardSlot
from tieroff.runtime.hooks.parameters.reads import ParameterReads
from tieroff.runtime.signal_safety import runs_user_code


class RecurrentWeights:
    """`nn.RNNBase` reads its weights from a list made at construction: the list holds fetched ones while its forward runs."""

    def __init__(self, module: torch.nn.RNNBase, reads: ParameterReads) -> None:
        self._module, self._reads = module, reads

    @runs_user_code
    def around(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self._module
        is_outside = not self._reads.depth and current_graph_task() == -1
        if not self._reads.is_open or is_outside or functorch_is_active():
            return inner(*args, **kwargs)
        held = module.__dict__["_flat_weights"]
        module.__dict__["_flat_weights"] = [
            getattr(module, name) if hasattr(module, name) else None for name in module._flat_weights_names
        ]
        try:
            return inner(*args, **kwargs)
        finally:
            module.__dict__["_flat_weights"] = held


class RecurrentLayers:
    """`RecurrentWeights` round every recurrent layer of a model, until this is removed."""

    def __init__(self, model: torch.nn.Module, reads: ParameterReads) -> None:
        self._model, self._reads = model, reads
        self._covered: dict[torch.nn.Module, ForwardSlot] = {}

    def cover(self) -> None:
        """Covers the layers that the model has now, and no others: one that was taken out of it is plain, and may die."""
        layers = {module for module in self._model.modules() if isinstance(module, torch.nn.RNNBase)}
        for gone in self._covered.keys() - layers:
            self._covered.pop(gone).remove()
        for layer in layers - self._covered.keys():
            self._covered[layer] = ForwardSlot(layer, RecurrentWeights(layer, self._reads).around)

    def remove(self) -> None:
        """Gives every layer its own forward back."""
        for slot in self._covered.values():
            slot.remove()
