"""Modules placed on several devices train as on one: 2 and 4 processes beside one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import tieroff
from tests.parity.partition.wire import Wire
from tests.support import sharded
from tests.support.sharded import FACTORIES, Values, distance, held_share, made, whole
from tieroff.core.sharding.placements import OpPlacement, PlacementPlan, load_placements, save_placements
from tieroff.errors import ConfigError
from tieroff.partition.enforce import Follower
from tieroff.study.sharding.capture import capture_step
from tieroff.study.sharding.partition_model import placements_of
from tieroff.study.sharding.tofu import partition_step

STEPS = 5


def run_rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    try:
        told = {name: run_model(name, load_placements(f"{folder}/{name}.json")) for name in FACTORIES}
        torch.save(told, f"{folder}/rank{rank}.pt")
    finally:
        dist.destroy_process_group()


def run_model(name: str, plan: PlacementPlan) -> dict[str, Any]:
    mesh = torch.distributed.init_device_mesh("cpu", plan.mesh_shape)
    model, batch = made(name)
    count = sum(parameter.numel() for parameter in model.parameters())
    tieroff.parallelize(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with Wire() as wire:
        losses = sharded.train(model, batch, optimizer, 1)
    losses += sharded.train(model, batch, optimizer, STEPS - 1)
    held = held_share(model, count)
    double, batch = made(name, torch.float64)
    tieroff.parallelize(double, mesh, plan)
    sharded.train(double, batch, torch.optim.AdamW(double.parameters(), 1e-3), STEPS)
    doubles = whole(double)
    sums = sharded.train_otherwise(double, batch, torch.optim.AdamW(double.parameters(), 1e-3))
    found = {"sums": sums, "losses": losses, "held": held, "sent": wire.sent_bytes, "unknown": wire.unknown}
    return {**found, "values": whole(model), "doubles": doubles}


@functools.cache
def alone(name: str, dtype: torch.dtype) -> tuple[list[float], Values]:
    model, batch = made(name, dtype)
    losses = sharded.train(model, batch, torch.optim.AdamW(model.parameters(), 1e-3), STEPS)
    return losses, whole(model)


@functools.cache
def alone_otherwise(name: str) -> list[float]:
    model, batch = made(name, torch.float64)
    sharded.train(model, batch, torch.optim.AdamW(model.parameters(), 1e-3), STEPS)
    return sharded.train_otherwise(model, batch, torch.optim.AdamW(model.parameters(), 1e-3))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_training_on_several_ranks_is_that_on_one(ranks: int, tmp_path: Path) -> None:
    partitions = {name: partition_step(capture_step(make, sharded.MACHINE), ranks) for name, make in FACTORIES.items()}
    for name, partition in partitions.items():
        save_placements(placements_of(partition), tmp_path / f"{name}.json")
    spawn(run_rank, (ranks, str(tmp_path)), nprocs=ranks)
    everyone = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]
    for name, partition in partitions.items():
        told = [found[name] for found in everyone]
        assert [found["unknown"] for found in told] == [[]] * ranks, name
        assert sum(found["sent"] for found in told) == pytest.approx(partition.exchanged_bytes, rel=0.01), name
        losses, values = alone(name, torch.float32)
        assert losses[-1] < losses[0]
        for found in told:
            assert found["losses"] == pytest.approx(losses, rel=1e-6), name
            assert found["sums"] == pytest.approx(alone_otherwise(name), rel=1e-9), name
            assert found["held"] <= 1 / ranks * 1.02, name
            assert distance(found["values"], values) <= 1e-5, name
            assert distance(found["doubles"], alone(name, torch.float64)[1]) <= 1e-10, name


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


def test_a_plan_of_something_else_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    mesh: Any = FakeMesh()
    ops = (OpPlacement("aten.relu.default", ((4, 4),), ((0,),), ((0,),), ((0,),)),) * 4
    follower = Follower(mesh, mlp_plan(ops=ops, first_backward=4))
    for _ in range(2):
        follower.begin_forward()
        follower.end_forward()
    assert [record.message.split(" were run")[0] for record in caplog.records] == ["of 4 ops of forward in the partition 0"]
