"""Links of an accelerator, measured: without a machine file, plans are made from these."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.accelerator import sim, target
from tieroff.core.machine import Machine
from tieroff.probe.links import measure_links
from tieroff.probe.machine import measure_machine


def test_links_are_measured_between_pinned_memory_and_the_device() -> None:
    rates = measure_links(target.NAME, seconds=0.3)
    assert rates.d2h_bytes_per_s > 0 and rates.h2d_bytes_per_s > 0
    assert 0 < rates.duplex_share <= 1
    counted = sim.counters()
    assert counted["bytes_to_device"] > 0 and counted["bytes_to_host"] > 0


def test_links_are_measured_whatever_the_programs_default_device_is() -> None:
    with torch.device(target.NAME):
        assert measure_links(target.NAME, seconds=0.1).d2h_bytes_per_s > 0


def test_machine_has_the_memory_that_is_free_on_the_device() -> None:
    gc.collect()  # what earlier tests let go
    torch.accelerator.empty_cache()
    sim.set_device_bytes(256 << 20)
    try:
        machine: Machine = measure_machine(target.NAME, seconds=0.2)
    finally:
        sim.set_device_bytes(8 << 30)
    assert machine.device_bytes == pytest.approx(256 << 20, rel=0.3)
    assert machine.nvme_shares_host_link
    assert machine.move_host_s > 0 and machine.move_compute_s == 0  # the device computes while the host starts a transfer
