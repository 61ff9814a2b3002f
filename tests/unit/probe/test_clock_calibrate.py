"""`tieroff calibrate` on the machine that the tests run on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tieroff.cli import app
from tieroff.core.machine import Machine, load_machine
from tieroff.probe.calibration.kernels import Calibration, sustained_s
from tieroff.tracing.clock.model import Clock
from tieroff.tracing.clock.work import Work


def test_calibrated_machine_takes_what_was_reached() -> None:
    found = Calibration(1e13, 1e14, 4e13, 1e12, 5e-6)
    machine = found.machine(Machine("box", compute_units=1, host_bytes=7), "cuda")
    assert (machine.host_bytes, machine.device_type, machine.device_memory_bytes_per_s) == (7, "cuda", 10**12)
    clock = Clock.of(machine)
    assert clock.work_s(Work("memory", 4, 0, 1e9)) == pytest.approx(5e-6 + 1e-3)
    assert clock.work_s(Work("attention", 2, 4 * 10**10, 0)) == pytest.approx(5e-6 + 1e-3)
    size = 1 << 14
    product = Work("matmul", 4, 2 * size**3, 0, (1, size, size, size))
    assert clock.work_s(product) == pytest.approx(2 * size**3 / 1e13, rel=0.01)


def test_sustained_time_is_that_of_one_call_after_the_first_half() -> None:
    calls: list[int] = []
    taken_s = sustained_s(lambda: calls.append(1), "cpu", 0.05)
    assert 0 < taken_s < 0.05 and len(calls) > 8


@pytest.mark.parametrize("is_built_for_a_gpu", [False, True])
def test_calibrate_writes_a_machine_that_plans_models(
    is_built_for_a_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_built_for_a_gpu:  # and there is none, as on a login node

        def current_accelerator(check_available: bool = False) -> torch.device | None:
            return None if check_available else torch.device("cuda")

        monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    path = tmp_path / "machine.toml"
    result = CliRunner().invoke(app, ["calibrate", "--seconds", "0.05", "--out", str(path), "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    machine = load_machine(path)
    assert machine.fp32_flops_per_s == figures["fp32_flops_per_s"] > 0
    assert machine.device_type == figures["device_type"] == "cpu"
    assert machine.cpu_update_bytes_per_s == figures["cpu_update_bytes_per_s"] > 0
    assert machine.host_memory_bytes_per_s == figures["host_memory_bytes_per_s"] > 0
    assert Clock.of(machine).constants.kernel_s == figures["kernel_s"] > 0
