"""Layers of the model: which ops of a recorded step ran in which, and those that run again in backward.

[Note: layers that may run again]
Running a layer again must compute the same and leave no trace, and not all that code does can be seen. So people name the
layers that may (`[plan] recompute_layers`). Of those, one is left alone if its forward, in the recorded step, took or returned
anything but tensors and plain values, drew Python's or NumPy's random numbers, or changed an attribute of its modules; if
somebody wrote to its inputs up to the step's end (`x += layer(x)` does); or if hooks hang on its modules. What is seen of that
in a later step, round a first or a second run, is an error. Buffers may change, and torch's random numbers may be drawn: both
are put back for a second run (see `recompute` in tieroff/runtime/hooks/recompute/rerun.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tieroff.core.trace import Trace
from tieroff.errors import StateError
from tieroff.runtime.execution.autograd import current_graph_task
from tieroff.runtime.hooks.forward.inputs import leaves_of
from tieroff.runtime.hooks.recompute.purity import attributes_of, has_hooks, is_plain, random_state
from tieroff.runtime.tensors import probe_of


class ModuleSpans:
    """Notes for the time of one recorded step between which events the forward of each layer ran."""

    def __init__(self, layers: Collection[tuple[str, torch.nn.Module]], event_count: Callable[[], int]) -> None:
        self._event_count = event_count
        self._open: dict[str, tuple[int, Any]] = {}
        self._spans: list[tuple[str, int, int]] = []
        self._impure: set[str] = set()
        self._inputs: dict[str, list[tuple[torch.Tensor, int]]] = {}
        self._handles: list[Any] = []
        for path, module in [(path, module) for path, module in layers if not has_hooks(module)]:
            self._handles.append(module.register_forward_pre_hook(partial(self._begin, path), with_kwargs=True))
            self._handles.append(module.register_forward_hook(partial(self._end, path)))

    def remove(self) -> None:
        """Takes the hooks off the layers."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _begin(self, path: str, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if current_graph_task() != -1:
            return  # somebody's own recomputation
        if path in self._open or not all(is_plain(value) for value in (*args, *kwargs.values())):
            self._impure.add(path)
            return
        self._open[path] = self._event_count(), (attributes_of(module), random_state())
        given = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        with _disable_current_modes():  # a look from outside
            probes = [probe_of(leaf) for leaf in given]
        self._inputs.setdefault(path, []).extend((probe, probe._version) for probe in probes)

    def _end(self, path: str, module: torch.nn.Module, args: tuple[Any, ...], out: Any) -> None:
        begun = self._open.pop(path, None)
        if current_graph_task() != -1 or begun is None:
            return
        first, state = begun
        if not is_plain(out) or (attributes_of(module), random_state()) != state:
            self._impure.add(path)
        self._spans.append((path, first, self._event_count()))

    def name(self, trace: Trace) -> Trace:
        """Returns the trace with the paths of layers in the ops that ran in them."""
        ops = list(trace.ops)
        for path, first, stop in self._spans:
            is_written = any(probe._version != version for probe, version in self._inputs.get(path, ()))
            if path not in self._impure and path not in self._open and not is_written:
                ops[first:stop] = [replace(op, module=path) for op in ops[first:stop]]
        return replace(trace, ops=tuple(ops))


def layers_of(model: torch.nn.Module, patterns: Collection[str]) -> list[tuple[str, torch.nn.Module]]:
    """Returns paths and modules that the patterns name, in the model's order; of those inside each other the outermost.

    Raises:
        StateError: a pattern names none.
    """
    named = [(path, module) for path, module in model.named_modules() if path]
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path, _ in named):
            few = ", ".join(path for path, _ in named[:8]) or "none, since this model has none inside"
            raise StateError(
                f"[plan] recompute_layers: expected names or patterns of modules such as {few}, got {pattern!r}; "
                'write a pattern such as "layers.*", or leave the key out'
            )
    found: list[tuple[str, torch.nn.Module]] = []
    inside: set[torch.nn.Module] = set()
    for path, module in named:
        if module not in inside and any(fnmatchcase(path, pattern) for pattern in patterns):
            inside.update(module.modules())
            found.append((path, module))
    return found


def mark_recomputed(trace: Trace, keys: Sequence[Hashable]) -> Trace:
    """Returns the trace with the phase "recompute", and the module, in ops between the events that begin and end one."""
    ops, path = list(trace.ops), ""
    for index, key in enumerate(keys):
        if isinstance(key, tuple) and key[0] in ("again", "resumed"):
            path = key[1] if key[0] == "again" else ""
        if path:
            ops[index] = replace(ops[index], phase="recompute", module=path)
    return replace(trace, ops=tuple(ops))
