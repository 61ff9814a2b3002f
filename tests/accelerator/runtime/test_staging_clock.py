"""How fast tensors pass between the device and a drive, on the device's clock: as fast as the slower of link and drive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator import sim, target, vendor
from tieroff.core.machine import load_machine
from tieroff.runtime.backend.staging.staging import Staging
from tieroff.runtime.backend.stamp import Anchor, Events
from tieroff.storage.engines.base import OpenFile
from tieroff.units import NS_PER_S

MIB = 1 << 20
H100 = Path(__file__).resolve().parents[3] / "configs/machines/h100_80gb.toml"
STAGING_BYTES = 64 * MIB
TOTAL_BYTES = 256 * MIB
SHARE = 0.95
FILE = OpenFile(-1, "a drive that is not there", True, 4096, 4096)


class Passage:
    """A transfer of the drive: whoever waits for its end spends the time until then."""

    errno, checksum = 0, None

    def __init__(self, size_bytes: int, start_ns: int, stop_ns: int) -> None:
        self.size_bytes = self.done_bytes = size_bytes
        self.start_ns, self.stop_ns = start_ns, stop_ns

    def done(self) -> bool:
        return sim.host_time_ns() >= self.stop_ns

    def wait(self, timeout_s: float | None = None) -> bool:
        sim.advance_host(max(self.stop_ns - sim.host_time_ns(), 0))
        return True

    def cancel(self) -> bool:
        return False


class Drive:
    """Moves nothing, and takes the time that a drive of this speed takes for one transfer after another."""

    joined_checksum = None

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self.free_ns = 0

    def _pass(self, size_bytes: int) -> Passage:
        start_ns = max(self.free_ns, sim.host_time_ns())
        self.free_ns = start_ns + round(size_bytes / self._bytes_per_s * NS_PER_S)
        return Passage(size_bytes, start_ns, self.free_ns)

    def read(self, file: OpenFile, offset: int, address: int, size_bytes: int, **_: Any) -> Passage:
        return self._pass(size_bytes)

    def write(self, file: OpenFile, offset: int, address: int, size_bytes: int, **_: Any) -> Passage:
        return self._pass(size_bytes)


@pytest.mark.parametrize("size_mib", [1, 8, 64, pytest.param(512, marks=pytest.mark.long)])
@pytest.mark.parametrize("is_out", [True, False], ids=["out", "in"])
@pytest.mark.parametrize("drive_share", [0.25, 1.0, 2.0], ids=["slow_drive", "equal", "slow_link"])
def test_tensors_pass_at_the_speed_of_the_slower_one(drive_share: float, is_out: bool, size_mib: int) -> None:
    machine = load_machine(H100)
    sim.set_machine(machine)
    link = machine.d2h_bytes_per_s if is_out else machine.h2d_bytes_per_s
    drive: Any = Drive(drive_share * link)
    out, into = torch.Stream(target.device()), torch.Stream(target.device())
    compute = torch.accelerator.current_stream(target.device())
    staging = Staging(STAGING_BYTES, vendor.SimulatedVendor().slabs(target.device()), out, into)
    size_bytes = size_mib * MIB
    tensor = torch.zeros(size_bytes, dtype=torch.uint8, device=target.device())
    anchor, ready = Anchor(Events(target.device()), compute), compute.record_event()
    begin_ns = drive.free_ns = max(sim.host_time_ns(), sim.stream_time_ns(compute))
    count = max(TOTAL_BYTES // size_bytes, 1)
    mover = staging.mover(tensor, ready, anchor)(drive)
    for _ in range(count):
        moved = (
            mover.write(FILE, 0, 0, size_bytes, with_checksum=False)
            if is_out
            else mover.read(FILE, 0, 0, size_bytes, with_checksum=False, is_mapped=False)
        )
    assert moved.wait(60)
    end_ns = drive.free_ns if is_out else sim.stream_time_ns(into)
    staging.close()
    rate = count * size_bytes * NS_PER_S / (end_ns - begin_ns)
    slower = min(link, drive_share * link)
    assert SHARE * slower <= rate <= 1.001 * slower
