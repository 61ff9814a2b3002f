"""Saved-tensor hooks that user code has round a forward: they stay in force.

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

_GIVE_WAY = (("torch.utils.checkpoint", "_checkpoint_hook"), ("torch.autograd.graph", "save_on_cpu"))


class _Opaque:
    """What a pack hook of user code returned that is no tensor."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def with_hooks_around(pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
    """Returns the engine's own pair of hooks, made to call the pair of user code that is in force here, if there is one."""
    around = _hooks_in_force()
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


def _hooks_in_force() -> tuple[Pack, Unpack] | None:
    """Returns the innermost pair of hooks of user code, None where there is none that must be called."""
    pair: tuple[Pack, Unpack] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if pair is None:
        return None
    pack: Any = inspect.unwrap(pair[0])  # torch.compiler.disable wraps ours
    module, name = getattr(pack, "__module__", None) or "", getattr(pack, "__qualname__", "")
    if module.startswith("tieroff."):
        around: tuple[Pack, Unpack] | None = getattr(pack, "around", None)  # another wrapped model's, or a scope's
        return around
    gives_way = any(module == where and name.startswith(what) for where, what in _GIVE_WAY)
    return None if gives_way else pair
