"""What an op is given and returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors among the arguments or results of an op; faster than pytree, which asks for every type it knows."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def is_view(func: Any) -> bool:
    """Returns whether an op computes nothing: it runs no kernel that could take scratch."""
    return bool(getattr(func, "is_view", False))
