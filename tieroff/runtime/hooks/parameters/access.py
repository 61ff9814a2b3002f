"""Access: a module's `_parameters`, which gives fetched values while a step runs."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch

from tieroff.errors import StateError
from tieroff.runtime.execution.autograd import current_graph_task
from tieroff.runtime.hooks.parameters.cast_nodes import home_of
from tieroff.runtime.hooks.parameters.reads import ParameterReads
from tieroff.uncompiled import left_to_python


class QuietDict(dict[str, Any]):
    """A module's `_parameters` while every access gives the home; a copy or a pickle of it is a plain dict."""

    __slots__ = ("reads",)
    reads: ParameterReads

    def __setitem__(self, name: str, value: Any) -> None:
        dict.__setitem__(self, name, home_of(value))

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: copy.deepcopy(value, memo) for name, value in self.items()}

    def __copy__(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


class FetchingDict(QuietDict):
    """A module's `_parameters` while an access may fetch."""

    __slots__ = ()

    @left_to_python
    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        reads = self.reads
        if id(value) in reads.quiet:
            if current_graph_task() != -1:
                reads.note_recomputation()
            return value
        if reads.updated and id(value) in reads.updated and current_graph_task() != -1:
            raise StateError(
                f"{name} is read in backward (by a checkpoint's recomputation, or a hook) after it was updated there: set "
                "[plan] update_in_backward = false for this model, and go on from a checkpoint"
            )
        return value if value is None or not reads.is_open else reads.value_for(value)


def install(model: torch.nn.Module, reads: ParameterReads) -> None:
    """Replaces every module's `_parameters`."""
    for module in model.modules():
        parameters = module._parameters
        if type(parameters) not in (dict, OrderedDict) and not isinstance(parameters, QuietDict):
            continue  # a scripted module: its parameters are not Python's
        if isinstance(parameters, QuietDict) and parameters.reads is reads:
            continue
        fetching = FetchingDict(parameters.items())
        fetching.reads = reads
        module.__dict__["_parameters"] = fetching


def uninstall(model: torch.nn.Module) -> None:
    """Gives every module a plain dict again."""
    for module in model.modules():
        parameters = module.__dict__.get("_parameters")  # a traced module has none
        if isinstance(parameters, QuietDict):
            module.__dict__["_parameters"] = dict(parameters.items())


def quieten(model: torch.nn.Module, *, is_quiet: bool) -> None:
    """Has accesses of a model's parameters give the homes at once, or fetch again; an access in Python takes 0.3 us."""
    kind = QuietDict if is_quiet else FetchingDict
    for module in model.modules():
        parameters = module.__dict__.get("_parameters")
        if isinstance(parameters, QuietDict):
            parameters.__class__ = kind
