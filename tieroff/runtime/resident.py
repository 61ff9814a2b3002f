"""Resident memory of the process, which on the CPU backend is what a budget in bytes is about."""

from __future__ import annotations

import psutil
import torch

from tieroff.core.tensor import Tier
from tieroff.runtime.engine import Engine


class Resident:
    """Memory of the process that holds no tensor, on the CPU backend: library code and scratch, heap, thread stacks."""

    def __init__(self, model: torch.nn.Module) -> None:
        plain = (torch.Tensor, torch.nn.Parameter)  # not lazy ones, nor those of another library's class
        every = (*model.parameters(), *model.buffers())
        held = (t for t in every if type(t) in plain and t.layout is torch.strided and not t.is_meta)
        tensors = {t.data_ptr(): t for t in held}
        self._baseline_bytes = _resident_bytes() - sum(t.numel() * t.element_size() for t in tensors.values())

    def overhead_bytes(self, engine: Engine) -> int:
        """Returns the growth of resident memory since wrap that no tensor of the engine accounts for, >= 0."""
        host = engine.stores.get(Tier.HOST)
        held = engine.device_bytes + (host.reserved_bytes if host is not None else 0)
        return max(_resident_bytes() - self._baseline_bytes - held, 0)


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
