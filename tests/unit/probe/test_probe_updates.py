"""What the CPU updates in host memory, as `tieroff probe` and `tieroff calibrate` measure it and a machine has it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tieroff.core.machine import Machine
from tieroff.probe.calibration.updates import TENSOR_BYTES, TENSORS, UpdateRates, measure_updates
from tieroff.probe.links import DEVICE_COPY_BYTES, touched
from tieroff.probe.machine import measure_machine


@pytest.mark.parametrize(("device_type", "memory"), [("cpu", 40 * 3.5 + 2 * 30), ("cuda", 40 * 3.5 + 30)])
def test_memory_carries_what_updates_and_copies_move_at_once(device_type: str, memory: int) -> None:
    machine = UpdateRates(100, 40, 30).of(Machine(device_type=device_type))
    assert (machine.cpu_update_bytes_per_s, machine.host_memory_bytes_per_s) == (100, memory)


def test_updates_are_predicted_as_they_were_measured_beside_copies() -> None:
    machine = Machine(device_type="cuda", d2h_bytes_per_s=100, h2d_bytes_per_s=150, duplex_share=0.8)
    # 200 of copies and 100 of state want 550 bytes a second of the memory; it has a half of that, in full use.
    assert UpdateRates(100, 50, 100).of(machine).update_bytes_per_s == 50
    assert UpdateRates(100, 100, 200).of(machine).update_bytes_per_s == 100


def test_a_machine_is_measured_with_updates_where_they_are_asked_for() -> None:
    machine = measure_machine("cpu", seconds=0.1, has_updates=True)
    assert machine.cpu_update_bytes_per_s > 10**6
    assert machine.host_memory_bytes_per_s > 3.5 * 10**6
    assert machine.device_type == "cpu"


@pytest.mark.parametrize(("host_bytes", "taken"), [(8 << 20, 8 << 20), (1 << 40, TENSORS * TENSOR_BYTES)])
def test_updates_are_measured_in_the_memory_that_there_is(host_bytes: int, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()

    def noted(size_bytes: int) -> npt.NDArray[np.uint8]:
        sizes.append(size_bytes)
        return touched(size_bytes)

    monkeypatch.setattr("tieroff.probe.calibration.updates.touched", noted)
    rates = measure_updates("cpu", 0.0, host_bytes=host_bytes, copy_bytes=DEVICE_COPY_BYTES)
    assert rates.state_bytes_per_s > 10**6
    assert sum(sizes[:TENSORS]) == taken
    assert set(sizes[TENSORS:]) == {DEVICE_COPY_BYTES}
