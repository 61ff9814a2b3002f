"""Modules placed on several devices with asynchronous collectives train as on one, and every access is ordered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.spawn import spawn

import tieroff
from tests.accelerator import communication, sim, target
from tests.support import sharded
from tests.support.sharded import FACTORIES, Values, distance, held_share, made, whole
from tieroff.core.sharding.placements import PlacementPlan, load_placements, save_placements
from tieroff.study.sharding.capture import capture_step
from tieroff.study.sharding.partition_model import placements_of
from tieroff.study.sharding.tofu import Partition, partition_step

pytestmark = pytest.mark.skipif(not target.IS_SIMULATED, reason="each rank has a simulated device of its own")

STEPS = 5
TIMEOUT = timedelta(seconds=60)
LATE_S = 0.0005
"""Copies come up to so much later than they could: what does not wait for them reads poison."""

Launched = tuple[dict[str, Partition], list[dict[str, Any]]]


def run_rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    sim.load()
    sim.set_late_links(LATE_S)
    communication.register()
    place = f"file://{folder}/rendezvous"
    dist.init_process_group(communication.NAME, init_method=place, rank=rank, world_size=ranks, timeout=TIMEOUT)
    try:
        told = {"orders": run_orders(), "refusals": run_refused(), "models": run_models(folder)}
        torch.save(told, f"{folder}/rank{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    assert [thread.name for thread in threading.enumerate() if thread.name == communication.NAME] == []


def run_models(folder: str) -> dict[str, Any]:
    plans = {name: load_placements(f"{folder}/{name}.json") for name in FACTORIES}
    # One for all: DTensor takes a second mesh that is equal for the first one, whose groups would count in its place.
    mesh = dist.init_device_mesh(sim.NAME, plans["mlp"].mesh_shape)
    return {name: run_model(name, mesh, plan) for name, plan in plans.items()}


def run_model(name: str, mesh: DeviceMesh, plan: PlacementPlan) -> dict[str, Any]:
    sim.reset()
    model, batch = made(name, device=sim.NAME)
    count = sum(parameter.numel() for parameter in model.parameters())
    tieroff.parallelize(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    before = sent_bytes(mesh)
    losses = sharded.train(model, batch, optimizer, 1)
    sent = sent_bytes(mesh) - before
    losses += sharded.train(model, batch, optimizer, STEPS - 1)
    found = {"losses": losses, "sent": sent, "held": held_share(model, count), "values": whole(model)}
    return {**found, "races": sim.races(), "mistakes": sim.mistakes()}


def sent_bytes(mesh: DeviceMesh) -> float:
    groups: list[Any] = mesh.get_all_groups()
    return sum(group.sent_bytes for group in groups)


def alone(name: str) -> tuple[list[float], Values]:
    model, batch = made(name, device=sim.NAME)
    losses = sharded.train(model, batch, torch.optim.AdamW(model.parameters(), 1e-3), STEPS)
    return losses, whole(model)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)])
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """A partition of each model, and what each rank told."""
    count, folder = request.param, tmp_path_factory.mktemp("split")
    partitions = {name: partition_step(capture_step(make, sharded.MACHINE), count) for name, make in FACTORIES.items()}
    for name, partition in partitions.items():
        save_placements(placements_of(partition), folder / f"{name}.json")
    spawn(run_rank, (count, str(folder)), nprocs=count)
    return partitions, [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(count)]


@pytest.mark.parametrize("name", FACTORIES)
def test_training_with_asynchronous_collectives_is_that_on_one_device(name: str, launched: Launched) -> None:
    partitions, everyone = launched
    told = [found["models"][name] for found in everyone]
    # Fused attention is another operator there than on the CPU, for which the plan is made.
    share = 0.10 if name == "gpt" else 0.01
    assert sum(found["sent"] for found in told) == pytest.approx(partitions[name].exchanged_bytes, rel=share)
    losses, values = alone(name)
    assert losses[-1] < losses[0]
    for found in told:
        assert found["races"] == []
        assert found["mistakes"] == {}
        assert found["losses"] == pytest.approx(losses, rel=1e-6)
        assert found["held"] <= 1 / len(told) * 1.02
        assert distance(found["values"], values) <= 1e-5


def run_orders() -> dict[str, list[str]]:
    return {"waiting": races_of(use_after_wait), "reading": races_of(read_at_once), "writing": races_of(write_at_once)}


def races_of(use: Callable[[dist.Work, torch.Tensor, torch.Tensor], object]) -> list[str]:
    """Returns the races of what is done with a collective's tensors after it was begun."""
    sim.reset()
    given, got = torch.ones(64, device=sim.NAME), torch.zeros(64, device=sim.NAME)
    work: Any = dist.all_to_all_single(got, given, async_op=True)
    use(work, given, got)
    work.wait()
    assert got.cpu().sum() == 64, "expected what the ranks gave"
    return sim.races()


def use_after_wait(work: dist.Work, given: torch.Tensor, got: torch.Tensor) -> None:
    given + 1
    work.wait()
    given.add_(got)


def read_at_once(work: dist.Work, given: torch.Tensor, got: torch.Tensor) -> None:
    got + 1


def write_at_once(work: dist.Work, given: torch.Tensor, got: torch.Tensor) -> None:
    given.mul_(1)


def test_what_a_collective_uses_before_it_is_waited_for_is_a_race(launched: Launched) -> None:
    for found in launched[1]:
        told = found["orders"]
        assert told["waiting"] == []
        (read,), (written,) = told["reading"], told["writing"]
        assert "read by aten::add " in read and "write by copy to device" in read and f"in {communication.NAME}" in read
        assert "write by aten::mul" in written and "read by copy to host" in written


def run_refused() -> list[str]:
    refused = []
    for given in (torch.ones(4), torch.ones(4, 4, device=sim.NAME).t(), torch.ones(8, device=sim.NAME)):
        try:
            dist.all_to_all_single(torch.ones(4, device=sim.NAME), given)
        except (ValueError, RuntimeError) as error:
            refused.append(f"{error} {error.__cause__}")
    return refused


def test_a_collective_that_cannot_be_done_is_an_error_of_its_caller(launched: Launched) -> None:
    for found in launched[1]:
        host, strided, sizes = found["refusals"]
        assert "got a contiguous one of cpu" in host
        assert "got a strided one of sim:0" in strided
        assert "a collective of the simulated device failed" in sizes and "size" in sizes
