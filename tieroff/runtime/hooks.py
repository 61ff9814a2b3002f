"""What is hung on the user's modules: the root's forward, recomputed forwards, recurrent layers, gradient hooks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from tieroff.runtime.parameters import Gate, current_graph_task, functorch_is_active


class ForwardSlot:
    """Stands in for a module instance's `forward`, or for another of its methods that begins a step.

    A copy or a pickle of the module gets its class's own again.
    """

    def __init__(self, module: torch.nn.Module, around: Callable[..., Any], method: str = "forward") -> None:
        self._module = module
        self._method = method
        self._had_own = module.__dict__.get(method)
        self.inner = getattr(module, method)
        self._around = around
        self._is_removed = False
        self.engine: Any = None
        functools.update_wrapper(self, self.inner, updated=())
        for name, value in getattr(self.inner, "__dict__", {}).items():
            self.__dict__.setdefault(name, value)  # those of a slot inside this one must not take the place of its own
        self.__signature__ = inspect.signature(self.inner)
        module.__dict__[method] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_removed:  # somebody else's forward has it inside
            return self.inner(*args, **kwargs)
        return self._around(self.inner, args, kwargs)

    def remove(self) -> None:
        """Gives the module its own method back."""
        self._is_removed = True
        if self._module.__dict__.get(self._method) is not self:
            return
        if self._had_own is not None:
            self._module.__dict__[self._method] = self._had_own
        else:
            del self._module.__dict__[self._method]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner = memo.get(id(self._module), self._module)
        return types.MethodType(getattr(type(self._module), self._method), owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, self._method)


class _WrittenBuffers:
    """The buffers that a module's forward writes: running statistics, counters, codebooks.

    A recomputation has to find them as the forward found them, and to leave them as it finds them. Which ones are written
    is learned from the first forward, by value: batch normalization moves no version.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._written: set[tuple[torch.nn.Module, str]] | None = None

    def copies(self) -> dict[tuple[torch.nn.Module, str], torch.Tensor]:
        """Returns the values before a forward."""
        return {
            (owner, name): buffer.clone()
            for owner in self._module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None and (self._written is None or (owner, name) in self._written)
        }

    def learn(self, before: dict[tuple[torch.nn.Module, str], torch.Tensor]) -> None:
        """After the first forward: drops from its copies those that it did not write."""
        if self._written is not None:
            return
        for owner, name in list(before):
            now = owner._buffers[name]
            is_same = now is not None and now.shape == before[owner, name].shape and torch.equal(now, before[owner, name])
            if is_same and not isinstance(owner, _NormBase):
                del before[owner, name]
        self._written = set(before)

    @contextlib.contextmanager
    def as_before(self, before: dict[tuple[torch.nn.Module, str], torch.Tensor]) -> Iterator[None]:
        """Has the module write the copies meanwhile."""
        now = {(owner, name): owner._buffers[name] for owner, name in before}
        for (owner, name), value in before.items():
            owner._buffers[name] = value.clone()
        try:
            yield
        finally:
            for (owner, name), buffer in now.items():
                owner._buffers[name] = buffer


def recompute(module: torch.nn.Module, gate: Gate, timed: Callable[[], Any]) -> ForwardSlot:
    """Has a module's activations recomputed in backward instead of kept: non-reentrant, random state preserved."""
    buffers = _WrittenBuffers(module)

    def around(inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or gate.depth == 0 or functorch_is_active():
            return inner(*args, **kwargs)

        before: dict[tuple[torch.nn.Module, str], torch.Tensor] = {}

        def run(*args: Any, **kwargs: Any) -> Any:
            if gate.depth:
                before.update(buffers.copies())
                out = inner(*args, **kwargs)
                buffers.learn(before)
                return out
            with timed(), buffers.as_before(before):
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
        is_outside = not self._gate.depth and current_graph_task() == -1
        if not self._gate.is_open or is_outside or functorch_is_active():
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
    leaves = leaves_of((args, kwargs))
    described = tuple(
        (leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else type(leaf).__name__ for leaf in leaves
    )
    return (*described, model.training, torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))


def leaves_of(values: Any) -> list[Any]:
    """Returns the leaves of a nested structure, in order; of mappings that torch does not know (a tokenizer's batch) too."""
    found: list[Any] = []
    for leaf in torch.utils._pytree.tree_leaves(values):
        if isinstance(leaf, Mapping):
            found += leaves_of(dict(leaf))
        else:
            found.append(leaf)
    return found


def storages_of(values: Any) -> set[int]:
    """Returns the identities of the storages of all plain tensors in a nested structure."""
    return {
        leaf.untyped_storage()._cdata
        for leaf in leaves_of(values)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and type(leaf) in (torch.Tensor, torch.nn.Parameter)
    }


def shapes_of(values: Any) -> tuple[tuple[int, ...], ...] | None:
    """Returns the shapes of all tensors in a nested structure; None when it holds something whose size nobody can tell."""
    shapes = []
    for leaf in leaves_of(values):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_nested:
            shapes.append(tuple(leaf.shape))
        elif not isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device, type(None))):
            return None
    return tuple(shapes)
