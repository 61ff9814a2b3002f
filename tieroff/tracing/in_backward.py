"""Saved-tensor hooks of a dry step where modules run in backward.

As in a step of a wrapped model: what a checkpoint or a Function runs in backward saves through the same hooks as forward, and
what torch's non-reentrant checkpoint keeps of a recomputation is kept as it was packed. See [Note: modules in backward] in
`tieroff/runtime/hooks/recompute/in_backward.py`.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]

_ASKS_FOR_INPUTS = torch.utils.checkpoint._CheckpointFrame.get_inputs.__code__
_RUNS_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_CALLS_BETWEEN_MAX = 6  # from the unpack hook up to the method that asks


class HooksInBackward:
    """Puts a pair of hooks in force where modules run in backward.

    Args:
        pack, unpack: the pair.
        is_kept: whether what `pack` returned has to be unpacked by `unpack`; else the checkpoint keeps the tensor itself.
    """

    def __init__(self, pack: Pack, unpack: Unpack, is_kept: Callable[[Any], bool]) -> None:
        self._pack, self._unpack, self._is_kept = pack, unpack, is_kept
        self._own = weakref.WeakSet[Any]((pack,))

    def put_in_force(self) -> bool:
        """Puts the pair in the place of the one in force; False where a checkpoint will compute all of that again."""
        here: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if here is None:
            if torch._C._current_autograd_node() is not None:  # else nobody would take them off
                torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
        elif here[0] in self._own:
            return True
        elif _is_of_checkpoint(here[0], "_checkpoint_hook"):
            return False
        elif _is_of_checkpoint(here[0], "_recomputation_hook"):
            self._take_part(here[0])
        else:
            _replace(self._pack, self._unpack)
        return True

    def unpacked(self, caller: FrameType | None) -> bool:
        """A saved tensor is asked for in backward, by autograd or by code in Python; returns whether it may be saved again."""
        if caller is None or caller.f_code is _RUNS_BACKWARD:
            return torch.is_grad_enabled()
        asking: FrameType | None = caller
        for _ in range(_CALLS_BETWEEN_MAX):
            if asking is None or asking.f_code is _RUNS_BACKWARD:
                break
            if asking.f_code is _ASKS_FOR_INPUTS:
                frame = asking.f_locals["self"]
                if not isinstance(frame.recompute_fn, _Recompute):
                    frame.recompute_fn = _Recompute(frame.recompute_fn, self)
                return True
            asking = asking.f_back
        if isinstance(torch._C._current_autograd_node(), BackwardCFunction):
            return self.put_in_force()
        here: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return torch.is_grad_enabled() or (here is not None and here[0] in self._own)

    def _take_part(self, outer_pack: Pack) -> None:
        """Has the recomputation, whose pack hook is in force, keep what was packed."""
        variables = inspect.getclosurevars(inspect.unwrap(outer_pack)).nonlocals
        frame: Any = variables["target_frame_ref"]()
        group = variables["gid"]
        kept = frame.recomputed[group]
        if not isinstance(kept, _Recomputed):
            kept = frame.recomputed[group] = _Recomputed(kept, self._unpack)
            frame.check_recomputed_tensors_match = _Check(frame, kept)

        def pack(tensor: torch.Tensor) -> Any:
            packed = self._pack(tensor)
            kept.packed = packed if self._is_kept(packed) else None
            try:
                outer_pack(tensor)  # an exception says that this was the last one
            finally:
                kept.packed = None
            return packed

        self._own.add(pack)
        _replace(pack, self._unpack)


class _Recompute:
    """Stands in for the function by which a checkpoint computes again."""

    def __init__(self, inner: Callable[..., None], hooks: HooksInBackward) -> None:
        self._inner, self._hooks = inner, hooks

    def __call__(self, *args: Any) -> None:
        self._hooks.put_in_force()
        self._inner(*args)


class _Recomputed(weakref.WeakKeyDictionary[Any, Any]):
    """What a recomputation computed, by the handle that backward asks with: a tensor, or what it was packed as.

    Attributes:
        packed: what the tensor is that comes next; None: it is kept itself.
        is_checked: the checkpoint looks at shapes and types alone, which what was packed has too.
    """

    def __init__(self, known: weakref.WeakKeyDictionary[Any, Any], unpack: Unpack) -> None:
        super().__init__(known)
        self._unpack = unpack
        self.packed: Any = None
        self.is_checked = False

    def __setitem__(self, handle: Any, tensor: torch.Tensor) -> None:
        super().__setitem__(handle, self.packed if self.packed is not None else tensor)

    def __getitem__(self, handle: Any) -> Any:
        found = super().__getitem__(handle)
        return found if self.is_checked or isinstance(found, torch.Tensor) else self._unpack(found)


class _Check:
    """Stands in for a frame's check that what was computed again looks like what was computed before."""

    def __init__(self, frame: Any, kept: _Recomputed) -> None:
        self._frame, self._kept = weakref.ref(frame), weakref.ref(kept)

    def __call__(self, group: Any) -> None:
        frame, kept = self._frame(), self._kept()
        assert frame is not None  # it calls this
        assert kept is not None
        kept.is_checked = True
        try:
            type(frame).check_recomputed_tensors_match(frame, group)
        finally:
            kept.is_checked = False


def _replace(pack: Pack, unpack: Unpack) -> None:
    torch._C._autograd._pop_saved_tensors_default_hooks()
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def _is_of_checkpoint(pack: Pack, which: str) -> bool:
    pack = inspect.unwrap(pack)  # torch.compiler.disable wraps torch's own
    name = getattr(pack, "__qualname__", "")
    return getattr(pack, "__module__", "") == "torch.utils.checkpoint" and name.startswith(which)


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
