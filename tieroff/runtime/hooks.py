"""What is hung on the user's modules: the root's forward, recomputed forwards, recurrent layers, gradient hooks."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tieroff.runtime.parameters import Gate, functorch_is_active


class ForwardSlot:
    """Stands in for a module instance's `forward`. A copy or a pickle of the module gets its class's own again."""

    def __init__(self, module: torch.nn.Module, around: Callable[..., Any]) -> None:
        self._module = module
        self._had_own = module.__dict__.get("forward")
        self.inner = module.forward
        self._around = around
        self.engine: Any = None
        functools.update_wrapper(self, self.inner)
        self.__signature__ = inspect.signature(self.inner)
        module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self.inner, args, kwargs)

    def remove(self) -> None:
        """Gives the module its own forward back."""
        if self._module.__dict__.get("forward") is not self:
            return
        if self._had_own is not None:
            self._module.__dict__["forward"] = self._had_own
        else:
            del self._module.__dict__["forward"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner = memo.get(id(self._module), self._module)
        return types.MethodType(type(self._module).forward, owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")


def recompute(module: torch.nn.Module, gate: Gate, timed: Callable[[], Any]) -> ForwardSlot:
    """Has a module's activations recomputed in backward instead of kept: non-reentrant, random state preserved."""

    def around(inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or gate.depth == 0 or functorch_is_active():
            return inner(*args, **kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            if gate.depth:
                return inner(*args, **kwargs)
            with timed():
                return inner(*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)

    return ForwardSlot(module, around)


class RecurrentWeights:
    """`nn.RNNBase` reads its weights from a list made at construction: the list holds fetched ones while it runs."""

    def __init__(self, module: torch.nn.RNNBase, gate: Gate) -> None:
        self._slot = ForwardSlot(module, self._around)
        self._module, self._gate = module, gate

    def _around(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self._module
        if not self._gate.is_open or not self._gate.depth or functorch_is_active():
            return inner(*args, **kwargs)
        held = module.__dict__["_flat_weights"]
        module.__dict__["_flat_weights"] = [
            getattr(module, name) if hasattr(module, name) else None for name in module._flat_weights_names
        ]
        try:
            return inner(*args, **kwargs)
        finally:
            module.__dict__["_flat_weights"] = held

    def remove(self) -> None:
        """Gives the module its own forward back."""
        self._slot.remove()


def signature_of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Returns what tells one kind of step from another: shapes and types of the inputs, modes of model and autocast."""
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    described = tuple(
        (leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else type(leaf).__name__ for leaf in leaves
    )
    return (*described, model.training, torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))


def storages_of(values: Any) -> set[int]:
    """Returns the identities of the storages of all plain tensors in a nested structure."""
    return {
        leaf.untyped_storage()._cdata
        for leaf in torch.utils._pytree.tree_leaves(values)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and type(leaf) in (torch.Tensor, torch.nn.Parameter)
    }
