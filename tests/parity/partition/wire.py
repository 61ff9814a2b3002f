"""What this process sends in collectives, counted call by call."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_SHARES = {"all_gather": 1.0, "reduce_scatter": 0.5, "all_reduce": 1.0, "allreduce": 1.0, "alltoall": 0.5}
"""In groups of two: what a device sends over the bytes that it gives to the collective."""


class Wire(TorchDispatchMode):
    """Counts the bytes that this process sends while it is entered.

    Attributes:
        sent_bytes: so far.
        unknown: collectives that are not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent_bytes = 0.0
        self.unknown: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it has the collectives that it makes come here by themselves
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if "c10d" in name and "wait" not in name and "wrap" not in name:
            shares = [share for part, share in _SHARES.items() if part in name]
            given = args[1] if "alltoall" in name else args[0]
            tensor = given[0] if isinstance(given, list) else given
            if len(shares) == 1 and isinstance(tensor, torch.Tensor):
                self.sent_bytes += shares[0] * tensor.numel() * tensor.element_size()
            else:
                self.unknown.append(name)
        return out
