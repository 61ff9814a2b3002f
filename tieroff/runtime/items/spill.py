"""Spill: which lower tier takes an item that no plan gives a tier."""

from __future__ import annotations

import errno
import logging
from collections.abc import Hashable

from tieroff.core.tensor import Tier
from tieroff.errors import StoreError
from tieroff.runtime.items.item import Item
from tieroff.storage.store import Store

log = logging.getLogger("tieroff")


class Spill:
    """The lower tiers, in the order in which they are filled while nothing is planned.

    Attributes:
        stores: tier -> its store.
        fills_in_order: nothing is planned, so a tier that is full is nothing to warn of.
    """

    def __init__(self, stores: dict[Tier, Store], order: tuple[Tier, ...]) -> None:
        self.stores = stores
        self.fills_in_order = True
        self._order = order
        self._demoted: set[Hashable] = set()

    def tier_for(self, size_bytes: int) -> Tier:
        """Returns the first lower tier with room; the last one when none has."""
        return next((tier for tier in self._order if self._has_room(tier, size_bytes)), self._order[-1])

    def has_room(self, size_bytes: int) -> bool:
        """Returns whether a lower tier has room."""
        return any(self._has_room(tier, size_bytes) for tier in self._order)

    def demote(self, item: Item, error: StoreError) -> bool:
        """Gives an item another tier after its copy out failed; its source is intact.

        Returns:
            True when the copy may be tried again.
        """
        for tier in self._order:
            if tier is not item.tier and self._has_room(tier, item.size_bytes):
                is_usual = error.errno == errno.ENOSPC and self.fills_in_order
                level = logging.DEBUG if is_usual or item.key in self._demoted else logging.WARNING
                self._demoted.add(item.key)
                # Its text: the error itself holds frames, and with them tensors, for as long as a handler keeps the record.
                log.log(level, "%s: %s goes to %s instead", str(error), item.name, tier.value)
                item.tier = tier
                return True
        return False

    def _has_room(self, tier: Tier, size_bytes: int) -> bool:
        store = self.stores[tier]
        return store.capacity_bytes - store.used_bytes >= size_bytes
