"""What is hung on the user's modules: the root's forward, recomputed forwards, recurrent layers, gradient hooks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tieroff.errors import StateError
from tieroff.runtime.hooks.parameters import Gate, current_graph_task, functorch_is_active
from tieroff.runtime.hooks.purity import attributes_of, has_hooks, random_state


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


class _Buffers:
    """The buffers of a module: running statistics, counters, codebooks.

    A second run has to find them as the first found them, and to leave them as it finds them. Batch normalization moves no
    version, and some are written now and then only: so all of them are copied each time.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def copies(self) -> dict[tuple[torch.nn.Module, str], torch.Tensor]:
        """Returns the values before a forward."""
        return {
            (owner, name): buffer.clone()
            for owner in self._module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        }

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
    """Has a module's activations recomputed in backward instead of kept: non-reentrant, random state preserved.

    The second run is a whole one, since code that ends in the middle leaves the module as it is there. Changes that would
    have it compute something else, or that it would make twice, are a StateError.
    """
    buffers = _Buffers(module)

    def around(inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or gate.depth == 0 or functorch_is_active() or has_hooks(module):
            return inner(*args, **kwargs)

        has_run = False
        found, before = attributes_of(module), buffers.copies()
        inputs = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]
        versions = [leaf._version for leaf in inputs]

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_run
            is_again, has_run = has_run, True
            if is_again and versions != [leaf._version for leaf in inputs]:
                raise _cannot_run_again(module, "an input was written in place since: write `x = x + ...`, not `x += ...`")
            if attributes_of(module) != found:
                raise _cannot_run_again(module, "an attribute of its modules, or a frozen parameter, has changed since")
            drawn = random_state()
            with contextlib.ExitStack() as stack:
                if is_again:
                    stack.enter_context(timed())
                    stack.enter_context(buffers.as_before(before))
                out = inner(*args, **kwargs)
            if attributes_of(module) != found:
                raise _cannot_run_again(module, "its forward changes an attribute of its modules, or a frozen parameter")
            if random_state() != drawn:
                raise _cannot_run_again(module, "its forward draws Python's or NumPy's random numbers")
            return out

        with set_checkpoint_early_stop(False):
            return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)

    return ForwardSlot(module, around)


def _cannot_run_again(module: torch.nn.Module, why: str) -> StateError:
    return StateError(
        f"expected a {type(module).__name__} that computes the same when it runs again in backward, but {why}; take it out of "
        "[plan] recompute_layers"
    )


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
