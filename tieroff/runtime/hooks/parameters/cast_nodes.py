"""Cast nodes: casts of a parameter through which gradients reach it. See [Note: computed in another type] in reads.py.

A cast carries the edge of one autograd node that belongs to the parameter and lives as long as its item, so gradients
of all uses are summed in the order of the plain run. One node per access would sum them in another order.
"""

from __future__ import annotations

from typing import Any

import torch

from tieroff.runtime.items.parameter import ParameterItem
from tieroff.runtime.items.table import HomeTable
from tieroff.runtime.tensors import outside_inference


class _Identity(torch.autograd.Function):
    """The one node of a home: takes gradients on the device, gives them to the home."""

    @staticmethod
    def forward(ctx: Any, home: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        ctx.home_dtype = home.dtype
        ctx.set_materialize_grads(False)
        # Only shape, type and device matter: the casts bring their own memory.
        return torch.empty((), dtype=like.dtype, device=like.device).expand(home.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        (grad,) = grads
        return grad.to(ctx.home_dtype) if grad is not None else None, None


class _Keep(torch.autograd.Function):
    """A node that only keeps one saved tensor, so that autograd rebuilds it with its edge on any memory."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        raise AssertionError("nothing flows through a node that only keeps a tensor")


class CastNode:
    """Makes tensors on any memory that all carry the one autograd edge of a home."""

    def __init__(self, home: torch.Tensor, like: torch.Tensor, item: ParameterItem | None) -> None:
        self.home = home
        self.item = item
        # A list of its own: were the hook to hold this object, the two would keep each other alive through autograd's
        # memory, where Python's collector does not look.
        self._value: list[torch.Tensor] = []
        value = self._value
        with torch.enable_grad(), outside_inference():
            source = _Identity.apply(home, like)  # type: ignore[no-untyped-call]
            # As late in the graph as can be: backward runs it as soon as its gradients are summed, as it would the home's.
            source.grad_fn._set_sequence_nr(2**64 - 1)
            with torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: value[0]):
                # With torch 2.11 its node frees what it saves as soon as this is gone, whoever holds the node.
                self._kept: torch.Tensor = _Keep.apply(source)  # type: ignore[no-untyped-call]

    def on(self, value: torch.Tensor) -> torch.Tensor:
        """Returns a tensor on the value's memory through which gradients reach the home."""
        self._value.append(value)
        try:
            cast: torch.Tensor = self._kept.grad_fn.saved_tensors[0]  # type: ignore[union-attr]
        finally:
            self._value.clear()
        cast.__dict__.update(self.home.__dict__)
        cast._is_param = True  # isinstance(w, nn.Parameter) holds, as for the home
        cast._tieroff_home = self.home  # type: ignore[attr-defined]
        return cast


class CastNodes:
    """The one node of each home that casts were made of."""

    def __init__(self, homes: HomeTable) -> None:
        self._homes = homes
        self._nodes: dict[int, CastNode] = {}

    def on(self, value: torch.Tensor, home: torch.Tensor, item: ParameterItem | None) -> torch.Tensor:
        """Returns a tensor on the value's memory through which gradients, if any are needed, reach the home."""
        if not (home.requires_grad and torch.is_grad_enabled()):
            return value
        node = self._nodes.get(id(home))
        if node is None or node.home is not home or node.item is not item:
            node = self._nodes[id(home)] = CastNode(home, value, item)
        return node.on(value)

    def sweep(self) -> None:
        """Drops the nodes of homes whose item is gone or another one: each would keep its home alive."""
        items = self._homes.parameters
        self._nodes = {k: node for k, node in self._nodes.items() if node.item is not None and items.get(k) is node.item}


def home_of(value: object) -> object:
    """Returns the home of a cast that somebody stores as a parameter, or the value itself."""
    return getattr(value, "_tieroff_home", value) if isinstance(value, torch.Tensor) else value
