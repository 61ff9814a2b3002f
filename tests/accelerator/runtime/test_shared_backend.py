"""Several engines on one backend object: its threads and pinned memory last until the last engine ends."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.accelerator import sim, target
from tests.support.parity import NVME, config_for
from tieroff.runtime.backend.base import Backend

WIDTH, STEPS = 32, 9


def layers(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]).to(target.device())
    return model, torch.optim.AdamW(model.parameters())


def train(backend: Backend | None, config: dict[str, Any]) -> list[torch.Tensor]:
    """Trains two models in turn, the second one also when the first is a plain one again; returns their parameters."""
    pairs = [layers(0), layers(1)]
    if backend is not None:
        for model, optimizer in pairs:
            tieroff.wrap(model, optimizer, config, backend=backend)
    for index in range(2 * STEPS):
        if backend is not None and index == STEPS:
            tieroff.unwrap(pairs[0][0])
        torch.manual_seed(index)
        x = torch.randn(16, WIDTH).to(target.device())
        for model, optimizer in pairs:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if backend is not None:
        stats = tieroff.engine(pairs[1][0]).stats()
        assert (stats.phase, stats.fallbacks) == ("planned", 0)
        tieroff.unwrap(pairs[1][0])
    return [parameter.detach().cpu() for model, _ in pairs for parameter in model.parameters()]


def test_two_engines_on_one_backend_and_two_more_after_them(tmp_path: Path) -> None:
    config, backend = config_for(NVME, tmp_path), target.backend()
    pinned, threads = sim.counters()["pinned_bytes"], {thread.name for thread in threading.enumerate()}
    plain = train(None, config)
    for _ in range(2):
        assert all(map(torch.equal, plain, train(backend, config)))
        assert sim.counters()["pinned_bytes"] == pinned
        assert {thread.name for thread in threading.enumerate()} == threads


def test_a_wrap_that_fails_ends_its_use_of_a_shared_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: nn.Module) -> None:
        raise MemoryError("nothing is left")

    config, backend = config_for(NVME, tmp_path), target.backend()
    pinned, threads = sim.counters()["pinned_bytes"], {thread.name for thread in threading.enumerate()}
    (model, optimizer), (other, _) = layers(0), layers(1)
    tieroff.wrap(model, optimizer, config, backend=backend)
    monkeypatch.setattr("tieroff.runtime.managed.model.Unattached", refuse)
    with pytest.raises(MemoryError):
        tieroff.wrap(other, config=config, backend=backend)
    tieroff.unwrap(model)
    assert sim.counters()["pinned_bytes"] == pinned
    assert {thread.name for thread in threading.enumerate()} == threads
