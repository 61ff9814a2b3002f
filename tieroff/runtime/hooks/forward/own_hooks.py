"""The engine's pair of saved-tensor hooks, as it is put in force round a forward and where modules run in backward."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from tieroff.recomputation import Pack, Unpack
from tieroff.runtime.execution.state import StepState
from tieroff.runtime.hooks.forward.around import with_hooks_around
from tieroff.runtime.hooks.parameters.reads import ParameterReads
from tieroff.runtime.hooks.saved import SavedTensors
from tieroff.runtime.step.mode import DEMAND, PASS, PLANNED
from tieroff.uncompiled import left_to_python


class OwnHooks:
    """The pair of one engine.

    Attributes:
        has_compiled: modules of torch's own that are compiled in place are among the model's. They run as they are, and torch
            would compile what they call instead.
    """

    def __init__(self, state: StepState, reads: ParameterReads, saved: SavedTensors) -> None:
        self._state, self._reads, self._saved = state, reads, saved
        self.has_compiled = False

    @property
    def are_wanted(self) -> bool:
        """True in a step in which something moves, or casts of parameters are made again in backward."""
        mode = self._state.mode
        return mode is DEMAND or mode is PLANNED or (mode is PASS and self._reads.casts.dtype is not None)

    def pair(self) -> tuple[Pack, Unpack]:
        """Returns the pair, which calls the pair of user code that is in force here, if there is one."""
        return self.made_own(*with_hooks_around(*self.plain_pair()))

    def plain_pair(self) -> tuple[Pack, Unpack]:
        """Returns the engine's own two functions."""
        saved = self._saved
        return saved.pack if self._state.mode is not PASS else saved.pack_casts, saved.unpack

    def made_own(self, pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
        """Returns a pair as one that `are_ours` knows."""
        return OwnPack(self._uncompiled(pack), getattr(pack, "around", None), self), self._uncompiled(unpack)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Hooks what is saved outside of the model's forward, by a loss for example, while a step runs."""
        state, saved = self._state, self._saved

        def pack(tensor: torch.Tensor) -> object:
            return saved.pack(tensor) if state.mode in (DEMAND, PLANNED) else tensor

        def unpack(packed: object) -> torch.Tensor:
            return packed if isinstance(packed, torch.Tensor) else saved.unpack(packed)

        with torch.autograd.graph.saved_tensors_hooks(*with_hooks_around(pack, unpack)):
            yield

    def are_ours(self, pair: tuple[Pack, Unpack]) -> bool:
        """True for a pair of this engine's."""
        return isinstance(pair[0], OwnPack) and pair[0].own is self

    def _uncompiled(self, hook: Any) -> Any:
        return torch.compiler.disable(hook) if self.has_compiled else hook


class OwnPack:
    """A pack hook of an engine's.

    Attributes:
        around: the pair of user code's that it calls, or None.
        own: whose it is.
    """

    __slots__ = ("_pack", "around", "own")

    def __init__(self, pack: Pack, around: tuple[Pack, Unpack] | None, own: OwnHooks) -> None:
        self._pack, self.around, self.own = pack, around, own

    @left_to_python
    def __call__(self, tensor: torch.Tensor) -> Any:
        return self._pack(tensor)

    @property
    def _checkpoint_internal(self) -> bool:
        """What torch (2.14 and later) asks of hooks round a selective checkpoint as that is about to keep a tensor: are they
        torch's own? They are not, and unless the program says otherwise (`respect_saved_tensors_hooks=False`), what it keeps
        goes through them: it is memory like all that waits for backward. Without a word from anybody torch would warn.
        """
        _respect_hooks(sys._getframe(1))
        return False


def _respect_hooks(asking: FrameType) -> None:
    """Says for the selective checkpoint that asks, where the program said nothing, that it respects saved-tensor hooks."""
    caller = asking.f_back
    if caller is None or caller.f_code.co_name != "__torch_dispatch__":
        return
    mode = caller.f_locals.get("self")
    if getattr(mode, "respect_saved_tensors_hooks", True) is None:
        mode.respect_saved_tensors_hooks = True  # type: ignore[union-attr]
