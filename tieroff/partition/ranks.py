"""A model split over the ranks of this run: what `tieroff.wrap` does for `[parallel] plan`."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import distributed

from tieroff.core.sharding.placements import PlacementPlan, load_placements
from tieroff.errors import ConfigError
from tieroff.partition.parallelize import parallelize


def load_for_ranks(path: Path, ranks: int | None) -> tuple[PlacementPlan, int]:
    """Returns a plan and how many ranks it takes, one per device.

    Args:
        path: of the plan.
        ranks: how many there are; None where as many can be had as the plan takes.

    Raises:
        ConfigError: the file is no such plan, or it is of another number of devices.
    """
    plan = load_placements(path)
    devices = math.prod(plan.mesh_shape)
    if ranks not in (None, devices):
        raise ConfigError(
            f"[parallel] plan: {path} splits {plan.model or 'a model'} over {devices} devices, but there are {ranks} ranks: "
            f"start {devices} (tieroff launch --nproc-per-node {devices}), or partition the model for --devices {ranks}"
        )
    return plan, devices


def split_over_ranks(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, path: Path, ranks: int) -> None:
    """Splits a model in place over the ranks of the process group, which is made if there is none.

    Raises:
        ConfigError: as `load_for_ranks` and `parallelize`.
        StateError: as `parallelize`.
    """
    plan, _ = load_for_ranks(path, distributed.get_world_size() if distributed.is_initialized() else ranks)
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    parallelize(model, distributed.init_device_mesh(device, plan.mesh_shape), plan, optimizer)
