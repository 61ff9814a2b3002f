"""Live values: which device memory is a parameter's."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from tieroff.runtime.items.parameter import ParameterItem


class UnmovedParameter:
    """Stands for the item of a parameter that stays on the device; only its casts come and go."""

    __slots__ = ("dtype", "name", "tensor")

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        self.tensor: torch.Tensor = tensor
        self.dtype = dtype
        self.name = f"a parameter of shape {list(tensor.shape)} that stays on the device"

    def cast(self) -> torch.Tensor:
        """Returns its value in the type that is computed with."""
        return self.tensor.detach().to(self.dtype)


class LiveValues:
    """Finds the parameter item whose device value lies on a given storage.

    The address alone is reused, so a weak reference to the storage decides: one of Python's own, since the end of torch's runs
    code in Python, where an interrupt is lost. A storage has one object for as long as it lives.

    Attributes:
        found: by storage; also some that died.
    """

    def __init__(self) -> None:
        self.found: dict[int, tuple[weakref.ref[torch.UntypedStorage], ParameterItem | UnmovedParameter]] = {}

    def add(self, item: ParameterItem | UnmovedParameter, value: torch.Tensor) -> None:
        """Remembers that `value` is a device value of the item."""
        storage = value.untyped_storage()
        known = self.found.get(storage._cdata)
        if known is None or known[1] is not item or known[0]() is not storage:
            self.found[storage._cdata] = (weakref.ref(storage), item)

    def on(self, storage: torch.UntypedStorage) -> ParameterItem | UnmovedParameter | None:
        """Returns the item whose value lies on a storage, or None."""
        found = self.found.get(storage._cdata)
        return found[1] if found is not None and found[0]() is storage else None

    def follow(self, item: ParameterItem) -> None:
        """A parameter was given other memory: what it lay on may be another one's by now."""
        self.found = {key: entry for key, entry in self.found.items() if entry[1] is not item}
        if item.value is not None:
            self.add(item, item.value)

    def keep_only(self, items: Iterable[ParameterItem]) -> None:
        """Forgets the memory of parameters whose items are gone: another one, without an item, may lie there now."""
        known = {id(item) for item in items}
        self.found = {
            k: entry for k, entry in self.found.items() if isinstance(entry[1], UnmovedParameter) or id(entry[1]) in known
        }

    def sweep(self) -> None:
        """Forgets values that died."""
        self.found = {key: entry for key, entry in self.found.items() if entry[0]() is not None}
