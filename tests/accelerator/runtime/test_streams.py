"""Streams that people compute on: the engine's copies are in order with each of them, and leave each thread its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tieroff
from tests.accelerator import sim, target
from tests.support.parity import HOST, NVME, Tiers, config_for
from tieroff.runtime.backend.compute import entry_of

WIDTH, STEPS = 16, 8


class TwoStreams(nn.Module):
    """Uses one layer on two streams at once, and orders them only where one uses what the other has made."""

    def __init__(self, side: torch.Stream) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self._side = side

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        main = torch.accelerator.current_stream(target.device())
        self._side.wait_stream(main)
        with self._side:
            aside = self.shared(x * 2)
        here = self.shared(x)
        main.wait_stream(self._side)
        aside.record_stream(main)
        output: Tensor = self.last(here + aside)
        return output


@pytest.fixture
def silent() -> Iterator[None]:
    """PyTorch warns of gradients that come from two streams, in the plain run too."""
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    yield
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)


def train(tiers: Tiers | None, folder: Path) -> list[Tensor]:
    torch.manual_seed(0)
    model = TwoStreams(torch.Stream(target.device())).to(target.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if tiers is not None:
        tieroff.wrap(model, optimizer, config_for(tiers, folder), backend=target.backend())
    seen = []
    for index in range(STEPS):
        torch.manual_seed(index)
        loss = model(torch.randn(8, WIDTH).to(target.device())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().cpu())
    if tiers is not None:
        stats = tieroff.engine(model).stats()
        assert (stats.phase, stats.fallbacks) == ("planned", 0)
        assert stats.moved_bytes_by_class["parameter"] > 0
        tieroff.unwrap(model)
    return [*seen, *(parameter.detach().cpu() for parameter in model.parameters())]


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("tiers", [HOST, NVME], ids=lambda tiers: tiers.name)
def test_a_model_on_two_streams_computes_the_same(tiers: Tiers, tmp_path: Path) -> None:
    """A parameter that was brought up for one stream is there for the other, and leaves behind the use by both."""
    plain = train(None, tmp_path)
    freed = sim.counters()["unordered_frees"]  # by PyTorch itself, of what the second stream has saved
    sim.reset()
    sim.set_late_links(0.003)
    assert all(map(torch.equal, plain, train(tiers, tmp_path)))
    sim.check()
    assert sim.counters()["unordered_frees"] <= freed
    sim.reset()


def test_threads_that_enter_one_stream_come_back_to_their_own() -> None:
    shared = torch.Stream(target.device())
    lost: list[torch.Stream] = []

    def enter() -> None:
        own = torch.Stream(target.device())
        torch.accelerator.set_stream(own)
        for _ in range(500):
            with entry_of(shared):
                torch.empty(1, device=target.device()).fill_(1)  # lets the other thread run
            if torch.accelerator.current_stream() != own:
                lost.append(torch.accelerator.current_stream())
                torch.accelerator.set_stream(own)

    threads = [threading.Thread(target=enter) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lost == []
