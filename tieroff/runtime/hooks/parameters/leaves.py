"""Saved leaves: a Function of somebody's own finds the leaf itself among what it saved.

[Note: saved leaves]
Without hooks autograd keeps a saved leaf, and gives that very object back. Under hooks torch makes another variable of what the
hook returns: the same bytes and the same gradient, but not the same object, so that `is weight` is False, and that what people
hang on it (`main_grad`, flags) is not there. Operators of torch do not ask; Functions of Megatron, TransformerEngine and
others do. So `ctx.saved_tensors` of a Function that was seen to save a leaf is read through `_leaves_among`, which puts leaves
in the place of such variables. What torch made for its `ctx` gets it, one class for each Function: nothing of torch's own. Who
saves is seen by the frame of `Function.apply`. Torch 2.14 has no such frame: there every Function gets it, and a leaf counts as
saved by one where one reads it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

_APPLY: Any = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)  # None: see the note
_BETWEEN = ("tieroff.", "torch._dynamo.")  # modules of frames that lie between a hook and who saves
_saved: Any = torch._C._FunctionBase.saved_tensors


class _Asked(threading.local):
    """What the hooks gave while the calling thread reads `ctx.saved_tensors`: each tensor and the leaf that was saved."""

    given: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    _known = 0  # Functions that there were when all of them were served

    def serve_all(self) -> None:
        """Has every Function of this process find leaves; next to nothing where there is no new one."""
        count = len(torch.autograd.Function.__subclasses__())
        if count != self._known:
            self._known = count
            for function in _functions():
                _serve(function._backward_cls)


_asked = _Asked()


def leaf_saved_here(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a tensor that is just saved, if it is a leaf and a Function saves it; from now on that finds it again.

    Views that a Function's forward makes of a leaf say that they are leaves, too: these come back by their geometry.
    """
    if not tensor.is_leaf or tensor._is_view() or not (tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)):
        return None
    if _APPLY is None:
        _asked.serve_all()
        return tensor
    frame = sys._getframe(1)
    while frame.f_code is not _APPLY:
        before = frame.f_back
        if before is None or not frame.f_globals.get("__name__", "").startswith(_BETWEEN):
            return None
        frame = before
    _serve(frame.f_locals["cls"]._backward_cls)
    return tensor


def _functions() -> Iterator[Any]:
    """Yields every Function of this process."""
    left = torch.autograd.Function.__subclasses__()
    while left:
        function = left.pop()
        left += function.__subclasses__()
        yield function


def _serve(kind: Any) -> None:
    """Has what torch made for a Function's `ctx` find leaves."""
    if "saved_tensors" not in vars(kind):
        kind.saved_tensors = property(_leaves_among)


def is_asked() -> bool:
    """True while the calling thread reads `ctx.saved_tensors` of a Function that finds leaves."""
    return _asked.given is not None


def give(tensor: torch.Tensor, leaf: torch.Tensor | None) -> torch.Tensor:
    """Returns what an unpack hook found; whoever reads `ctx.saved_tensors` gets the leaf in its place."""
    if leaf is not None and _asked.given is not None:
        _asked.given.append((tensor, leaf))
    return tensor


def _leaves_among(ctx: Any) -> Any:
    """Returns `ctx.saved_tensors`, with leaves where leaves were saved."""
    before, _asked.given = _asked.given, []
    try:
        found = _saved.__get__(ctx)
        given = _asked.given
    finally:
        _asked.given = before
    return tuple(_leaf_of(tensor, given) for tensor in found) if given else found


def _leaf_of(found: torch.Tensor | None, given: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor | None:
    for tensor, leaf in given:
        if found is tensor or (found is not None and _is_made_of(found, tensor)):
            return leaf
    return found


def _is_made_of(found: torch.Tensor, tensor: torch.Tensor) -> bool:
    """True for the variable that torch made of what a hook returned for a leaf, not for one that it made of a view of that."""
    if not (found.is_leaf and found.requires_grad) or found.size() != tensor.size() or found.layout is not tensor.layout:
        return False
    if found.layout is not torch.strided:
        return True
    lies_so = found.stride() == tensor.stride() and found.storage_offset() == tensor.storage_offset()
    return lies_so and found.untyped_storage()._cdata == tensor.untyped_storage()._cdata
