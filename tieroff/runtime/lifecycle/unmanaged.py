"""What lies on the device and is nobody's to move: it counts in every step, and people are told why it stays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tieroff.parts import parts_of
from tieroff.runtime.custody.model import Custody
from tieroff.runtime.items.hollow import untouched
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


def unmanaged(custody: Custody) -> Iterator[Unmanaged]:
    """Yields the parameters, buffers and optimizer state that stay on the device whatever a plan says; none twice."""
    device_type, seen = custody.backend.device.type, set[int]()
    for name, why, tensor in _standing(custody):
        with untouched():
            parts = [*parts_of(tensor)]
        for path, part in parts:
            if part.device.type != device_type or part.layout is not torch.strided:
                continue
            storage = part.untyped_storage()
            if storage._cdata not in seen and storage.nbytes():
                seen.add(storage._cdata)
                yield Unmanaged(f"{path} of {name}" if path else name, why, part)


def _standing(custody: Custody) -> Iterator[tuple[str, str, torch.Tensor]]:
    parameters = dict(custody.model.named_parameters())
    for name, why in custody.unmoved.items():
        if name in parameters:
            yield name, why, parameters[name]
    for name, buffer in custody.model.named_buffers():
        yield name, "a buffer", buffer
    if custody.stepper is not None:
        yield from custody.stepper.state.unmanaged()
    for optimizer in custody.unattached.optimizers():
        why, names = f"state of {type(optimizer).__name__}, which is not attached", custody.executor.homes.names
        for parameter, values in optimizer.state.items():
            if isinstance(values, dict):
                owner = names.get(id(parameter), "a parameter outside the model")
                yield from ((f"{key} of {owner}", why, part) for key, value in values.items() for part in tensors_in(value))
