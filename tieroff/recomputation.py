"""PyTorch's non-reentrant checkpoint, as far as others take part in it: its saved-tensor hooks and what its frame keeps.

The frame is torch's own (`torch.utils.checkpoint._CheckpointFrame`). While a checkpoint computes again, its own pair of hooks
is in force, and keeps in the frame what backward will ask for. Who takes the place of that pair calls it, and has the frame
keep what a tensor was packed as. A step of a wrapped model does so ([Note: modules in backward] in
`tieroff/runtime/hooks/recompute/in_backward.py`), and a dry step.

[Note: functions that use torch.func]
Its transforms refuse to run where saved-tensor hooks are in force. One asks as it begins, and before that nothing comes which
anybody could see. So it is read from the code of a Function's backward, of what is defined in it, and of the functions that
these name. One that is missed ends with torch's own error; where the code only names one, what that backward saves stays.
"""

from __future__ import annotations

import abc
import dis
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]

CHECKPOINTED = "_checkpoint_hook"  # in force round what a checkpoint runs in forward
RECOMPUTED = "_recomputation_hook"  # and in backward
CHECKPOINTS = "torch.utils.checkpoint"


def _code_that_asks() -> tuple[CodeType, str]:
    """Returns the code of torch's that asks for what a checkpoint computes again from, and its name for the frame."""
    asks: Any = getattr(torch.utils.checkpoint._CheckpointFrame, "get_inputs", None)
    if asks is not None:
        return asks.__code__, "self"
    hooks: Any = torch.utils.checkpoint._checkpoint_hook  # torch 2.11: the unpack hook itself asks
    constants = hooks.__init__.__code__.co_consts
    return next(one for one in constants if isinstance(one, CodeType) and one.co_name == "unpack_hook"), "frame"


_ASKS_FOR_INPUTS, _FRAME = _code_that_asks()
_RUNS_BACKWARD: CodeType = torch.autograd.graph._engine_run_backward.__code__
# From the unpack hook up to the method that asks: the hooks of user code, a comprehension, an outer checkpoint's hook.
_CALLS_BETWEEN_MAX = 6
# See [Note: functions that use torch.func].
_PACKAGES = ("torch.func", "torch._functorch", "functorch")
_PATHS = {("torch", name) for name in ("func", "_functorch")}
# Functions of one backward that are read.
_READ_MAX = 64


def hooks_here() -> tuple[Pack, Unpack] | None:
    """Returns the pair of hooks that is in force in this thread, whoever's it is."""
    pair: tuple[Pack, Unpack] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return pair


def push_hooks(pack: Pack, unpack: Unpack) -> None:
    """Puts a pair of hooks in force in this thread, for as long as autograd evaluates the node that it evaluates now."""
    if torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def replace_hooks(pack: Pack, unpack: Unpack) -> None:
    """Puts a pair of hooks in the place of the one in force: it goes when the context that put that one there ends."""
    if torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        torch._C._autograd._pop_saved_tensors_default_hooks()
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def take_off_hooks(until: tuple[Pack, Unpack] | None) -> None:
    """Takes off the pairs of hooks that were put in force in this thread after this one (None: all), and not taken off."""
    if torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        while (here := hooks_here()) is not None and (until is None or here[0] is not until[0]):
            torch._C._autograd._pop_saved_tensors_default_hooks()


def origin_of(pack: Pack) -> tuple[str, str]:
    """Returns the module and the qualified name of a pack hook."""
    pack = inspect.unwrap(pack)  # torch.compiler.disable wraps ours, and torch's own
    return getattr(pack, "__module__", None) or "", getattr(pack, "__qualname__", "")


def is_of_checkpoint(pair: tuple[Pack, Unpack], which: str) -> bool:
    """True for a pair that torch's non-reentrant checkpoint put in force: `CHECKPOINTED` or `RECOMPUTED`."""
    module, name = origin_of(pair[0])
    return module == CHECKPOINTS and name.startswith(which)


def _callers(caller: FrameType | None) -> Iterator[FrameType]:
    for _ in range(_CALLS_BETWEEN_MAX):
        if caller is None or caller.f_code is _RUNS_BACKWARD:
            return
        yield caller
        caller = caller.f_back


def _frame_that_asks(caller: FrameType | None) -> Any:
    """Returns the checkpoint's frame that calls an unpack hook for its inputs, to compute again; None where none does."""
    found = (frame.f_locals for frame in _callers(caller) if frame.f_code is _ASKS_FOR_INPUTS)
    return next((names[_FRAME] for names in found if "args" not in names), None)  # else it has them, and computes by now


class HooksInBackward(abc.ABC):
    """Puts a pair of hooks in force where modules run in backward."""

    @abc.abstractmethod
    def pair(self) -> tuple[Pack, Unpack]:
        """Returns the pair."""

    @abc.abstractmethod
    def are_ours(self, pair: tuple[Pack, Unpack]) -> bool:
        """True for such a pair."""

    @abc.abstractmethod
    def take_part(self, here: tuple[Pack, Unpack]) -> None:
        """Has a recomputation, whose hooks are in force, keep what it computes as it is packed."""

    @abc.abstractmethod
    def begin_again(self) -> None:
        """A checkpoint is about to compute again."""

    @abc.abstractmethod
    def has_run_again(self) -> None:
        """It has computed what it was asked for."""

    def put_in_force(self) -> bool:
        """Puts the pair in force in the place of the one that is, so that who put that there takes ours off.

        Returns:
            False where a checkpoint keeps what is saved here: its pair stays, as it computes all of that again.
        """
        here = hooks_here()
        if here is None:
            if torch._C._current_autograd_node() is not None:  # else nobody would take them off
                push_hooks(*self.pair())
        elif self.are_ours(here):
            return True
        elif is_of_checkpoint(here, CHECKPOINTED):
            return False
        elif is_of_checkpoint(here, RECOMPUTED):
            self.take_part(here)
        else:
            replace_hooks(*self.pair())
        return True

    def unpacked(self, caller: FrameType | None) -> bool:
        """A saved tensor is asked for while a backward runs, by autograd itself or by code in Python; may it be saved again?"""
        if caller is None or caller.f_code is _RUNS_BACKWARD:
            return torch.is_grad_enabled()  # by a node, of which the backward is differentiated, too
        frame = _frame_that_asks(caller)
        if frame is not None:
            if not isinstance(frame.recompute_fn, _Recompute):
                frame.recompute_fn = _Recompute(frame.recompute_fn, self.begin_again, self.has_run_again)
            return True
        node = torch._C._current_autograd_node()
        if isinstance(node, BackwardCFunction):
            return not names_transforms(type(node)._forward_cls) and self.put_in_force()
        here = hooks_here()
        return torch.is_grad_enabled() or (here is not None and self.are_ours(here))


class _Recompute:
    """Stands in for the function by which a checkpoint computes again, and calls `before` and `after` round it."""

    def __init__(self, inner: Callable[..., None], before: Callable[[], object], after: Callable[[], object]) -> None:
        self._inner, self._before, self._after = inner, before, after

    def __call__(self, *args: Any) -> None:
        self._before()
        try:
            self._inner(*args)
        finally:
            self._after()  # an exception says, too, that all has been computed that backward asks for


class Recomputed(weakref.WeakKeyDictionary[Any, Any]):
    """What a recomputation computed, by the handle that backward asks with: a tensor, or what it was packed as.

    Args:
        known: what the checkpoint's own dict has by now.
        unpack: gives the tensor of what was packed.
        looks: gives of what was packed something with the tensor's shape, type and device; the checkpoint checks these.

    Attributes:
        packed: what the tensor is that comes next; None: the checkpoint keeps the tensor itself.
        is_checked: the checkpoint only looks at shapes and types, and no bytes are needed.
    """

    def __init__(self, known: weakref.WeakKeyDictionary[Any, Any], unpack: Unpack, looks: Callable[[Any], Any]) -> None:
        super().__init__(known)
        self._unpack, self._looks = unpack, looks
        self.packed: Any = None
        self.is_checked = False

    @classmethod
    def of(cls, outer_pack: Pack, unpack: Unpack, looks: Callable[[Any], Any]) -> Recomputed | None:
        """Returns what the recomputation keeps whose pack hook is in force; None for a frame of another form than is known."""
        variables = inspect.getclosurevars(inspect.unwrap(outer_pack)).nonlocals
        frame_ref, group = variables.get("target_frame_ref"), variables.get("gid")
        frame: Any = frame_ref() if frame_ref is not None else None
        if frame is None or not isinstance(getattr(frame, "recomputed", None), dict):
            return None
        kept = frame.recomputed[group]
        if not isinstance(kept, cls):
            kept = frame.recomputed[group] = cls(kept, unpack, looks)
            frame.check_recomputed_tensors_match = _Check(frame, kept)
        return kept

    def __setitem__(self, handle: Any, tensor: torch.Tensor) -> None:
        super().__setitem__(handle, self.packed if self.packed is not None else tensor)

    def __getitem__(self, handle: Any) -> Any:
        found = super().__getitem__(handle)
        if isinstance(found, torch.Tensor):
            return found
        return self._looks(found) if self.is_checked else self._unpack(found)

    def keep(self, outer_pack: Pack, tensor: torch.Tensor, packed: Any) -> None:
        """Has the checkpoint keep this of a tensor: what it was packed as, or, where that is None, the tensor itself."""
        self.packed = packed
        try:
            outer_pack(tensor)  # an exception says that this was the last one
        finally:
            self.packed = None


class _Check:
    """Stands in for a frame's check that what was computed again looks like what was computed before."""

    def __init__(self, frame: Any, kept: Recomputed) -> None:
        self._frame, self._kept = weakref.ref(frame), weakref.ref(kept)

    def __call__(self, group: Any) -> None:
        frame, kept = self._frame(), self._kept()
        assert frame is not None  # it calls this
        if kept is not None:
            kept.is_checked = True
        try:
            type(frame).check_recomputed_tensors_match(frame, group)
        finally:
            if kept is not None:
                kept.is_checked = False


@functools.lru_cache(maxsize=256)
def names_transforms(kind: type) -> bool:
    """Returns whether the backward of a Function names a transform; see [Note: functions that use torch.func]."""
    left: list[Any] = [getattr(kind, "backward", None), getattr(kind, "vjp", None)]
    read: set[FunctionType] = set()
    while left and len(read) < _READ_MAX:
        found = left.pop()
        found = inspect.unwrap(found) if isinstance(found, FunctionType) else found
        if _is_of_transforms(found):
            return True
        if isinstance(found, FunctionType) and found not in read and not str(found.__module__).startswith("torch."):
            read.add(found)
            names = list(_names_in(found.__code__))
            if any(pair in _PATHS for pair in pairwise(names)):
                return True
            left += [found.__globals__[name] for name in set(names) if name in found.__globals__]
            left += [cell.cell_contents for cell in found.__closure__ or () if _is_filled(cell)]
    return False


def _is_of_transforms(found: Any) -> bool:
    name = found.__name__ if isinstance(found, ModuleType) else getattr(found, "__module__", None)
    return isinstance(name, str) and any(name == package or name.startswith(f"{package}.") for package in _PACKAGES)


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False  # of a name that is defined later


def _names_in(code: CodeType) -> Iterator[str]:
    """Yields the names that code uses, in the order in which it does, with those of what is defined in it."""
    yield from (one.argval for one in dis.get_instructions(code) if isinstance(one.argval, str))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)
