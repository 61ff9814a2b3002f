"""What is read of FSDP2 beyond its public seam: how it holds each sharded parameter.

The extension itself (`fsdp_pre_all_gather`, `fsdp_post_all_gather`) is public. Torch has no public name for what must be known
to use it rightly: the padded size of a shard, and whether FSDP2 has looked for extensions already; nor for what makes its
collectives, which has a public setter alone. Nothing else is written here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tieroff.errors import StateError
from tieroff.units import format_bytes


@dataclass(frozen=True, slots=True)
class Gathering:
    """The parameters that FSDP2 gathers together.

    Attributes:
        name: of the module that it gathers them for; "" for the whole model.
        size_bytes: of all of them, whole and as they are gathered.
    """

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class HeldByFsdp2:
    """One sharded parameter as FSDP2 holds it.

    Attributes:
        parameter: the DTensor that people and the optimizer hold.
        gathering: what it is gathered with.
        padded_size: of the shard as it is gathered: that of rank 0.
        has_run: FSDP2 has taken the shard's memory for its first forward.
        is_settled: it has, and saw no extension then: one that comes now is not seen.
        why_kept: why FSDP2 cannot gather it through an extension; "" when it can.
    """

    parameter: torch.Tensor
    gathering: Gathering
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


def gathering_advice(held: Iterable[HeldByFsdp2]) -> str:
    """Returns what lowers the least that a step runs in which gathers these parameters; "" where there are none."""
    largest = max((one.gathering for one in held), key=lambda gathering: gathering.size_bytes, default=None)
    if largest is None:
        return ""
    whole = f"{largest.name!r}" if largest.name else "the model's own parameters"
    return (
        f"smaller groups (fully_shard on more modules): FSDP2 gathers {whole}, its largest group, whole "
        f"({format_bytes(largest.size_bytes)}), and holds at once the group that runs, the next one, the root's, whole "
        "gradients and what it reduces, none of which can move"
    )


@dataclass(frozen=True, slots=True)
class Communicating:
    """What FSDP2 makes the collectives of one module's group of parameters with.

    Attributes:
        gather, reduce: objects as `set_custom_all_gather` and `set_custom_reduce_scatter` take them.
    """

    module: Any
    gather: Any
    reduce: Any

    def replace(self, gather: Any, reduce: Any) -> None:
        """Has FSDP2 use others."""
        self.module.set_custom_all_gather(gather)
        self.module.set_custom_reduce_scatter(reduce)


def communicating(model: torch.nn.Module) -> dict[str, Communicating]:
    """Returns, by name of the module, what makes the collectives of each group that can be given another one.

    A module with several groups cannot, nor can those of a torch whose FSDP2 holds them otherwise.
    """
    found: dict[str, Communicating] = {}
    seen = set[int]()  # modules that were sharded together have one group
    for name, module in model.named_modules():
        groups = _groups_of(module)
        if len(groups) != 1 or id(groups[0]) in seen or not hasattr(module, "set_custom_reduce_scatter"):
            continue
        seen.add(id(groups[0]))
        gather, reduce = (getattr(groups[0], held, None) for held in ("_all_gather_comm", "_reduce_scatter_comm"))
        if gather is not None and reduce is not None:
            found[name] = Communicating(module, gather, reduce)
    return found


def held_by_fsdp2(model: torch.nn.Module) -> dict[int, HeldByFsdp2]:
    """Returns the parameters that FSDP2 shards, by id.

    Raises:
        StateError: this torch's FSDP2 is another one than is known here.
    """
    with _known():
        found = [
            held for name, module in model.named_modules() for group in _groups_of(module) for held in _held_in(group, name)
        ]
    return {id(held.parameter): held for held in found}


@contextmanager
def _known() -> Iterator[None]:
    """Inside, FSDP2 is read."""
    try:
        yield
    except AttributeError as error:
        raise StateError(
            f"expected the FSDP2 of torch 2.13 or one like it, but that of torch {torch.__version__} differs ({error}): its "
            'shards cannot be moved; leave "parameters" out of [plan] cover'
        ) from error


def _groups_of(module: torch.nn.Module) -> list[Any]:
    """Returns the groups of parameters that FSDP2 gathers for a module: one, as a rule."""
    state_of: Any = getattr(module, "_get_fsdp_state", None)
    if state_of is None:
        return []
    state = state_of()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # torch 2.11


def _held_in(group: Any, name: str) -> Iterator[HeldByFsdp2]:
    gathering = Gathering(name, sum(_gathered_bytes(group, param) for param in group.fsdp_params))
    has_run = bool(group._reset_sharded_params)
    for param in group.fsdp_params:
        is_settled = has_run and not hasattr(param, "_extensions_data")
        padded_size = tuple(param.padded_sharded_param_size)
        yield HeldByFsdp2(param.sharded_param, gathering, padded_size, has_run, is_settled, _why_kept(group, param))


def _gathered_bytes(group: Any, param: Any) -> int:
    dtype = group.mp_policy.param_dtype or param.sharded_param.dtype
    shards = getattr(param.mesh_info, "shard_mesh_size", 1)  # of a mesh of replicas alone there is one
    return int(math.prod(param.padded_sharded_param_size) * shards * dtype.itemsize)


def _why_kept(group: Any, param: Any) -> str:
    if param.offload_to_cpu:
        return "FSDP2 keeps its shards on the host (CPUOffloadPolicy)"
    if group._use_post_forward_mesh:
        return "FSDP2 reshards it to fewer ranks after forward (reshard_after_forward=int), and has no extension for that"
    return ""
