"""Saved-tensor hooks of a dry step where modules run in backward.

As in a step of a wrapped model: what a checkpoint or a Function runs in backward saves through the same hooks as forward, and
what torch's non-reentrant checkpoint keeps of a recomputation is kept as it was packed. See [Note: modules in backward] in
`tieroff/runtime/hooks/recompute/in_backward.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tieroff.recomputation import HooksInBackward, Pack, Recomputed, Unpack, replace_hooks


class DryHooks(HooksInBackward):
    """The pair of a dry step.

    Args:
        pack, unpack: the pair.
        is_kept: whether what `pack` returned has to be unpacked by `unpack`; else the checkpoint keeps the tensor itself.
    """

    def __init__(self, pack: Pack, unpack: Unpack, is_kept: Callable[[Any], bool]) -> None:
        self._pack, self._unpack, self._is_kept = pack, unpack, is_kept
        self._own = weakref.WeakSet[Any]((pack,))

    def pair(self) -> tuple[Pack, Unpack]:
        return self._pack, self._unpack

    def are_ours(self, pair: tuple[Pack, Unpack]) -> bool:
        return pair[0] in self._own

    def begin_again(self) -> None:
        self.put_in_force()

    def has_run_again(self) -> None:
        """Nothing was put in force that is left."""

    def take_part(self, here: tuple[Pack, Unpack]) -> None:
        outer_pack = here[0]
        kept = Recomputed.of(outer_pack, self._unpack, lambda packed: packed)
        if kept is None:
            return

        def pack(tensor: torch.Tensor) -> Any:
            packed = self._pack(tensor)
            kept.keep(outer_pack, tensor, packed if self._is_kept(packed) else None)
            return packed

        self._own.add(pack)
        replace_hooks(pack, self._unpack)


class Packed:
    """A saved tensor without its memory, which is made again when backward wants it."""

    __slots__ = ("__weakref__", "device", "dtype", "key", "offset", "shape", "size_bytes", "stride")

    def __init__(self, tensor: torch.Tensor, key: tuple[str, int]) -> None:
        self.dtype, self.device, self.key = tensor.dtype, tensor.device, key
        self.shape, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        self.size_bytes = tensor.untyped_storage().nbytes()

    def tensor(self) -> torch.Tensor:
        """Returns a tensor of the same geometry on new memory."""
        whole = torch.empty(-(-self.size_bytes // self.dtype.itemsize), dtype=self.dtype, device=self.device)
        return whole.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved tensor that stays where it is; `position` is that of the parameter whose memory it has, or -1."""

    tensor: torch.Tensor
    position: int = -1

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device
