"""The count of a device's bytes that stands beside the engine's: what it sees, and what it leaves to lower tiers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import tieroff
from tests.support.oracles.bytes.device import DeviceBytes, Scratch, aside
from tieroff.runtime.backend.cpu import CpuBackend

CPU = torch.device("cpu")


def test_it_counts_tensors_until_they_die() -> None:
    taken = DeviceBytes(CPU)
    held = torch.empty(1000)
    view = held[10:]
    del held
    assert (taken.live_bytes, taken.peak_bytes) == (4000, 4000)
    del view
    torch.empty(500)
    assert (taken.live_bytes, taken.peak_bytes) == (0, 4000)
    taken.begin()
    assert taken.peak_bytes == 0


@pytest.mark.filterwarnings("ignore:.*script_method.*is deprecated:DeprecationWarning")
def test_it_counts_what_no_dispatch_mode_sees() -> None:
    @torch.compile
    def make(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).sin() @ x

    x = torch.randn(64, 64)
    make(x)
    taken = DeviceBytes(CPU)
    made = make(x)
    assert taken.live_bytes == made.nbytes
    assert taken.peak_bytes >= 2 * made.nbytes  # what the compiled code makes in between
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(torch.empty(1000)))
    thread.start()
    thread.join()
    assert taken.live_bytes == made.nbytes + 4000


def test_it_counts_the_backends_memory_and_no_lower_tier(tmp_path: Path) -> None:
    taken = DeviceBytes(CPU)
    given = CpuBackend().empty(5000)
    assert taken.live_bytes == 5000
    del given
    assert taken.live_bytes == 0
    model = torch.nn.Linear(256, 256)
    up_bytes = taken.live_bytes
    config = {"budget": {"device": "50%", "nvme": "8MiB"}, "nvme": {"dirs": [str(tmp_path)]}, "plan": {"min_bytes": 0}}
    tieroff.wrap(model, config={"device": "cpu", **config})
    assert taken.live_bytes <= up_bytes - 256 * 256 * 4
    tieroff.unwrap(model)
    assert taken.live_bytes >= up_bytes


def test_it_leaves_out_what_a_test_makes_aside() -> None:
    taken = DeviceBytes(CPU)
    with aside():
        copy = torch.empty(1000)
    assert taken.live_bytes == 0
    del copy
    assert taken.live_bytes == 0


def test_scratch_is_what_an_op_takes_and_gives_back() -> None:
    rnn, x = torch.nn.LSTM(16, 16), torch.randn(8, 4, 16)
    with Scratch(CPU, 1 << 20) as scratch:
        x.sin()
        assert scratch.most_bytes == 0
        rnn(x)
    assert scratch.most_bytes > 0


@pytest.mark.parametrize("budget", ["100%", "80%", "min"])
def test_a_model_that_sleeps_leaves_the_device(budget: str, tmp_path: Path) -> None:
    """With what a plan has kept there, and with gradients that no update has used."""

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(part for _ in range(6) for part in (torch.nn.Linear(128, 128), torch.nn.Tanh())))
        return model, torch.optim.SGD(model.parameters(), 0.01)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(16, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    plain, of_plain = make()
    taken = DeviceBytes(CPU)
    model, optimizer = make()
    tiers = {"budget": {"device": budget, "nvme": "8MiB"}, "nvme": {"dirs": [str(tmp_path)]}}
    tieroff.wrap(model, optimizer, {"device": "cpu", **tiers, "plan": {"min_bytes": 0, "background": False}})
    for _ in range(8):
        train(plain, of_plain)
        train(model, optimizer)
    up_bytes = taken.live_bytes
    tieroff.sleep(model)
    assert taken.live_bytes <= 1024
    assert budget == "min" or up_bytes >= 3 * 128 * 128 * 4
    model(torch.ones(16, 128)).square().mean().backward()
    tieroff.sleep(model)
    assert taken.live_bytes <= 1024
    with aside():
        plain(torch.ones(16, 128)).square().mean().backward()
        of_plain.step()
    optimizer.step()
    tieroff.unwrap(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    gradients = [[p.grad for p in each.parameters() if p.grad is not None] for each in (model, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert len(gradients[0]) == 12
