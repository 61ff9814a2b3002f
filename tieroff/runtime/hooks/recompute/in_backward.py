"""Modules that run in backward: what they save is packed as in forward.

[Note: modules in backward]
The engine's pair of saved-tensor hooks is in force round the model's forward, in the thread that called it. A checkpoint
runs modules once more in backward, in whatever thread autograd evaluates a node, and so do Functions that people write. What
autograd saves there is moved, and a parameter that it saves is fetched again, if the pair is in force there too. It is put in
force where the engine is first asked in such a run: as a Function asks for what it saved, as a checkpoint asks for its inputs,
or as a module reads a parameter with gradients enabled. It need not be taken off: autograd sets a thread's hooks for each node
that it evaluates, and backwards inside of a node begin with those of the node.

Torch's non-reentrant checkpoint has a pair of its own in force meanwhile, and keeps what that is given in its frame until
backward asks. The engine's pair then takes the place of that one and calls it, and the frame gets a dict which keeps what was
packed. The frame is torch's own (`torch.utils.checkpoint._CheckpointFrame`); one of another form is left as it is, and what
it keeps stays on the device.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction

from tieroff.runtime.at_work import calls_user_code
from tieroff.runtime.execution.autograd import functorch_is_active, unseen_by_the_program
from tieroff.runtime.hooks.forward.around import (
    CHECKPOINTED,
    RECOMPUTED,
    Pack,
    Unpack,
    hooks_here,
    is_of_checkpoint,
    push_hooks,
    replace_hooks,
)
from tieroff.runtime.hooks.forward.own_hooks import OwnHooks
from tieroff.runtime.hooks.packed import is_packed, looks_of

_Frame: Any = torch.utils.checkpoint._CheckpointFrame
_ASKS_FOR_INPUTS: CodeType = _Frame.get_inputs.__code__
_RUNS_BACKWARD: CodeType = torch.autograd.graph._engine_run_backward.__code__
# From the unpack hook up to the method that asks: the hooks of user code, a comprehension, an outer checkpoint's hook.
_CALLS_BETWEEN_MAX = 6


class ModulesInBackward:
    """Puts the engine's hooks in force where modules run in backward; see [Note: modules in backward]."""

    def __init__(self, hooks: OwnHooks) -> None:
        self._hooks = hooks

    def read(self) -> None:
        """A module reads a parameter while a backward runs, with gradients enabled."""
        if self._hooks.are_wanted and not functorch_is_active():
            self._put_in_force()

    def _put_in_force(self) -> bool:
        """Puts the engine's pair in force in the place of the one that is, so that who put that there takes ours off.

        Returns:
            False where a checkpoint keeps what is saved here: its pair stays, as it computes all of that again.
        """
        here = hooks_here()
        if here is None:
            if torch._C._current_autograd_node() is not None:  # else nobody would take them off
                push_hooks(*self._hooks.pair())
        elif self._hooks.are_ours(here):
            return True
        elif is_of_checkpoint(here, CHECKPOINTED):
            return False
        elif is_of_checkpoint(here, RECOMPUTED):
            self.take_part(here)
        else:
            replace_hooks(*self._hooks.pair())
        return True

    def unpacked(self, caller: FrameType | None) -> bool:
        """A saved tensor is asked for while a backward runs, by autograd itself or by code in Python; may it be saved again?"""
        if not self._hooks.are_wanted or functorch_is_active():
            return False
        if caller is None or caller.f_code is _RUNS_BACKWARD:
            return torch.is_grad_enabled()  # by a node, of which the backward is differentiated, too
        asking = caller
        for _ in range(_CALLS_BETWEEN_MAX):
            if asking.f_code is _ASKS_FOR_INPUTS:
                frame = asking.f_locals["self"]
                if not isinstance(frame.recompute_fn, _Recompute):
                    frame.recompute_fn = _Recompute(frame.recompute_fn, self)
                return True
            if asking.f_back is None or asking.f_code is _RUNS_BACKWARD:
                break
            asking = asking.f_back
        if isinstance(torch._C._current_autograd_node(), BackwardCFunction):
            return self._put_in_force()
        here = hooks_here()
        return torch.is_grad_enabled() or (here is not None and self._hooks.are_ours(here))

    def take_part(self, here: tuple[Pack, Unpack]) -> None:
        """Has a recomputation, whose hooks are in force, keep what it computes as the engine packs it."""
        variables = inspect.getclosurevars(inspect.unwrap(here[0])).nonlocals
        frame_ref, group = variables.get("target_frame_ref"), variables.get("gid")
        frame: Any = frame_ref() if frame_ref is not None else None
        if frame is None or not isinstance(getattr(frame, "recomputed", None), dict):
            return
        kept = frame.recomputed[group]
        if not isinstance(kept, _Recomputed):
            kept = frame.recomputed[group] = _Recomputed(kept, self._hooks.plain_pair()[1])
            frame.check_recomputed_tensors_match = _Check(frame, kept)
        replace_hooks(*self._hooks.made_own(*kept.hooks_before(here[0], self._hooks.plain_pair())))

    @property
    def are_wanted(self) -> bool:
        """True in a step whose saved tensors the engine packs."""
        return self._hooks.are_wanted


class _Recompute:
    """Stands in for the function by which a checkpoint computes again."""

    def __init__(self, inner: Callable[..., None], modules: ModulesInBackward) -> None:
        self._inner, self._modules = inner, modules

    @calls_user_code
    def __call__(self, *args: Any) -> None:
        here = hooks_here()
        if here is not None and self._modules.are_wanted and is_of_checkpoint(here, RECOMPUTED):
            self._modules.take_part(here)
        self._inner(*args)


class _Recomputed(weakref.WeakKeyDictionary[Any, Any]):
    """What a recomputation computed, by the handle that backward asks with: a tensor, or what it was packed as.

    Attributes:
        is_checked: the checkpoint only looks at shapes and types, and no bytes are needed.
    """

    def __init__(self, known: weakref.WeakKeyDictionary[Any, Any], unpack: Unpack) -> None:
        super().__init__(known)
        self._unpack = unpack
        self._packed: Any = None  # what the tensor is that comes next
        self.is_checked = False

    def __setitem__(self, handle: Any, tensor: torch.Tensor) -> None:
        super().__setitem__(handle, self._packed if self._packed is not None else tensor)

    def __getitem__(self, handle: Any) -> torch.Tensor:
        found = super().__getitem__(handle)
        if isinstance(found, torch.Tensor):
            return found
        return looks_of(found) if self.is_checked else self._unpack(found)

    def hooks_before(self, outer_pack: Pack, own: tuple[Pack, Unpack]) -> tuple[Pack, Unpack]:
        """Returns the hooks of the recomputation: they pack a tensor, and let the checkpoint's own keep what comes of it."""
        own_pack, own_unpack = own

        def pack(tensor: torch.Tensor) -> Any:
            with unseen_by_the_program():  # a selective checkpoint counts ops, and answers some with what it kept
                packed = own_pack(tensor)
            # A tensor that stays is kept as the checkpoint has it, without a graph.
            self._packed = packed if is_packed(packed) else None
            try:
                outer_pack(tensor)  # an exception says that this was the last one
            finally:
                self._packed = None
            return packed

        def unpack(packed: Any) -> torch.Tensor:
            with unseen_by_the_program():
                return own_unpack(packed)

        return pack, unpack


class _Check:
    """Stands in for a frame's check that what was computed again looks like what was computed before."""

    def __init__(self, frame: Any, kept: _Recomputed) -> None:
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
