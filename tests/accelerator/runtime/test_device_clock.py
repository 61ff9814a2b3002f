"""What the engine measures on a device is the device's time, not that of the host that issues its work."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import nn

import bench_clock
import tieroff
from tests.accelerator import sim, target
from tests.parity.late import LATE, late_tensors
from tests.support.models import GPT_WORKLOAD
from tests.support.parity import Trainer, Workload
from tieroff.core.machine import Machine, save_machine
from tieroff.core.plan import Plan
from tieroff.core.tensor import Tier
from tieroff.planner.predict import forecast
from tieroff.runtime.engine import Engine

H100 = Path(__file__).resolve().parents[3] / "configs/machines/h100_80gb.toml"
LINK = 2 << 30
KERNEL_S = 1e-3
WAITS_OF_THE_LOOP = 2  # `batch` copies pageable tensors to the device, for which the host waits


def machine(link_bytes_per_s: int = LINK) -> Machine:
    """A device whose kernels take a millisecond each, and links of this speed each way at once."""
    return target.machine_with_links(link_bytes_per_s)


def config(folder: Path, policy: str, device: str, known: Machine | None = None) -> dict[str, Any]:
    save_machine(known if known is not None else machine(), folder / "machine.toml")
    plan = {"policy": policy, "min_bytes": 0, "machine": str(folder / "machine.toml")}
    return {"budget": {"device": device, "host": "64MiB"}, "plan": plan}


class Trained(Protocol):
    """Trains a small GPT on the device's clock; returns its engine, which lives until the test ends."""

    def __call__(
        self, steps: int, policy: str = ..., device: str = ..., known: Machine | None = ..., workload: Workload = ...
    ) -> Engine: ...


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Trained]:
    models: list[nn.Module] = []

    def train(
        steps: int, policy: str = "auto", device: str = "50%", known: Machine | None = None, workload: Workload = GPT_WORKLOAD
    ) -> Engine:
        sim.set_machine(known if known is not None else machine(), kernel_s=KERNEL_S)
        trainer = Trainer(workload, target.device())
        models.append(trainer.model)
        tieroff.wrap(trainer.model, trainer.optimizer, config(tmp_path, policy, device, known))
        for index in range(steps):
            trainer.run(index)
        return tieroff.engine(trainer.model)

    yield train
    for model in models:
        tieroff.unwrap(model)
    models.clear()
    gc.collect()


def test_an_op_lasts_as_long_as_its_kernels(trained: Trained) -> None:
    engine = trained(4)
    kernels = [op.duration_ns / (KERNEL_S * 1e9) for op in engine.trace.ops]
    # Kernels take a whole number of milliseconds, and the host issued each in a fraction of one.
    whole = [count for count in kernels if abs(count - round(count)) < 0.02]
    assert sum(kernels) > 100
    assert len(whole) > 0.9 * len(kernels), "expected only ops with the user's own copies to the host to last otherwise"


def _step_without_looks(trainer: Trainer) -> None:
    """A wait for what user code reads in the middle of an op would be of both."""
    trainer.model(*trainer.batch()).float().square().mean().backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def test_compute_and_waits_add_up_to_the_step(trained: Trained) -> None:
    engine = trained(8, known=machine(1 << 20), workload=replace(GPT_WORKLOAD, step=_step_without_looks))
    stats = engine.stats()
    assert stats.phase == "planned"
    assert stats.stall_s > 0.1 * stats.step_s, "expected waits behind a link of 1 MiB/s"
    assert stats.compute_s + stats.stall_s == pytest.approx(stats.step_s, rel=0.1)


def test_a_link_is_as_fast_as_the_device_says(trained: Trained) -> None:
    engine = trained(8, policy="floor", device="100%")
    for span in engine.timeline.transfers:
        if span.size_bytes >= 4096:
            assert span.size_bytes / (span.stop_ns - span.start_ns) * 1e9 == pytest.approx(LINK, rel=0.05)


def test_a_timeline_also_has_when_the_host_began_and_ended_ops(trained: Trained) -> None:
    before_ns = time.time_ns()
    timeline = trained(8, policy="floor", device="100%").timeline
    assert len(timeline.host_ns) == 2 * len(timeline.ops)
    assert list(timeline.host_ns) == sorted(timeline.host_ns)
    assert timeline.began_ns > before_ns


@pytest.mark.parametrize("link", [LINK, 16 << 20], ids=["fast", "slow"])
def test_a_step_that_leaves_copies_to_the_next_one_takes_what_its_plan_says(link: int, trained: Trained) -> None:
    engine = trained(10, policy=LATE, device="100%", known=machine(link))
    late = late_tensors(engine.plan)
    assert late
    predicted = forecast(engine.plan, engine.trace, machine(link))
    assert predicted is not None
    assert engine.timeline.step_ns == pytest.approx(predicted[0], rel=0.03)
    crossing = [span for span in engine.timeline.transfers if span.stop_ns > engine.timeline.step_ns and span.tensor in late]
    assert crossing or link == LINK, "expected copies that end in the next step"


@pytest.mark.parametrize("device", ["75%", "50%"])
@pytest.mark.parametrize("link", [LINK, 64 << 20, 1 << 20], ids=["fast", "slow", "slowest"])
def test_a_planned_step_takes_what_its_plan_says(device: str, link: int, trained: Trained) -> None:
    """Where the host is not the limit: on this clock it takes no time."""
    engine = trained(10, device=device, known=machine(link))
    ran = engine.timeline
    plan: Plan = engine.plan
    predicted = forecast(plan, engine.trace, machine(link))
    assert predicted is not None
    assert ran.step_ns == pytest.approx(predicted[0], rel=0.03)
    assert plan.peak_bytes[Tier.DEVICE] <= plan.budget_bytes[Tier.DEVICE]


def test_reading_figures_waits_for_the_device_and_training_does_not(tmp_path: Path) -> None:
    sim.set_machine(None)
    trainer = Trainer(GPT_WORKLOAD, target.device())
    known = config(tmp_path, "floor", "100%")
    known["plan"]["background"] = False  # else the plan comes when another process has made it, perhaps in the step that counts
    tieroff.wrap(trainer.model, trainer.optimizer, known)

    def step() -> None:
        loss = trainer.workload.objective(trainer.model, *trainer.batch())
        loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    for _ in range(6):
        step()
    torch.accelerator.synchronize()
    before = sim.counters()["host_waits"]
    step()
    assert sim.counters()["host_waits"] - before <= WAITS_OF_THE_LOOP
    assert tieroff.engine(trainer.model).stats().phase == "planned"
    tieroff.unwrap(trainer.model)


@pytest.mark.parametrize(
    ("kind", "layers", "width", "slower", "budget"),
    [("gpt2", 12, 64, 1000.0, "50%"), ("llama", 8, 128, 1000.0, "50%"), ("llama", 8, 256, 16.0, "60%")],
    ids=["gpt2", "llama", "copies are waited for"],
)
def test_a_stack_of_blocks_takes_what_its_plan_says(
    kind: str, layers: int, width: int, slower: float, budget: str, tmp_path: Path
) -> None:
    """With the rates of an H100, as much slower as the blocks are smaller; or so that copies are waited for."""
    machine_file = bench_clock.simulate(H100, slower, tmp_path)
    row = bench_clock.measure(bench_clock.Subject(kind, layers, width, 1, 1, 32), budget, sim.NAME, machine_file, 8)
    assert row["phase"] == "planned"
    assert row["moved"] > 0
    assert row["measured/predicted"] == pytest.approx(1, rel=0.03)
