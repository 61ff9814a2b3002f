"""Tensors that a Function keeps on its ctx, beside what it saves: what stands for one until its node runs.

[Note: tensors on a ctx]
An attribute of a ctx is no saved tensor: nobody checks its version, backward may write it, and whoever else holds its memory
sees that. So what stands for one packs it as a saved tensor, and gives what the plain run's backward would find: the memory
itself while anybody holds it, with all that was written there, and else what was moved, with what an earlier backward of a
retained graph wrote. What was written between forward and the end of its memory is there where the recorded step had such a
write, since it stays then; a write that comes in a later step for the first time is an error, as what it wrote is gone.

With `create_graph` a backward in Python differentiates through what it finds on its ctx. So one that has a graph is saved by a
node, which gives it back with that graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tieroff.errors import StateError
from tieroff.runtime.hooks.packed import is_plain, take_writes
from tieroff.runtime.items.offloaded import set_data
from tieroff.runtime.tensors import alias_of, probe_of, unseen, view_of


class Packs(Protocol):
    """Packs what autograd saves, and brings it back."""

    def pack(self, tensor: torch.Tensor) -> Any: ...

    def unpack(self, packed: Any) -> torch.Tensor: ...


class OnCtx:
    """Stands for one tensor; see [Note: tensors on a ctx].

    Args:
        tensor: it.
        packs: moves it.
    """

    __slots__ = ("_packed", "_packs", "_saved")

    def __init__(self, tensor: torch.Tensor, packs: Packs) -> None:
        self._packs = packs
        self._packed: Lasting | None = None
        if not tensor.requires_grad:
            self._packed = Lasting(packs.pack, tensor)
            return
        # Hooks that know the node would keep it alive through itself.
        hooks = partial(Lasting, packs.pack), partial(_found, packs.unpack)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(*hooks):
            # With torch 2.11 its node frees what it saves as soon as this is gone, whoever holds the node.
            self._saved: Any = _Saving.apply(tensor)  # type: ignore[no-untyped-call]

    @staticmethod
    def may_stand_for(tensor: torch.Tensor, node: Any) -> bool:
        """True for a tensor that a node keeps and that has a life of its own: neither a leaf of somebody's nor its result."""
        is_known = type(tensor) is torch.Tensor and is_plain(tensor)
        return is_known and (not tensor.requires_grad or tensor.grad_fn not in (None, node))

    def made(self) -> torch.Tensor:
        """Returns the tensor, for a backward."""
        if self._packed is not None:
            return self._packed.found(self._packs.unpack)
        found: torch.Tensor = self._saved.grad_fn.saved_tensors[0]
        return found


class Lasting:
    """A packed tensor, and its memory for as long as somebody holds that."""

    __slots__ = ("_geometry", "_packed", "_probe", "_ref", "_version")

    def __init__(self, pack: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> None:
        self._ref = StorageWeakRef(tensor.untyped_storage())
        self._geometry = tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset())
        self._probe, self._version = probe_of(tensor), tensor._version
        self._packed = pack(tensor)
        take_writes(self._packed)

    def found(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Returns what a plain run would find.

        Raises:
            StateError: it was written, and its memory freed, in a step whose like had no such write.
        """
        unpacked = unpack(self._packed)  # in any case: it is an event of the step
        storage = torch.UntypedStorage._new_with_weak_ptr(self._ref.cdata)
        if storage is None:
            if self._probe._version != self._version:
                raise StateError(
                    f"expected a tensor of shape {list(self._geometry[1])} as a Function kept it on its ctx, but it was "
                    "written in place afterwards, in a step that no recorded one was like, and freed: save it with "
                    "ctx.save_for_backward, or write `x = x + ...` instead of `x += ...`"
                )
            return unpacked
        if unpacked.untyped_storage()._cdata == storage._cdata:
            return unpacked
        with unseen():  # the recorder knows this memory
            memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
            memory.set_(storage, 0, (storage.nbytes(),), (1,))
            alias = alias_of(self._probe)  # what backward writes counts as writes to it
            set_data(alias, view_of(memory, *self._geometry))
        return alias


def _found(unpack: Callable[[Any], torch.Tensor], packed: Lasting) -> torch.Tensor:
    return packed.found(unpack)


class _Saving(torch.autograd.Function):
    """Saves a tensor, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        return None
