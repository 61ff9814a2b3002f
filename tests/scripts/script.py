"""What a training program is given in the place of `tieroff`, and what it leaves to be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import tieroff

Model = TypeVar("Model", bound=nn.Module)


class Script:
    """One run of a program: plain, or with every model that it wraps on a budget.

    Attributes:
        folder: where the program may write.
        losses: what it logged, exact.
        phases: per wrapped model, what its last step was.
    """

    def __init__(self, budget: str, folder: Path, machine: str = "") -> None:
        self.folder = folder
        self.losses: list[str] = []
        self._budget = budget
        # With a machine at hand it is a test, in which a step has its plan however busy the machine is.
        self._plan: dict[str, Any] = {"min_bytes": "1KiB", **({"machine": machine, "background": False} if machine else {})}
        self._kept: dict[str, Any] = {}
        self._wrapped: list[nn.Module] = []

    def wrap(self, model: Model, optimizer: torch.optim.Optimizer | None = None) -> Model:
        """The one line that a program adds."""
        if self._budget:
            config = {
                "device": "cpu",
                "budget": {"device": self._budget, "nvme": "64MiB"},
                "nvme": {"dirs": [str(self.folder)]},
            }
            tieroff.wrap(model, optimizer, {**config, "plan": self._plan})
            self._wrapped.append(model)
        return model

    def log(self, loss: Tensor | float) -> None:
        """Notes a loss or another figure."""
        self.losses.append(float(loss.detach() if isinstance(loss, Tensor) else loss).hex())

    def keep(self, **objects: Any) -> None:
        """Compares these at the end: modules, optimizers, tensors, and files that `torch.load` reads."""
        self._kept.update(objects)

    @property
    def phases(self) -> list[str]:
        return [tieroff.engine(model).stats().phase for model in self._wrapped]

    def digests(self) -> dict[str, str]:
        """Returns a digest of everything that was kept."""
        return {name: _digest(kept) for name, kept in self._kept.items()}


def _digest(kept: Any) -> str:
    if isinstance(kept, Path):
        kept = torch.load(kept, weights_only=True)
    elif isinstance(kept, (nn.Module, torch.optim.Optimizer)):
        kept = kept.state_dict()
    digest = hashlib.sha256()
    for part in _parts(kept):
        digest.update(part)
    return digest.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield repr(key).encode()
            yield from _parts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _parts(inner)
    else:
        yield repr(value).encode()
