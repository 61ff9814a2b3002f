"""Live values: which device memory is a parameter's."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tieroff.runtime.items.parameter import ParameterItem

is_expired = torch.UntypedStorage._expired  # as `StorageWeakRef.expired`, without two calls in Python for each


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

    The address alone is reused, so a weak reference to the storage decides.

    Attributes:
        found: by storage; also some that died.
    """

    def __init__(self) -> None:
        self.found: dict[int, tuple[StorageWeakRef, ParameterItem | UnmovedParameter]] = {}

    def add(self, item: ParameterItem | UnmovedParameter, value: torch.Tensor) -> None:
        """Remembers that `value` is a device value of the item."""
        key = value.untyped_storage()._cdata
        known = self.found.get(key)
        if known is None or known[1] is not item or is_expired(known[0].cdata):
            self.found[key] = (StorageWeakRef(value.untyped_storage()), item)

    def on(self, storage: torch.UntypedStorage) -> ParameterItem | UnmovedParameter | None:
        """Returns the item whose value lies on a storage, or None."""
        found = self.found.get(storage._cdata)
        if found is None or is_expired(found[0].cdata):
            return None
        return found[1]

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
        self.found = {key: entry for key, entry in self.found.items() if not is_expired(entry[0].cdata)}
