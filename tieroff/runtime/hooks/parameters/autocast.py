"""Autocast: parameters that it casts while their home lies on the host."""

from __future__ import annotations

import torch

from tieroff.errors import StateError
from tieroff.runtime.items.homes import ParameterItem


class AutocastReads:
    """The host homes that were read under autocast since the running forward began.

    Autocast caches the cast of a leaf, so a plain run sums the gradients of all uses of one parameter in the cast's type.
    A minted parameter is cast per use, so its gradients would be rounded per use.
    """

    def __init__(self) -> None:
        self._read: set[int] = set()
        self._region: object = None
        self._marker: torch.Tensor | None = None

    def note(self, item: ParameterItem, home: torch.Tensor) -> None:
        """A home on the host is read under autocast.

        Raises:
            StateError: for the second time in one region.
        """
        if id(home) in self._read and torch.is_autocast_cache_enabled() and home.dtype is torch.float32:
            raise StateError(
                f"parameter {item.name} is read twice in one autocast region, and its home lies on the host: torch would sum "
                'its gradients in another order than without tieroff. Leave "parameters" and "gradients" out of [plan] cover, '
                "or give autocast cache_enabled=False"
            )
        self._read.add(id(home))

    def new_forward(self, device: torch.device) -> None:
        """Forgets which homes were read, unless the autocast region they were read in goes on."""
        region = self._region_on(device)
        if region is None or region is not self._region:
            self._read.clear()
        self._region = region

    def _region_on(self, device: torch.device) -> object:
        """Returns what is the same object for as long as one autocast region lasts; None outside of one on CUDA.

        Autocast caches the cast of a leaf for a region: the node of that cast tells regions apart. It is held, or another
        could get its address.
        """
        kind = device.type
        if kind == "cpu" or not torch.is_autocast_enabled(kind) or not torch.is_autocast_cache_enabled():
            return None
        if self._marker is None:
            self._marker = torch.zeros(1, 1, device=device, requires_grad=True)
        with torch.enable_grad():
            node = torch.mm(self._marker, self._marker).grad_fn
        return node.next_functions[0][0] if node is not None else None
