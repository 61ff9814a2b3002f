"""What tieroff is told of the simulated device's vendor."""

from __future__ import annotations

from collections.abc import Collection

import torch

from tests.accelerator import sim
from tieroff.runtime.backend.vendor import refused, register_vendor
from tieroff.storage.host.slabs import RegisteredSlabs, Slabs


class SimulatedVendor:
    """Registers memory as CUDA's runtime does; `is_one_memory` makes it an integrated device. `near_cpus` are its node's."""

    def __init__(self, *, is_one_memory: bool = False, near_cpus: Collection[int] = ()) -> None:
        self._is_one_memory, self._near_cpus = is_one_memory, near_cpus

    def slabs(self, device: torch.device) -> Slabs:
        return RegisteredSlabs(_register, _unregister, self._near_cpus)

    def near_cpus(self, device: torch.device) -> Collection[int]:
        return self._near_cpus

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
