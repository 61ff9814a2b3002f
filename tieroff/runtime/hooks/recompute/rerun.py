"""A rerun: a module's forward runs again in backward instead of keeping its activations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tieroff.errors import StateError
from tieroff.runtime.execution.autograd import functorch_is_active
from tieroff.runtime.hooks.forward.inputs import leaves_of
from tieroff.runtime.hooks.forward.slot import ForwardSlot
from tieroff.runtime.hooks.parameters.reads import ParameterReads
from tieroff.runtime.hooks.recompute.purity import attributes_of, has_hooks, random_state
from tieroff.runtime.signal_safety import runs_user_code


class _Buffers:
    """The buffers of a module: running statistics, counters, codebooks.

    A second run must start from the values that the first run started from, and must not change the values it finds. Batch
    normalization writes without changing a version, and some buffers are written only now and then. So all are copied.
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
        """Lets the module write copies of the earlier values instead of its buffers."""
        now = {(owner, name): owner._buffers[name] for owner, name in before}
        for (owner, name), value in before.items():
            owner._buffers[name] = value.clone()
        try:
            yield
        finally:
            for (owner, name), buffer in now.items():
                owner._buffers[name] = buffer


def recompute(module: torch.nn.Module, reads: ParameterReads, timed: Callable[[], Any]) -> ForwardSlot:
    """Makes a module recompute its activations in backward instead of keeping them: non-reentrant, random state preserved.

    The second run is a whole one, since code that ends in the middle leaves the module as it is there. Changes that would
    have it compute something else, or that it would make twice, are a StateError.
    """
    buffers = _Buffers(module)

    @runs_user_code
    def around(inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or reads.depth == 0 or functorch_is_active() or has_hooks(module):
            return inner(*args, **kwargs)

        has_run = False
        found, before = attributes_of(module), buffers.copies()
        inputs = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]
        versions = [leaf._version for leaf in inputs]

        @runs_user_code
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
