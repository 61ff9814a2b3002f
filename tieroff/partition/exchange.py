"""Tensors brought from one placement to another, by the steps that plans are priced by."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tieroff.core.sharding.exchange import exchange_steps
from tieroff.core.sharding.graph import PARTIAL, REPLICATED
from tieroff.core.sharding.placements import Placements


def dtensor_placements(placements: Placements) -> list[Any]:
    """Returns placements as DTensor has them."""
    return [{REPLICATED: Replicate(), PARTIAL: Partial()}.get(placement, Shard(placement)) for placement in placements]


def whole_of(part: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """Returns the tensor of which each device has such a part."""
    return DTensor.from_local(part, mesh, dtensor_placements(placements), run_check=False)


def bring(tensor: DTensor, target: Placements) -> DTensor:
    """Returns a tensor in other placements; itself where it lies so. Not for autograd."""
    source = _placements_of(tensor)
    if source is None:  # a placement without a name here: DTensor knows how to make it whole
        tensor = tensor.redistribute(placements=[Replicate()] * len(target))
        source = (REPLICATED,) * len(target)
    state = source
    for dim, after in exchange_steps(source, target):
        tensor = _step(tensor, dim, state, after)
        state = after
    return tensor


def _placements_of(tensor: DTensor) -> Placements | None:
    found = []
    for placement in tensor.placements:
        if type(placement) is Shard:
            found.append(placement.dim)
        elif placement == Replicate():
            found.append(REPLICATED)
        elif type(placement) is Partial and placement.reduce_op == "sum":
            found.append(PARTIAL)
        else:
            return None
    return tuple(found)


def _step(tensor: DTensor, dim: int, state: Placements, after: Placements) -> DTensor:
    mesh = tensor.device_mesh
    if after[dim] == PARTIAL:  # the first device has the term, the others have zeros
        whole = (*state[:dim], REPLICATED, *state[dim + 1 :])
        part = tensor.redistribute(placements=dtensor_placements(whole)).to_local()
        return whole_of(part if mesh.get_local_rank(dim) == 0 else torch.zeros_like(part), mesh, after)
    if state[dim] >= 0 and after[dim] >= 0:
        part = _swapped(tensor.to_local(), mesh, dim, state[dim], after[dim])
        return whole_of(part, mesh, after)
    return tensor.redistribute(placements=dtensor_placements(after))


def _swapped(part: torch.Tensor, mesh: DeviceMesh, dim: int, source: int, target: int) -> torch.Tensor:
    """Returns a device's part along another dimension: each sends to each other what that one keeps.

    DTensor would gather the whole on the CPU, twice the bytes.
    """
    group = mesh.get_group(dim)
    sent = torch.stack(part.tensor_split(mesh.size(dim), target)).contiguous()
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), source)
