"""`tieroff.parallelize`: a module's parameters, inputs and results placed on a mesh as a partition says.

Placing parameters alone does not enforce a partition: DTensor picks each operator's split for itself, the cheapest by its
operands as they lie. `tieroff.partition.enforce` brings operands and results of each op where the partition has them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils._pytree import tree_map_only

from tieroff.core.sharding.graph import REPLICATED
from tieroff.core.sharding.placements import PlacementPlan, Placements
from tieroff.errors import ConfigError, StateError
from tieroff.partition.enforce import Follower
from tieroff.partition.exchange import bring, dtensor_placements, whole_of

log = logging.getLogger("tieroff")


def parallelize(
    model: torch.nn.Module, mesh: DeviceMesh, plan: PlacementPlan, optimizer: torch.optim.Optimizer | None = None
) -> torch.nn.Module:
    """Places a module on a mesh; the training loop stays as it is, with the same batch in every rank.

    Every rank calls it with the same values. Parameters become DTensors: an optimizer is made afterwards, or given here. The
    model takes plain tensors and returns plain ones, whole in every rank.

    Args:
        model: the module, with values; it is changed in place.
        mesh: a mesh of the plan's shape.
        plan: where everything lies; `load_placements` reads one that `tieroff partition --out` wrote.
        optimizer: one that was made before, and has not stepped: it gets the placed parameters.

    Returns:
        The same module.

    Raises:
        ConfigError: a mesh of another shape, a parameter that the plan does not name, that cannot be split so, or that is
            split already.
        StateError: the optimizer has stepped already.
    """
    if optimizer is not None and optimizer.state:
        raise StateError(
            f"expected {type(optimizer).__name__} before its first step, for its state is that of whole parameters: split the "
            "model first, then load a checkpoint into the optimizer"
        )
    if tuple(mesh.shape) != plan.mesh_shape:
        raise ConfigError(f"expected a mesh of shape {plan.mesh_shape}, as the plan of {plan.model}, got {tuple(mesh.shape)}")
    _check_parameters(model, plan)
    placed: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                if parameter not in placed:  # one that is shared stays shared
                    placed[parameter] = _placed(parameter, mesh, _wanted(plan, prefix, name))
                module._parameters[name] = placed[parameter]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = distribute_tensor(buffer, mesh, dtensor_placements(_wanted(plan, prefix, name)))
    if optimizer is not None:
        for group in optimizer.param_groups:
            group["params"] = [placed.get(parameter, parameter) for parameter in group["params"]]
    if plan.unknown_ops:
        log.warning("every rank runs these whole, for nobody says how to split them: %s", ", ".join(plan.unknown_ops))
    follower = Follower(mesh, plan)
    model.register_forward_pre_hook(functools.partial(_take_inputs, mesh, plan, follower), with_kwargs=True)
    model.register_forward_hook(functools.partial(_give_whole, follower))
    return model


def _check_parameters(model: torch.nn.Module, plan: PlacementPlan) -> None:
    split = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if split:
        raise ConfigError(f"expected whole parameters to split, but {split[0]!r} is a DTensor already: split the model once")
    found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    missing = [name for name in found if name not in plan.parameters]
    if missing:
        raise ConfigError(f"the plan of {plan.model} says nothing of the parameter {missing[0]!r}: it is of another model")
    for name, shape in found.items():
        groups = [1] * len(shape)
        for size, placement in zip(plan.mesh_shape, plan.parameters[name], strict=True):
            if placement >= len(shape):
                raise ConfigError(
                    f"parameter {name!r} of shape {shape} has no dimension {placement}: the plan is of another model"
                )
            if placement >= 0:
                groups[placement] *= size
        uneven = [dim for dim, (length, count) in enumerate(zip(shape, groups, strict=True)) if length % count]
        if uneven:
            raise ConfigError(
                f"parameter {name!r} of shape {shape} cannot be split evenly over {groups[uneven[0]]} devices along "
                f"dimension {uneven[0]}: partition the model as it is"
            )


def _wanted(plan: PlacementPlan, prefix: str, name: str) -> Placements:
    # The second name of a shared parameter is not in the plan; the first one placed it.
    return plan.parameters[f"{prefix}.{name}" if prefix else name]


def _placed(parameter: torch.nn.Parameter, mesh: DeviceMesh, placements: Placements) -> torch.nn.Parameter:
    split = distribute_tensor(parameter.detach(), mesh, dtensor_placements(placements))
    placed = torch.nn.Parameter(split, requires_grad=parameter.requires_grad)
    if placed.requires_grad:
        # The update wants the gradient where the parameter is; its operators would each fetch it for themselves.
        placed.register_hook(lambda gradient: bring(gradient, placements))
    return placed


def _take_inputs(
    mesh: DeviceMesh, plan: PlacementPlan, follower: Follower, module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Splits the model's inputs, tensor by tensor in order."""
    follower.begin_forward()
    wanted = iter(plan.inputs)

    def split(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        placements = next(wanted, (-1,) * mesh.ndim)
        # Each rank has the whole batch and keeps its part: nothing is sent.
        whole = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return whole.redistribute(mesh, dtensor_placements(placements))

    return tree_map_only(torch.Tensor, split, (args, dict(kwargs)))


def _give_whole(follower: Follower, module: torch.nn.Module, args: Any, out: Any) -> Any:
    """Gives back whole tensors, so that a loss is the same plain number in every rank."""
    follower.end_forward()
    return tree_map_only(DTensor, _Whole.apply, out)


class _Whole(torch.autograd.Function):
    """A tensor made whole in every rank. Its gradient stays whole: DTensor's own would be cut, and fetched again by each op."""

    @staticmethod
    def forward(context: Any, tensor: DTensor) -> torch.Tensor:
        context.mesh = tensor.device_mesh
        return bring(tensor, (REPLICATED,) * tensor.device_mesh.ndim).to_local()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return whole_of(gradient, context.mesh, (REPLICATED,) * context.mesh.ndim)
