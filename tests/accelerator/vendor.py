"""What tieroff is told of the simulated device's vendor."""

from __future__ import annotations

import torch

from tests.accelerator import sim
from tieroff.runtime.backend.vendor import refused, register_vendor
from tieroff.storage.host.slabs import RegisteredSlabs, Slabs


class SimulatedVendor:
    """Registers memory as CUDA's runtime does; `is_one_memory` makes it an integrated device."""

    def __init__(self, *, is_one_memory: bool = False) -> None:
        self._is_one_memory = is_one_memory

    def slabs(self, device: torch.device) -> Slabs:
        return RegisteredSlabs(_register, _unregister)

    def forbid_access(self, storage: torch.UntypedStorage, message: str) -> None:
        sim.forbid_access(storage, message)

    def is_integrated(self, device: torch.device) -> bool:
        return self._is_one_memory


def _register(address: int, size_bytes: int) -> None:
    code = sim.host_register(address, size_bytes)
    if code:
        sim.take_last_error()
        raise refused(size_bytes, "host_register", code)


def _unregister(address: int) -> None:
    assert sim.host_unregister(address) == 0


def install() -> None:
    """Has tieroff serve the simulated device."""
    register_vendor(sim.NAME, SimulatedVendor())
