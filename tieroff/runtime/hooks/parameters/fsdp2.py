"""What is read of FSDP2 beyond its public seam: how it holds each sharded parameter.

The extension itself (`fsdp_pre_all_gather`, `fsdp_post_all_gather`) is public. Torch has no public name for what must be known
to use it rightly: the padded size of a shard, and whether FSDP2 has looked for extensions already. Nothing is written here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tieroff.errors import StateError


@dataclass(frozen=True, slots=True)
class HeldByFsdp2:
    """One sharded parameter as FSDP2 holds it.

    Attributes:
        parameter: the DTensor that people and the optimizer hold.
        padded_size: of the shard as it is gathered: that of rank 0.
        has_run: FSDP2 has taken the shard's memory for its first forward.
        is_settled: it has, and saw no extension then: one that comes now is not seen.
        why_kept: why FSDP2 cannot gather it through an extension; "" when it can.
    """

    parameter: torch.Tensor
    padded_size: tuple[int, ...]
    has_run: bool
    is_settled: bool
    why_kept: str


def _fsdp_module() -> type | None:
    """Returns the class of modules that FSDP2 shards; None where nobody has imported it, so no module is of it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return getattr(fsdp, "FSDPModule", None) if fsdp is not None else None


def fsdp_roots(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the outermost modules that `fully_shard` was called on: those whose forward gathers first."""
    kind = _fsdp_module()
    if kind is None:
        return []
    if isinstance(model, kind):
        return [model]
    return [root for child in model.children() for root in fsdp_roots(child)]


def held_by_fsdp2(model: torch.nn.Module) -> dict[int, HeldByFsdp2]:
    """Returns the parameters that FSDP2 shards, by id.

    Raises:
        StateError: this torch's FSDP2 is another one than is known here.
    """
    found = {}
    for root in fsdp_roots(model):
        for module in root.modules():
            for held in _of_module(module):
                found[id(held.parameter)] = held
    return found


def _of_module(module: torch.nn.Module) -> Iterator[HeldByFsdp2]:
    state_of: Any = getattr(module, "_get_fsdp_state", None)
    if state_of is None:
        return
    try:
        for group in state_of()._fsdp_param_groups:
            for param in group.fsdp_params:
                has_run = bool(group._reset_sharded_params)
                is_settled = has_run and not hasattr(param, "_extensions_data")
                padded_size = tuple(param.padded_sharded_param_size)
                yield HeldByFsdp2(param.sharded_param, padded_size, has_run, is_settled, _why_kept(group, param))
    except AttributeError as error:
        raise StateError(
            f"expected the FSDP2 of torch 2.13 or one like it, but that of torch {torch.__version__} differs ({error}): its "
            'shards cannot be moved; leave "parameters" out of [plan] cover'
        ) from error


def _why_kept(group: Any, param: Any) -> str:
    if param.offload_to_cpu:
        return "FSDP2 keeps its shards on the host (CPUOffloadPolicy)"
    if group._use_post_forward_mesh:
        return "FSDP2 reshards it to fewer ranks after forward (reshard_after_forward=int), and has no extension for that"
    return ""
