"""What the config says to the runtime."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tieroff.core.tensor import TensorClass, Tier
from tieroff.device_budget import DeviceBudget


@dataclass(frozen=True)
class Settings:
    """What the config says to the runtime.

    Attributes:
        covers: tensor classes that may move.
        min_bytes: smaller tensors stay.
        spill: lower tiers in the order in which they are filled while nothing is planned.
        allocator_threshold_bytes: see `Backend.tune_allocator`; None leaves the allocator alone.
        compute_dtype: what parameters and inputs are cast to for computing; None leaves them as they are.
        recompute_layers: names or patterns of the modules that may run again in backward.
        device_budget: what was asked for, or None.
        update_in_backward: backward passes per update, of which the last updates buckets as soon as their gradients are
            final; 0: none does.
        updates_on_host: a plan may have the CPU update parameters in host memory, where that is proven to be the same.
        exact: of such updates no bit may differ.
    """

    covers: frozenset[TensorClass]
    min_bytes: int
    spill: tuple[Tier, ...]
    allocator_threshold_bytes: int | None = None
    keep_timeline: bool = True
    chosen: dict[str, str] = field(default_factory=dict)
    config_toml: str = ""
    compute_dtype: torch.dtype | None = None
    recompute_layers: tuple[str, ...] = ()
    update_in_backward: int = 0
    device_budget: DeviceBudget | None = None
    updates_on_host: bool = False
    exact: bool = True
