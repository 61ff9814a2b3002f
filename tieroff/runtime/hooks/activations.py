"""Saved tensors: what autograd keeps from forward for backward, packed, moved and brought back."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tieroff.core.tensor import TensorClass, Tier
from tieroff.runtime.hooks.parameters import LiveValues, Stays
from tieroff.runtime.items.homes import ParameterItem
from tieroff.runtime.items.item import Item, Traffic
from tieroff.runtime.items.place import BlockPlace, Place
from tieroff.runtime.tensors import bytes_of, probe_of, view_of

if TYPE_CHECKING:
    from tieroff.runtime.execution.executor import Executor


class ActivationItem(Item):
    """One storage that autograd saved; it may be packed several times, as different views.

    Attributes:
        ordinal: how many other storages were packed before it in this step.
        packs: Packed objects that are alive.
    """

    __slots__ = ("ordinal", "packs")

    def __init__(self, ordinal: int, size_bytes: int, tier: Tier, index: int = -1) -> None:
        super().__init__(
            ("activation", ordinal), f"activation {ordinal}", TensorClass.ACTIVATION, size_bytes, tier, index
        )
        self.ordinal = ordinal
        self.packs = 0

    def make_place(self, traffic: Traffic) -> Place:
        return BlockPlace(traffic.stores[self.tier], self.size_bytes)


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

    __slots__ = ("home_version", "item")

    def __init__(self, tensor: torch.Tensor, item: ParameterItem | Stays) -> None:
        super().__init__(tensor)
        self.item = item
        home = item.tensor
        self.home_version = home._version if home is not None else 0

    def check(self) -> None:
        """Raises RuntimeError when the parameter was written since it was saved, as autograd does."""
        super().check()
        home = self.item.tensor
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


class SavedTensors:
    """The pack and unpack hooks of one engine.

    Attributes:
        fixed: storages that are never moved (the step's inputs, module buffers, homes on the device).
        min_bytes: smaller storages stay.
    """

    def __init__(self, executor: Executor, live: LiveValues, min_bytes: int) -> None:
        self._executor = executor
        self._live = live
        self._known: dict[int, tuple[StorageWeakRef, ActivationItem, torch.Tensor]] = {}
        self._dead: deque[ActivationItem] = deque()
        self.fixed: set[int] = set()
        self.min_bytes = min_bytes
        self.is_covered = True

    def pack(self, tensor: torch.Tensor) -> Any:
        """The pack hook: does not modify its input."""
        if not _is_plain(tensor):
            return Kept(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        parameter = self._live.get(tensor)
        if parameter is not None:
            if isinstance(parameter, ParameterItem):
                self._executor.on_demand.saved(parameter)
            return PackedParameter(tensor, parameter)
        base = tensor._base if tensor._is_view() else tensor
        if base is not None and base.is_leaf and base.requires_grad:
            return Kept(tensor.detach())  # a parameter that is no home of ours: whoever owns it may free it
        if not self.is_covered or key in self.fixed or storage.nbytes() < max(self.min_bytes, 1):
            return Kept(tensor.detach())
        known = self._known.get(key)
        if known is not None and not known[0].expired() and known[1].packs and _is_same_version(known[2], tensor):
            item = known[1]
        else:
            item = self._executor.saved(bytes_of(tensor))
            self._known[key] = (StorageWeakRef(storage), item, probe_of(tensor))
        packed = Packed(tensor, item)
        item.packs += 1
        weakref.finalize(packed, self._dead.append, item).atexit = False
        self._executor.on_demand.saved(item)
        self._executor.packed(item, is_complete=tensor.requires_grad)
        return packed

    def pack_casts(self, tensor: torch.Tensor) -> Any:
        """The pack hook of a step in which nothing moves: casts of parameters are made again, all else stays."""
        if not _is_plain(tensor):
            return Kept(tensor)
        parameter = self._live.get(tensor)
        return PackedParameter(tensor, parameter) if parameter is not None else Kept(tensor.detach())

    def unpack(self, packed: Any) -> torch.Tensor:
        """The unpack hook: the same data each time it is asked."""
        if isinstance(packed, Kept):
            return packed.get()
        packed.check()
        if isinstance(packed, PackedParameter):
            item = packed.item
            device = bytes_of(item.cast()) if isinstance(item, Stays) else self._executor.fetch_saved(item)
        else:
            device = self._executor.unpacked(packed.item)
        return view_of(device, packed.dtype, packed.size, packed.stride, packed.offset)

    def drain(self, end: Callable[[ActivationItem], None]) -> None:
        """Ends the items that nothing can ask for any more. Packed objects may die in any thread."""
        while self._dead:
            item = self._dead.popleft()
            item.packs -= 1
            if item.packs == 0:
                end(item)

    def forget(self) -> None:
        """Drops what is remembered of storages that died."""
        self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}


def _is_same_version(known: torch.Tensor, tensor: torch.Tensor) -> bool:
    """True when nothing was written between the two, which share a storage.

    Equal numbers do not say so: parts of one storage may count their versions apart (`unsafe_chunk`, in every GRU), and
    one of them may have been written, as often as the other, after the other had been saved.
    """
    version = tensor._version
    if known._version != version:
        return False
    set_version = torch._C._autograd._unsafe_set_version_counter
    set_version((tensor,), (version + 1,))
    try:
        return known._version != version
    finally:
        set_version((tensor,), (version,))


def _is_plain(tensor: torch.Tensor) -> bool:
    """True for tensors whose bytes alone, with size and stride, say everything."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and not tensor.is_nested
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_inference() or tensor.is_conj() or tensor.is_neg())
        and not tensor._is_zerotensor()  # a tangent of forward mode that has no memory
        and tensor.device.type != "meta"
        and torch._C._functorch.peek_interpreter_stack() is None
    )
