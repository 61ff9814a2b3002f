"""Saved-tensor hooks in force: pairs of user code stay so, torch's own say that they are there.

Of several pairs of hooks torch runs the innermost one alone, which inside a wrapped model is ours. So ours calls the pair
round it: what its pack hook returns is what is moved, if it is a tensor, and its unpack hook gets that back. Pairs of torch's
own that only say where saved tensors are kept, or that they are computed again, give way to ours.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from tieroff.recomputation import CHECKPOINTED, CHECKPOINTS, Pack, Unpack, hooks_here, origin_of
from tieroff.runtime.signal_safety import runs_user_code

_GIVE_WAY = ((CHECKPOINTS, CHECKPOINTED), ("torch.autograd.graph", "save_on_cpu"))


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

    @runs_user_code
    def pack_both(tensor: torch.Tensor) -> Any:
        kept = outer_pack(tensor)
        return pack(kept) if isinstance(kept, torch.Tensor) else _Opaque(kept)

    @runs_user_code
    def unpack_both(packed: Any) -> torch.Tensor:
        return outer_unpack(packed.value if isinstance(packed, _Opaque) else unpack(packed))

    pack_both.around = around  # type: ignore[attr-defined]
    return pack_both, unpack_both


def _hooks_to_call() -> tuple[Pack, Unpack] | None:
    """Returns the innermost pair of hooks of user code, None where there is none that must be called."""
    pair = hooks_here()
    if pair is None:
        return None
    module, name = origin_of(pair[0])
    if module.startswith("tieroff."):
        # Another wrapped model's, or a scope's.
        around: tuple[Pack, Unpack] | None = getattr(inspect.unwrap(pair[0]), "around", None)
        return around
    gives_way = any(module == where and name.startswith(what) for where, what in _GIVE_WAY)
    return None if gives_way else pair
