"""Modules placed on several devices train as on one: 2 and 4 processes beside one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import tieroff
from tests.support import sharded
from tieroff.core.sharding.placements import PlacementPlan, load_placements, save_placements
from tieroff.errors import ConfigError
from tieroff.partition.partition_model import placements_of
from tieroff.planner.sharding.tofu import partition_step
from tieroff.tracing.sharded.capture import capture_step

STEPS = 5
MANY = pytest.mark.long  # four processes that each import torch
FACTORIES: dict[str, Callable[[], tuple[torch.nn.Module, tuple[Any, ...]]]] = {
    "gpt": sharded.plain_gpt,
    "mlp": sharded.small_mlp,
}


def made(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    model, (batch,) = FACTORIES[name]()
    return model, batch


def run_rank(rank: int, ranks: int, name: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    try:
        plan = load_placements(f"{folder}/plan.json")
        mesh = torch.distributed.init_device_mesh("cpu", plan.mesh_shape)
        model, batch = made(name)
        count = sum(parameter.numel() for parameter in model.parameters())
        tieroff.parallelize(model, mesh, plan)
        losses = sharded.train(model, batch, torch.optim.AdamW(model.parameters(), 1e-3), STEPS)
        held = sum(parameter.to_local().numel() for parameter in model.parameters())  # type: ignore[attr-defined]
        values = {key: value.full_tensor().detach() for key, value in model.named_parameters()}  # type: ignore[attr-defined]
        torch.save({"losses": losses, "held": held / count, "values": values}, f"{folder}/rank{rank}.pt")
    finally:
        dist.destroy_process_group()


@functools.cache
def alone(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, batch = made(name)
    losses = sharded.train(model, batch, torch.optim.AdamW(model.parameters(), 1e-3), STEPS)
    return losses, {key: value.detach() for key, value in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "ranks"), [("mlp", 2), ("gpt", 2), pytest.param("mlp", 4, marks=MANY), pytest.param("gpt", 4, marks=MANY)]
)
def test_training_on_several_ranks_is_that_on_one(name: str, ranks: int, tmp_path: Path) -> None:
    graph = capture_step(FACTORIES[name], sharded.MACHINE)
    save_placements(placements_of(partition_step(graph, ranks)), tmp_path / "plan.json")
    spawn(run_rank, (ranks, name, str(tmp_path)), nprocs=ranks)
    losses, values = alone(name)
    for rank in range(ranks):
        found = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        assert found["losses"] == pytest.approx(losses, rel=1e-6)
        assert found["held"] <= 1 / ranks * 1.02
        for key, value in values.items():
            assert float((found["values"][key] - value).abs().max()) <= 1e-5, key
    assert losses[-1] < losses[0]


class FakeMesh:
    """Stands for a mesh where no process group is wanted: what is refused is refused before anything is sent."""

    shape = (2,)
    ndim = 1


def mlp_plan(**changed: Any) -> PlacementPlan:
    parameters = {"up.weight": (0,), "up.bias": (0,), "down.weight": (1,), "down.bias": (0,)}
    return PlacementPlan("mlp", (2,), {**parameters, **changed.pop("parameters", {})}, ((0,),), {}, **changed)


def test_a_plan_that_does_not_fit_is_refused_by_name() -> None:
    mesh: Any = FakeMesh()
    model, _ = made("mlp")
    with pytest.raises(ConfigError, match=r"mesh of shape \(2, 2\)"):
        tieroff.parallelize(model, mesh, PlacementPlan("mlp", (2, 2), {}, (), {}))
    with pytest.raises(ConfigError, match=r"says nothing of the parameter 'up\.weight'"):
        tieroff.parallelize(model, mesh, PlacementPlan("mlp", (2,), {}, (), {}))
    with pytest.raises(ConfigError, match=r"'up.bias' of shape \(64,\) has no dimension 1"):
        tieroff.parallelize(model, mesh, mlp_plan(parameters={"up.bias": (1,)}))
    with pytest.raises(ConfigError, match=r"'up.weight' of shape \(63, 32\) cannot be split evenly over 2 devices"):
        tieroff.parallelize(sharded.Mlp(32, 63), mesh, mlp_plan())
