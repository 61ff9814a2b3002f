"""DDP on two ranks, each with a simulated device: gradients are summed asynchronously while their parameters lie below."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import tieroff
from tests.accelerator import communication, sim, target, vendor
from tests.support.parity import HOST, PEAK_TOLERANCE, config_for
from tieroff.core.tensor import Tier

pytestmark = pytest.mark.skipif(not target.IS_SIMULATED, reason="each rank has a simulated device of its own")

WIDTH, LAYERS, STEPS, RANKS = 64, 6, 8, 2
TIMEOUT = timedelta(seconds=300)
LATE_S = 0.0005
BUCKET_MB = 0.03  # about two layers
CASES = [(before, as_view) for before in (True, False) for as_view in (True, False)]


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    sim.load()
    vendor.install()
    sim.set_late_links(LATE_S)
    communication.register()
    place = f"file://{folder}/rendezvous"
    dist.init_process_group(communication.NAME, init_method=place, rank=rank, world_size=RANKS, timeout=TIMEOUT)
    try:
        told = {case: (train(rank, case, None), train(rank, case, Path(folder))) for case in CASES}
        torch.save(told, f"{folder}/rank{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def train(rank: int, case: tuple[bool, bool], folder: Path | None) -> dict[str, Any]:
    """Returns the losses and values of a training, and what the last step did; moved where there is a folder."""
    before, as_view = case
    sim.reset()
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers).to(target.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def wrap() -> None:
        if folder is not None:
            config = config_for(HOST, folder, policy="auto", device="60%")
            tieroff.wrap(model, optimizer, config, backend=target.backend())

    if not before:
        wrap()
    outer = nn.parallel.DistributedDataParallel(
        model, init_sync=False, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=as_view
    )
    if before:
        wrap()
    losses: list[Tensor] = []
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        loss = outer(torch.randn(16, WIDTH).to(target.device())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    found: dict[str, Any] = {}
    if folder is not None:
        engine = tieroff.engine(model)
        stats, plan = engine.stats(), engine.plan
        found = {"phase": stats.phase, "fallbacks": stats.fallbacks, "moved": stats.moved_bytes_by_class}
        found |= {"peak": stats.peak_device_bytes, "planned_peak": plan.peak_bytes[Tier.DEVICE]}
        found |= {"budget": plan.budget_bytes[Tier.DEVICE]}
        tieroff.unwrap(model)
    values = [parameter.detach().cpu() for parameter in model.parameters()]
    return found | {"losses": losses, "values": values, "races": sim.races(), "mistakes": sim.mistakes()}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[bool, bool], Any]]:
    """What each rank told of each case."""
    folder = tmp_path_factory.mktemp("ranks")
    spawn(run_rank, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]


def name_of(case: tuple[bool, bool]) -> str:
    before, as_view = case
    return f"{'before' if before else 'after'}_wrap-{'views' if as_view else 'copies'}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_two_ranks_train_as_without_the_engine(case: tuple[bool, bool], told: list[dict[tuple[bool, bool], Any]]) -> None:
    for plain, wrapped in (ranks[case] for ranks in told):
        assert len({float(loss) for loss in plain["losses"]}) == STEPS
        assert all(map(torch.equal, plain["losses"], wrapped["losses"]))
        assert all(map(torch.equal, plain["values"], wrapped["values"]))
        assert (wrapped["phase"], wrapped["fallbacks"]) == ("planned", 0)
        assert sum(wrapped["moved"].values()) > 0
        assert wrapped["races"] == plain["races"] == []
        assert wrapped["mistakes"] == plain["mistakes"]
    first, second = (ranks[case][1] for ranks in told)
    assert all(map(torch.equal, first["values"], second["values"]))
    assert not torch.equal(first["losses"][0], second["losses"][0])  # each rank has data of its own


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_gradients_that_wait_for_their_sums_are_in_the_plan(
    case: tuple[bool, bool], told: list[dict[tuple[bool, bool], Any]]
) -> None:
    for _, wrapped in (ranks[case] for ranks in told):
        assert wrapped["peak"] <= wrapped["budget"]
        assert abs(wrapped["peak"] - wrapped["planned_peak"]) <= PEAK_TOLERANCE * wrapped["planned_peak"]
