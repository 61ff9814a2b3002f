"""What moves in a step, and what each tier holds in the course of a planned one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tieroff.core.tensor import TensorClass, Tier
from tieroff.runtime.backend.stamp import Time, ns_of


@dataclass
class Counts:
    """What moved since the step began."""

    moved_bytes: dict[str, int] = field(default_factory=lambda: {"d2h": 0, "h2d": 0, "nvme_write": 0, "nvme_read": 0})
    by_class: dict[str, int] = field(default_factory=lambda: {kind.value: 0 for kind in TensorClass})
    stalls: list[tuple[Time, Time]] = field(default_factory=list)
    fallbacks: int = 0
    host_updates: int = 0
    faults: int = 0  # tensors that were used before their fetch had begun

    @property
    def stall_ns(self) -> int:
        """How long compute waited for copies, by the device's clock; waits for it."""
        return sum(max(ns_of(stop) - ns_of(start), 0) for start, stop in self.stalls)


class _Holding(Protocol):
    @property
    def taken_bytes(self) -> int: ...


class Held:
    """Bytes held per tier at the end of each op of one step.

    Attributes:
        has_changed: what lies below may be another amount than when it was noted last.
    """

    def __init__(self, stores: Mapping[Tier, _Holding]) -> None:
        self._stores = stores
        self._on_device: list[int] = []  # per op
        self._below: list[tuple[int, tuple[int, ...]]] = []  # (op, in each store), where it changed
        self.has_changed = True

    def note(self, device_bytes: int) -> None:
        """An op ends."""
        if self.has_changed:
            self.has_changed = False
            self._below.append((len(self._on_device), tuple([store.taken_bytes for store in self._stores.values()])))
        self._on_device.append(device_bytes)

    def by_tier(self) -> dict[Tier, list[int]]:
        """Returns the bytes per tier and op."""
        held: dict[Tier, list[int]] = {tier: [] for tier in Tier}
        held[Tier.DEVICE] = self._on_device
        stops = [*(op for op, _ in self._below[1:]), len(self._on_device)]
        for (op, taken), stop in zip(self._below, stops, strict=False):
            for tier, taken_bytes in zip(self._stores, taken, strict=True):
                held[tier] += [taken_bytes] * (stop - op)
        return held
