"""What lies on the device and is nobody's to move: it counts in every step, and people are told why it stays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tieroff.parts import parts_of
from tieroff.runtime.items.offloaded import untouched
from tieroff.runtime.managed.model import ManagedModel
from tieroff.runtime.movable import tensors_in


@dataclass(frozen=True, slots=True)
class Unmanaged:
    """A plain tensor on the device that the engine does not move.

    Attributes:
        name: for people.
        why: it stays.
        tensor: of a wrapper subclass, one of its parts.
    """

    name: str
    why: str
    tensor: torch.Tensor


def unmanaged(managed: ManagedModel) -> Iterator[Unmanaged]:
    """Yields the parameters, buffers and optimizer state that stay on the device whatever a plan says; none twice."""
    device_type, seen = managed.backend.device.type, set[int]()
    for name, why, tensor in _standing(managed):
        with untouched():
            parts = [*parts_of(tensor)]
        for path, part in parts:
            if part.device.type != device_type or part.layout is not torch.strided:
                continue
            storage = part.untyped_storage()
            if storage._cdata not in seen and storage.nbytes():
                seen.add(storage._cdata)
                yield Unmanaged(f"{path} of {name}" if path else name, why, part)


def _standing(managed: ManagedModel) -> Iterator[tuple[str, str, torch.Tensor]]:
    parameters = dict(managed.model.named_parameters())
    for name, why in managed.unmoved.items():
        if name in parameters:
            yield name, why, parameters[name]
    for name, buffer in managed.model.named_buffers():
        yield name, "a buffer", buffer
    if managed.stepper is not None:
        yield from managed.stepper.state.unmanaged()
    for optimizer in managed.unattached.optimizers():
        why, names = f"state of {type(optimizer).__name__}, which is not attached", managed.executor.homes.names
        for parameter, values in optimizer.state.items():
            if isinstance(values, dict):
                owner = names.get(id(parameter), "a parameter outside the model")
                yield from ((f"{key} of {owner}", why, part) for key, value in values.items() for part in tensors_in(value))
