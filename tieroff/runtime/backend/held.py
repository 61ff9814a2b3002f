"""What each tier holds in the course of a planned step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tieroff.core.tensor import Tier


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
