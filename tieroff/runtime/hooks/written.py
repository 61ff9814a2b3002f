"""Activations that are written behind autograd's back after it saved them: they are kept.

[Note: writes behind autograd's back]
A write through `.data` or NumPy moves no version, so a plain run's backward computes with what was written, and so must ours.
While a step is recorded every op is seen. One that is about to write elements that were saved, through a tensor that counts its
versions apart, or that reads a saved tensor and finds another checksum than when it was saved, shows such a write: the saved
tensor stays on the device from then on, in this step and in all of its kind. It keeps its place in the trace and in the plan,
so nothing is traced again for it. Steps that were never recorded, or that left their plan, keep every activation of a model
that does this.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
import zlib
from typing import Any, Protocol

import torch

from tieroff.runtime.items.activation import ActivationItem
from tieroff.runtime.tensors import count_together, view_of

log = logging.getLogger("tieroff")

# Of larger tensors a checksum takes parts, of this many bytes in all.
_SUMMED_BYTES_MAX = 4 << 20
_PART_BYTES = 4096


class View(Protocol):
    """What is known of a saved tensor."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any
    probe: torch.Tensor
    version: int
    takes_writes: bool


class _Saved:
    """One storage of which views were saved in the step that is recorded."""

    def __init__(self, storage: torch.UntypedStorage, item: ActivationItem) -> None:
        self.ref, self.item = weakref.ref(storage), item
        self.views: list[tuple[weakref.ref[Any], int | None]] = []  # with their checksums


class WrittenActivations:
    """Finds them in recorded steps, and knows them in others."""

    def __init__(self) -> None:
        self._kept: dict[int, int] = {}  # by ordinal: bytes of the largest
        self._saved: dict[int, _Saved] = {}  # by storage

    def begin(self) -> None:
        """A step begins."""
        self._saved.clear()

    def is_kept(self, item: ActivationItem, *, is_ordered: bool) -> bool:
        """True for an activation that is known to be written so.

        Args:
            item: was just saved for the first time.
            is_ordered: ordinals of this step are those of a recorded one, whose inputs may have been larger.
        """
        return bool(self._kept) and (not is_ordered or item.size_bytes <= self._kept.get(item.ordinal, -1))

    def note(self, tensor: torch.Tensor, item: ActivationItem, view: View, *, is_complete: bool) -> None:
        """A tensor was saved, as a view, in a step that is recorded; `is_complete`: its op does not write it any more."""
        storage = tensor.untyped_storage()
        known = self._saved.get(storage._cdata)
        if known is None or known.item is not item:
            known = self._saved[storage._cdata] = _Saved(storage, item)
        known.views.append((weakref.ref(view), _checksum(storage, view, tensor) if is_complete else None))

    def found(self, tensor: torch.Tensor, is_written: bool) -> ActivationItem | None:
        """An op is about to use a tensor. Returns the activation that it shows to be written behind autograd's back."""
        storage = tensor.untyped_storage()
        known = self._saved.get(storage._cdata)
        if known is None or known.ref() is not storage or not known.item.packs or known.item.is_kept:
            return None
        with torch._C._DisableTorchDispatch():
            for ref, checksum in known.views:
                view: Any = ref()
                if view is None or (view.probe._version != view.version and not view.takes_writes):
                    continue  # nobody wants it any more, or autograd will say that it was written
                is_unseen = view.takes_writes or not count_together(view.probe, tensor)
                if is_written and is_unseen and _overlap(view, tensor):
                    return self._keep(known.item)
                if checksum is not None and checksum != _checksum(storage, view, tensor):
                    return self._keep(known.item)
        return None

    def _keep(self, item: ActivationItem) -> ActivationItem:
        self._kept[item.ordinal] = max(item.size_bytes, self._kept.get(item.ordinal, 0))
        log.info("%s is written through .data or NumPy after it was saved: it stays on the device from now on", item.name)
        return item


def _checksum(storage: torch.UntypedStorage, view: View, tensor: torch.Tensor) -> int:
    """Returns a checksum of a view's elements; on an accelerator, where only ops write, always 0.

    A recorded step takes one at each use of what it saved, mostly of small tensors, so that what counts is the calls.

    Args:
        storage: whose elements they are.
        view: which.
        tensor: any over this storage.
    """
    if not tensor.is_cpu:
        return 0
    dtype, offset = view.dtype, int(view.offset)
    elements = view.size.numel()
    size_bytes = elements * dtype.itemsize
    if size_bytes == 0:
        return 0
    if size_bytes <= _SUMMED_BYTES_MAX and _is_contiguous(view):
        return zlib.crc32(_bytes_at(storage.data_ptr() + offset * dtype.itemsize, size_bytes))
    with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableTorchDispatch():
        if tensor.dtype is dtype and type(tensor) is torch.Tensor:
            whole = tensor.as_strided(view.size, view.stride, offset)
        else:
            held = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            whole = view_of(held, dtype, view.size, view.stride, offset)
        flat = whole.contiguous()
        if size_bytes > _SUMMED_BYTES_MAX:
            flat = flat.view(-1).view(torch.uint8)
            parts = flat[: size_bytes // _PART_BYTES * _PART_BYTES].view(-1, _PART_BYTES)
            flat = parts[:: -(-size_bytes // _SUMMED_BYTES_MAX)].contiguous()
        return zlib.crc32(_bytes_at(flat.data_ptr(), flat.nbytes))


def _is_contiguous(view: View) -> bool:
    """True when the elements lie one behind the other, in their order."""
    stride = 1
    for size, step in zip(reversed(view.size), reversed(view.stride), strict=True):
        if size != 1:
            if step != stride:
                return False
            stride *= size
    return True


def _bytes_at(address: int, size_bytes: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * size_bytes).from_address(address)


def _overlap(view: View, tensor: torch.Tensor) -> bool:
    """True when both have an element of their storage in common."""
    if view.dtype.itemsize != tensor.element_size():
        return True
    mask = torch.zeros(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=torch.bool, device="cpu")
    mask.as_strided(view.size, view.stride, view.offset).fill_(True)
    return bool(mask.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).any())
