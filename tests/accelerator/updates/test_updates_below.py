"""The CPU updates what lies below a device: bits of the plain run, no byte of state over the link, and only where proven."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.accelerator import sim, target, vendor
from tests.accelerator.updates.loop import (
    LAYERS,
    LINK,
    STEPS_BEFORE,
    UPDATES,
    WIDTH,
    Loop,
    Make,
    config,
    differing,
    fused_adamw,
    machine_file,
    momentum,
)
from tests.support.covering import in_turn
from tests.support.oracles.bytes.device import DeviceBytes
from tieroff.core.machine import load_machine, save_machine
from tieroff.core.tensor import TensorClass, Tier
from tieroff.probe.calibration.updates import UpdateRates
from tieroff.probe.links import DEVICE_COPY_BYTES
from tieroff.runtime.backend.vendor import register_vendor
from tieroff.updates.native import HAS_UPDATES

pytestmark = pytest.mark.skipif(not HAS_UPDATES, reason="built without updates in host memory")

STEPS = 20


@dataclass(frozen=True)
class Case:
    """What is updated, or what never moves."""

    name: str
    make: Make = fused_adamw
    options: dict[str, Any] = field(default_factory=dict)


OPTIMIZERS = (Case("adamw"), Case("adamw-bf16", options={"dtype": torch.bfloat16}), Case("sgd", momentum))
STAYING = (
    Case("all-moves"),
    Case("counters-stay", options={"min_bytes": 1024, "bias": False}),
    Case("biases-stay", options={"min_bytes": 1024}),
)


def assert_updated_below_in_budget(loop: Loop, taken: DeviceBytes) -> None:
    """The step that ended was updated below and took no more than its budget; the allocator gives numbers 512 bytes each."""
    loop.assert_updated_below()
    assert loop.engine is not None
    assert taken.peak_bytes <= loop.engine.plan.budget_bytes[Tier.DEVICE] + 512 * len(loop.parameters)


@pytest.mark.skipif(not target.IS_SIMULATED, reason="needs the simulated device")
def test_the_cpu_updates_on_the_node_that_the_device_hangs_on(tmp_path: Path) -> None:
    node = {max(os.sched_getaffinity(0))}
    register_vendor(sim.NAME, vendor.SimulatedVendor(near_cpus=node))
    try:
        plain, wrapped = Loop(None), Loop(tmp_path)
        plain.steps(STEPS_BEFORE + 2)
        wrapped.steps(STEPS_BEFORE + 2)
        wrapped.assert_updated_below()
        names = {task: (task / "comm").read_text() for task in Path("/proc/self/task").iterdir()}
        bound = [os.sched_getaffinity(int(task.name)) for task, name in names.items() if name.startswith("tieroff-upd-")]
        assert node in bound
        assert differing(plain.finish(), wrapped.finish()) == []
    finally:
        vendor.install()


@pytest.mark.parametrize(("optimizer", "staying"), in_turn(OPTIMIZERS, STAYING))
def test_updates_below_have_the_bits_of_the_plain_run(optimizer: Case, staying: Case, tmp_path: Path) -> None:
    make, options = optimizer.make, {**optimizer.options, **staying.options}
    plain, wrapped = Loop(None, make, **options), Loop(tmp_path, make, **options)
    plain.steps(STEPS)
    taken = DeviceBytes(target.device())
    for index in range(STEPS):
        taken.begin()
        wrapped.step()
        if index >= 5:
            assert_updated_below_in_budget(wrapped, taken)
    assert wrapped.engine is not None
    assert "bit for bit: rounded as contracted" in wrapped.engine.explain()
    assert differing(plain.finish(), wrapped.finish()) == []


@pytest.mark.parametrize("budget", ["25%", "min"])
def test_gradients_that_several_backwards_add_to_move_between_them(budget: str, tmp_path: Path) -> None:
    """They have no room on the device until the last one. A hook that scales one writes it, while no copy reads it."""

    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    plain, wrapped = Loop(None), Loop(tmp_path, budget=budget)
    for loop in (plain, wrapped):
        loop.model[4].weight.register_post_accumulate_grad_hook(halve)
        taken = DeviceBytes(target.device())
        for index in range(10):
            taken.begin()
            loop.backward()
            loop.backward()
            loop.step()
            if index >= 5 and loop.engine is not None:
                assert_updated_below_in_budget(loop, taken)
                assert loop.engine.stats().moved_bytes_by_class["gradient"] > 3 * WIDTH * WIDTH * 4 * LAYERS
    assert differing(plain.finish(), wrapped.finish()) == []


@pytest.mark.parametrize("budget", ["25%", "min"])
def test_gradients_that_outlive_the_step_are_read_below_and_loaded_for_the_next_backward(budget: str, tmp_path: Path) -> None:
    plain, wrapped = Loop(None), Loop(tmp_path, budget=budget)
    plain.steps(12, set_to_none=False)
    taken = DeviceBytes(target.device())
    for index in range(12):
        taken.begin()
        wrapped.step(set_to_none=False)
        if index >= 6:
            assert_updated_below_in_budget(wrapped, taken)
    assert wrapped.engine is not None
    trace = wrapped.engine.trace
    assert all(tensor.is_persistent for tensor in trace.tensors if tensor.kind is TensorClass.GRADIENT)
    assert differing(plain.finish(), wrapped.finish()) == []


def test_the_host_waits_once_for_the_number_that_gradients_are_clipped_by(tmp_path: Path) -> None:
    """Each wait is for all that the device was given by then, updates of its own too."""
    loop = Loop(tmp_path)
    loop.steps(8)
    for _ in range(3):
        loop.backward()
        nn.utils.clip_grad_norm_(loop.parameters, 0.02)
        before = sim.counters()["blocking_copies"]
        loop.optimizer.step()
        assert sim.counters()["blocking_copies"] - before == 1
        loop.assert_updated_below()
        loop.optimizer.zero_grad()
    loop.finish()


def test_no_update_is_made_below_where_the_config_forbids_it(tmp_path: Path) -> None:
    plain, wrapped = Loop(None), Loop(tmp_path, update_on_host=False)
    for loop in (plain, wrapped):
        loop.steps(8)
    assert wrapped.engine is not None
    stats = wrapped.engine.stats()
    assert (stats.phase, stats.fallbacks, stats.host_updates) == ("planned", 0, 0)
    assert wrapped.engine.plan.host_updates == ()
    assert stats.moved_bytes_by_class["optimizer"] > 0
    assert differing(plain.finish(), wrapped.finish()) == []


def test_the_device_updates_what_ends_within_a_vector(tmp_path: Path) -> None:
    """Kernels round the last elements of such a parameter otherwise, so seldom that comparisons do not show it."""
    plain, wrapped = Loop(None, outputs=WIDTH + 4), Loop(tmp_path, outputs=WIDTH + 4)
    plain.steps(30)
    for index in range(30):
        wrapped.step()
        if index >= STEPS_BEFORE:
            wrapped.assert_updated_below()
    assert wrapped.engine is not None
    plan, trace = wrapped.engine.plan, wrapped.engine.trace
    written = {trace.tensors[tensor].name for update in plan.host_updates for tensor in trace.ops[update.op].writes}
    last = f"{2 * LAYERS - 2}.bias"
    assert last in {tensor.name for tensor in trace.tensors}
    assert last not in written
    assert differing(plain.finish(), wrapped.finish()) == []


def test_without_a_machine_file_a_run_measures_what_the_cpu_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, within a quarter of the host budget; what is not planned for is not measured."""
    measured = list[int]()

    def measure(_device: str, _seconds: float, *, host_bytes: int, copy_bytes: int) -> UpdateRates:
        assert copy_bytes == DEVICE_COPY_BYTES
        measured.append(host_bytes)
        return UpdateRates(UPDATES, UPDATES, 2 * LINK)

    monkeypatch.setattr("tieroff.session.links.measure_machine", lambda *_, **__: load_machine(machine_file(tmp_path)))
    monkeypatch.setattr("tieroff.session.links.measure_updates", measure)
    plain, wrapped, whole = Loop(None), Loop(tmp_path, machine=None), Loop(tmp_path, machine=None, budget="100%")
    for loop in (plain, wrapped, whole):
        loop.steps(10)
    wrapped.assert_updated_below()
    assert measured == [(16 << 20) // 4]
    assert differing(plain.finish(), wrapped.finish()) == []
    assert differing(plain, whole.finish()) == []


def test_updates_that_are_refused_twice_are_planned_without_at_once(tmp_path: Path) -> None:
    plain, wrapped = Loop(None), Loop(tmp_path)
    phases = list[tuple[str, int]]()
    for loop in (plain, wrapped):
        loop.steps(STEPS_BEFORE)
        for _ in range(4):
            loop.backward()
            held = [parameter.data for parameter in loop.parameters]
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            del held
            if loop.engine is not None:
                phases.append((loop.engine.stats().phase, loop.engine.stats().host_updates))
    assert phases == [("on demand", 0), ("on demand", 0), ("planned", 0), ("planned", 0)]
    assert differing(plain.finish(), wrapped.finish()) == []


def test_no_comparison_is_awaited_where_all_that_learns_is_too_small_to_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tieroff.session.links.measure_machine", lambda *_, **__: load_machine(machine_file(tmp_path)))
    monkeypatch.delattr("tieroff.session.links.measure_updates")  # nobody asks
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(target.device())
    for layer in model:
        layer.weight.requires_grad = False
    optimizer = fused_adamw([layer.bias for layer in model])
    tieroff.wrap(model, optimizer, config(tmp_path, "60%", machine=None, min_bytes=1 << 10), backend=target.backend())
    for _ in range(3):
        model(torch.ones(2, WIDTH, device=target.device())).square().sum().backward()
        optimizer.step()
    stats = tieroff.engine(model).stats()
    assert (stats.phase, stats.moved_bytes_by_class["optimizer"]) == ("planned", 0)
    assert stats.moved_bytes_by_class["parameter"] > 0
    tieroff.unwrap(model)


def test_a_machine_file_without_the_cpus_updates_is_believed(tmp_path: Path) -> None:
    silent = replace(load_machine(machine_file(tmp_path)), cpu_update_bytes_per_s=0)
    save_machine(silent, tmp_path / "silent.toml")
    wrapped = Loop(tmp_path, machine=str(tmp_path / "silent.toml"))
    wrapped.steps(6)
    assert wrapped.engine is not None
    assert wrapped.engine.stats().host_updates == 0
    assert "tieroff probe --out machine.toml" in wrapped.engine.explain()


def test_the_least_budget_has_updates_below_too(tmp_path: Path) -> None:
    """Each gradient leaves at once: what waits for a link has no room there."""
    plain, wrapped = Loop(None), Loop(tmp_path, budget="min")
    plain.steps(10)
    taken = DeviceBytes(target.device())
    for index in range(10):
        taken.begin()
        wrapped.step()
        if index >= 5:
            assert_updated_below_in_budget(wrapped, taken)
    assert differing(plain.finish(), wrapped.finish()) == []
