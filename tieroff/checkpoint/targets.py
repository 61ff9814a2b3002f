"""What of a model a checkpoint holds: parameters and persistent buffers, each once, with all its names."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from tieroff.errors import CheckpointError, StateError


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A parameter or a buffer.

    Attributes:
        names: under which the state dict has it, several when it is tied.
        owners: (module, attribute) of a buffer.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    owners: tuple[tuple[torch.nn.Module, str], ...]

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]


def check_arguments(call: str, model: object, path: object) -> None:
    """Checks what `load_weights` and `save_weights` are given.

    Raises:
        StateError: it is no module, or no path.
    """
    if not isinstance(model, torch.nn.Module) or not isinstance(path, (str, os.PathLike)):
        kinds = f"{type(model).__name__} and {type(path).__name__}"
        raise StateError(f"{call}: expected a torch.nn.Module and a path, got {kinds}; it is tieroff.{call}(model, path)")


def targets_of(model: torch.nn.Module) -> list[Target]:
    """Returns what a model's state dict holds, in its order.

    Raises:
        CheckpointError: it holds something else than plain tensors.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        _check_plain(name, value)
        tensors[id(value)] = value
        names.setdefault(id(value), []).append(name)
    owners: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, buffer in module._buffers.items():
            if buffer is not None:
                owners.setdefault(id(buffer), []).append((module, attribute))
    return [Target(tuple(names[key]), tensor, tuple(owners.get(key, ()))) for key, tensor in tensors.items()]


def _check_plain(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise CheckpointError(
            f"{name} in the model's state dict is a {type(value).__name__} (extra state of a module), which safetensors files "
            "cannot hold; use torch.save(model.state_dict())"
        )
    kind = type(value.detach())
    if kind is not torch.Tensor or value.layout is not torch.strided or value.is_quantized or value.is_nested:
        raise CheckpointError(
            f"{name} in the model's state dict is a {kind.__name__} ({value.layout}), not a plain tensor; save sharded ones "
            "with torch.distributed.checkpoint, others with torch.save"
        )
