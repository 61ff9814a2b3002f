"""Packed tensors: what autograd is given in the place of a tensor that it saves."""

from __future__ import annotations

import torch

from tieroff.errors import StateError
from tieroff.runtime.hooks.parameters.live import Stays
from tieroff.runtime.items.activation import ActivationItem
from tieroff.runtime.items.parameter import ParameterItem
from tieroff.runtime.tensors import probe_of


class _Versioned:
    """A tensor's geometry and version, without its memory.

    `probe` shares the version counter of the tensor that was saved and nothing else, so a write after the bytes have
    left is still seen: autograd itself does not check tensors that went through hooks.
    """

    __slots__ = ("dtype", "offset", "probe", "size", "stride", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()
        self.probe = probe_of(tensor)
        self.version = self.probe._version

    def check(self) -> None:
        """Raises RuntimeError, as autograd does, when the tensor was written since it was saved."""
        if self.probe._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.dtype} {list(self.size)}] is at version {self.probe._version}; "
                f"expected version {self.version} instead. Clone the tensor before the in-place operation."
            )


class Packed(_Versioned):
    """A saved view of an activation."""

    __slots__ = ("__weakref__", "item")

    def __init__(self, tensor: torch.Tensor, item: ActivationItem) -> None:
        super().__init__(tensor)
        self.item = item


class PackedParameter(_Versioned):
    """A saved view of a fetched parameter: the parameter is fetched again instead."""

    __slots__ = ("home_version", "item", "times_assigned")

    def __init__(self, tensor: torch.Tensor, item: ParameterItem | Stays) -> None:
        super().__init__(tensor)
        self.item = item
        home = item.tensor
        self.home_version = home._version if home is not None else 0
        self.times_assigned = item.times_assigned if isinstance(item, ParameterItem) else 0

    def check(self) -> None:
        """Raises RuntimeError when the parameter was written since it was saved, as autograd does."""
        super().check()
        home, item = self.item.tensor, self.item
        if isinstance(item, ParameterItem) and (item.times_assigned != self.times_assigned or item.was_assigned()):
            raise StateError(
                f"parameter {item.name} was given other memory (`.data = ...`) between the forward that used it and backward, "
                "which needs its old value; assign it before the forward or after backward"
            )
        if home is not None and home._version != self.home_version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"parameter {self.item.name} is at version {home._version}; expected version {self.home_version} instead."
            )


class Kept:
    """A saved tensor that stays where it is."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = -1 if tensor.is_inference() else tensor._version

    def get(self) -> torch.Tensor:
        if self.version >= 0 and self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.dtype} {list(self.tensor.size())}] is at version {self.tensor._version}; "
                f"expected version {self.version} instead. Clone the tensor before the in-place operation."
            )
        return self.tensor


class LeftAlone(Kept):
    """A saved view of an activation that the plan leaves on the device; see [Note: left alone] in step/executable.py.

    Attributes:
        ordinal: of the activation.
        packed: what stands for it once the engine has taken it over; then `tensor` has no memory.
    """

    __slots__ = ("__weakref__", "ordinal", "packed")

    def __init__(self, tensor: torch.Tensor, ordinal: int) -> None:
        super().__init__(tensor)
        self.ordinal = ordinal
        self.packed: Packed | None = None

    def become(self, item: ActivationItem) -> Packed:
        """The engine has this for an item from here on; the version that was saved stays the one that is expected."""
        packed = Packed(self.tensor, item)
        packed.version = self.version
        self.packed = packed
        self.tensor = packed.probe
        return packed
