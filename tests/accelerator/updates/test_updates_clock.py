"""On the device's clock a step whose updates the CPU makes takes what its plan says, and far less than with the device's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.accelerator import sim, target
from tieroff.core.machine import Machine, load_machine, save_machine
from tieroff.planner.predict import forecast
from tieroff.runtime.optimizer.host import updates
from tieroff.updates.native import HAS_UPDATES
from tieroff.updates.pool import make_pool

# Alone: the host has to be ahead of the device, whose clock is measured.
pytestmark = [pytest.mark.alone, pytest.mark.skipif(not HAS_UPDATES, reason="built without updates in host memory")]

SLOWER = 120  # kernels of the simulated device compute: so few tokens take as long as so many times as many
ADAM_STATE_SHARE = 8 / 28  # of the bytes that an update of Adam reads and writes
LAYERS, WIDTH, HEAD, SHARED_BY, TOKENS, STEPS = 8, 256, 32, 2, 32, 9


class Clocked:
    """Native threads that take the device's time: as much as the machine says, one job after the other."""

    def __init__(self, bytes_per_s: int) -> None:
        self._native, self._bytes_per_s = make_pool(), bytes_per_s
        self._free_ns = 0
        self._ends_ns: dict[int, int] = {}

    def submit(self, parts: Sequence[Any], gates: Sequence[Any], counters: Sequence[int]) -> int:
        ticket: int = self._native.submit(parts, gates, counters)
        state_bytes = sum(part.moved_bytes for part in parts) * ADAM_STATE_SHARE
        self._free_ns = max(sim.host_time_ns(), self._free_ns) + round(state_bytes * 1e9 / self._bytes_per_s)
        self._ends_ns[ticket] = self._free_ns
        return ticket

    def is_done(self, ticket: int) -> bool:
        return self._native.wait(ticket, 60.0) and self._ends_ns[ticket] <= sim.host_time_ns()

    def wait(self, ticket: int, timeout_s: float) -> bool:
        sim.advance_host(max(self._ends_ns[ticket] - sim.host_time_ns(), 0))
        return self._native.wait(ticket, timeout_s)

    def settle(self, timeout_s: float) -> bool:
        return self._native.settle(timeout_s)

    @property
    def last_ticket(self) -> int:
        return self._native.last_ticket

    def close(self) -> None:
        self._native.close()


class Attention(nn.Module):
    """Llama's without the rotation: each key and value is shared by several queries."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, WIDTH // SHARED_BY, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part(x).view(len(x), -1, HEAD).transpose(0, 1) for part in (self.query, self.key, self.value))
        key, value = (part.repeat_interleave(SHARED_BY, 0) for part in (key, value))
        ahead = torch.full((len(x), len(x)), -1e9, device=x.device).triu(1)
        weights = (query @ key.transpose(1, 2) * HEAD**-0.5 + ahead).softmax(-1)
        out: torch.Tensor = self.out((weights @ value).transpose(0, 1).reshape(len(x), WIDTH))
        return out


class Block(nn.Module):
    """A layer of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner_norm, self.attention = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH), Attention()
        sizes = (WIDTH, 4 * WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)
        self.gate, self.up, self.down = (nn.Linear(*each, bias=False) for each in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        y = self.inner_norm(x)
        out: torch.Tensor = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return out


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """An H100 whose kernels are slower."""
    known = load_machine(Path(__file__).parents[3] / "configs/machines/h100_80gb.toml")
    rates = ("fp32_flops_per_s", "bf16_flops_per_s", "device_memory_bytes_per_s")
    slower: dict[str, Any] = {name: type(getattr(known, name))(getattr(known, name) / SLOWER) for name in rates}
    slower["device_memory_bytes_per_s"] *= 20  # else updates on the device would take most of the step
    made = replace(known, cpu_update_bytes_per_s=80 * 10**9, host_memory_bytes_per_s=0, **slower)
    monkeypatch.setattr(updates, "make_pool", lambda _near_cpus: Clocked(made.update_bytes_per_s))
    yield made
    sim.set_machine(None)


def run(machine: Machine, folder: Path, *, update_on_host: bool) -> tuple[float, float]:
    """Returns what a step takes, and what was predicted, in ns."""
    sim.reset()
    sim.set_machine(machine)
    save_machine(machine, folder / "machine.toml")
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[Block() for _ in range(LAYERS)]).to(target.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    plan = {"machine": str(folder / "machine.toml"), "background": False, "update_on_host": update_on_host}
    config = {"budget": {"device": "30%", "host": 1 << 30}, "nvme": {"dirs": []}, "plan": plan}
    tieroff.wrap(model, optimizer, config, backend=target.backend())
    x = torch.randn(TOKENS, WIDTH).to(target.device())
    for _ in range(STEPS):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = tieroff.engine(model)
    stats, predicted = engine.stats(), forecast(engine.plan, engine.trace, machine)
    assert (stats.phase, stats.fallbacks) == ("planned", 0)
    assert bool(stats.host_updates) is update_on_host
    step_ns = float(sorted(step.step_ns for step in engine.history.steps[-4:])[2])
    tieroff.unwrap(model)
    return step_ns, float(predicted[0])


def test_a_step_with_updates_below_takes_what_its_plan_says_and_less_than_with_the_devices(
    machine: Machine, tmp_path: Path
) -> None:
    on_device, _ = run(machine, tmp_path, update_on_host=False)
    below, predicted = run(machine, tmp_path, update_on_host=True)
    assert below == pytest.approx(predicted, rel=0.05)
    assert below <= 0.65 * on_device
