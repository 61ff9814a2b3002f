"""Saved-tensor hooks in force: pairs of user code stay so, torch's own say that they are there.

Of several pairs of hooks torch runs the innermost one alone, which inside a wrapped model is ours. So ours calls the pair
round it: what its pack hook returns is what is moved, if it is a tensor, and its unpack hook gets that back. Pairs of torch's
own that only say where saved tensors are kept, or that they are computed again, give way to ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from tieroff.runtime.at_work import calls_user_code

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]

CHECKPOINTED = "_checkpoint_hook"  # in force round what a checkpoint runs in forward
RECOMPUTED = "_recomputation_hook"  # and in backward
_CHECKPOINTS = "torch.utils.checkpoint"
_GIVE_WAY = ((_CHECKPOINTS, CHECKPOINTED), ("torch.autograd.graph", "save_on_cpu"))


class _Opaque:
    """What a pack hook of user code returned that is no tensor."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def with_hooks_around(pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
    """Returns the engine's own pair of hooks, made to call the pair of user code that is in force here, if there is one."""
    around = _hooks_to_call()
    if around is None:
        return pack, unpack
    outer_pack, outer_unpack = around

    @calls_user_code
    def pack_both(tensor: torch.Tensor) -> Any:
        kept = outer_pack(tensor)
        return pack(kept) if isinstance(kept, torch.Tensor) else _Opaque(kept)

    @calls_user_code
    def unpack_both(packed: Any) -> torch.Tensor:
        return outer_unpack(packed.value if isinstance(packed, _Opaque) else unpack(packed))

    pack_both.around = around  # type: ignore[attr-defined]
    return pack_both, unpack_both


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


def is_of_checkpoint(pair: tuple[Pack, Unpack], which: str) -> bool:
    """True for a pair that torch's non-reentrant checkpoint put in force: `CHECKPOINTED` or `RECOMPUTED`."""
    module, name = _origin(pair[0])
    return module == _CHECKPOINTS and name.startswith(which)


def _origin(pack: Pack) -> tuple[str, str]:
    pack = inspect.unwrap(pack)  # torch.compiler.disable wraps ours, and torch's own
    return getattr(pack, "__module__", None) or "", getattr(pack, "__qualname__", "")


def _hooks_to_call() -> tuple[Pack, Unpack] | None:
    """Returns the innermost pair of hooks of user code, None where there is none that must be called."""
    pair = hooks_here()
    if pair is None:
        return None
    module, name = _origin(pair[0])
    if module.startswith("tieroff."):
        # Another wrapped model's, or a scope's.
        around: tuple[Pack, Unpack] | None = getattr(inspect.unwrap(pair[0]), "around", None)
        return around
    gives_way = any(module == where and name.startswith(what) for where, what in _GIVE_WAY)
    return None if gives_way else pair
