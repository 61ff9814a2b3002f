"""A watch on a model: whether anybody changed it, asked in every step whose hooks are bypassed."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tieroff.runtime.hooks.forward.walk import Walk
from tieroff.runtime.items.offloaded import untouched


class Watch:
    """Sees modules and parameters that were added, replaced or removed, frozen or converted, or given other memory.

    Args:
        walk: over the model as it is now.
        homes: those of its parameters whose memory counts.

    Attributes:
        trained: which of its parameters get a gradient, while it is the same.
        used: its parameters, as `Walk` has them.
    """

    def __init__(self, walk: Walk, homes: Iterable[torch.Tensor]) -> None:
        self._walk, self._homes = walk, list(homes)
        self._addresses = self._look()
        self.trained, self.used = walk.trained, walk.used

    @property
    def is_same(self) -> bool:
        """True when nobody changed anything since, and all of it is on the device still."""
        if not self._walk.is_same:
            return False
        try:
            return self._look() == self._addresses
        except RuntimeError:  # what lies below an accelerator has no address: an update's closure found it lowered
            return False

    def _look(self) -> list[int]:
        with untouched():
            return [*map(torch.Tensor.data_ptr, self._homes)]
