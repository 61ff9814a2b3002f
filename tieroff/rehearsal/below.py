"""The tiers below a rehearsed device: counted, and not there; and the config of a script, with the machine that it asks for."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path

import torch

from tieroff.config import Config
from tieroff.core.machine import Machine
from tieroff.core.tensor import Tier
from tieroff.rehearsal.build import Native
from tieroff.session.budgets import staging_of
from tieroff.storage.engines.base import Engine
from tieroff.storage.host.pool import HostStore
from tieroff.storage.memory import PAGE_BYTES, align_up

_DRIVE = Path("rehearsed drive")  # for messages; nothing is opened


class UnbackedSlab:
    """Address space of the host that reads as zeros; it ends with its last reference."""

    def __init__(self, native: Native, size_bytes: int, *, is_drive: bool) -> None:
        self.size_bytes = align_up(size_bytes, PAGE_BYTES)
        self.address = native.map_host(self.size_bytes, is_drive)
        weakref.finalize(self, native.unmap_host, self.address).atexit = False


class UnbackedSlabs:
    """Makes what stands for pinned memory, or for files on a drive."""

    is_backed = False

    def __init__(self, native: Native, *, is_drive: bool = False) -> None:
        self._native, self._is_drive = native, is_drive

    def make(self, size_bytes: int) -> UnbackedSlab:
        return UnbackedSlab(self._native, size_bytes, is_drive=self._is_drive)

    def release(self, slab: object) -> None:
        """Nothing to undo."""


class CountedDrive(HostStore):
    """Tier NVME without files: room that is counted, and copies that take the drive's time."""

    tier = Tier.NVME


class RehearsedVendor:
    """What tieroff is told of the rehearsed device."""

    def __init__(self, native: Native) -> None:
        self._native = native

    def slabs(self, device: torch.device) -> UnbackedSlabs:
        return UnbackedSlabs(self._native)

    def near_cpus(self, device: torch.device) -> tuple[int, ...]:
        return ()

    def forbid_access(self, storage: torch.UntypedStorage, message: str) -> None:
        self._native.forbid_access(storage._cdata, message)

    def is_integrated(self, device: torch.device) -> bool:
        return False


@dataclass(frozen=True)
class Below:
    """Stands in for this machine where a script wraps a model. Implements `session.links.StandIn`.

    Attributes:
        machine_file: of the machine that is rehearsed for.
        device_budget: replaces the script's own.
        host_bytes, nvme_bytes: the lower tiers, where the script's config does not say.
    """

    native: Native
    machine: Machine
    machine_file: Path
    device_budget: str
    host_bytes: int | None
    nvme_bytes: int | None

    def adapt(self, config: Config) -> Config:
        """Returns the script's config with the budgets and the machine of the rehearsal."""
        budget, nvme = config.budget, config.nvme
        host_bytes, nvme_bytes = self.host_bytes, self.nvme_bytes
        if host_bytes is None:
            host_bytes = budget.host if budget.host is not None else self.machine.host_bytes
        if nvme_bytes is None:
            nvme_bytes = budget.nvme if budget.nvme is not None and nvme.dirs else self.machine.nvme_bytes
        if not self.machine.has_tier(Tier.NVME):
            nvme_bytes = 0
        if host_bytes and nvme_bytes:
            host_bytes -= staging_of(host_bytes, nvme)  # as where there is a drive
        update = {
            "device": "auto",
            "budget": budget.model_copy(update={"host": host_bytes, "nvme": nvme_bytes}),
            "nvme": nvme.model_copy(update={"dirs": (_DRIVE,) if nvme_bytes else (), "staging": 0, "engine": "threads"}),
            "plan": config.plan.model_copy(update={"machine": self.machine_file}),
        }
        return config.model_copy(update=update).with_device_budget(self.device_budget)

    def drive(self, size_bytes: int, engine: Engine) -> CountedDrive:
        """Returns what stands for the NVMe tier."""
        return CountedDrive(size_bytes, engine, UnbackedSlabs(self.native, is_drive=True))
