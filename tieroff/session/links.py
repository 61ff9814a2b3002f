"""The machine that plans are made for: read from a file, or measured when the first plan needs it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from tieroff.config import Config
from tieroff.core.machine import Machine, load_machine
from tieroff.probe.calibration.updates import measure_updates
from tieroff.probe.links import DEVICE_COPY_BYTES
from tieroff.probe.machine import measure_apart, measure_machine
from tieroff.session.ranks import Ranks
from tieroff.storage.engines.base import Engine
from tieroff.storage.store import Store

log = logging.getLogger("tieroff")

_MEASURE_S, _MEASURE_UPDATES_S = 1.5, 0.3
_HOST_PART = 4  # what measuring updates takes of the host budget

# What a transfer takes of the thread that trains, in a planned step of the CPU backend: (13.7 - 8.4) ms over 654 - 244
# transfers, two plans of benchmarks/bench_host.py's gpt at 60 % (AMD EPYC, 2026-11-25). So few transfers are better than many.
_MOVE_COMPUTE_S = 13e-6


class StandIn(Protocol):
    """Another machine than this one, for which a training is only rehearsed."""

    def adapt(self, config: Config) -> Config:
        """Returns a script's config as that machine has it."""

    def drive(self, size_bytes: int, engine: Engine) -> Store:
        """Returns its NVMe tier."""


stand_in: ContextVar[StandIn | None] = ContextVar("stand_in", default=None)
"""Takes this machine's place; `tieroff rehearse` sets it."""


class Links:
    """The machine of this process, as one of the ranks that share it.

    Args:
        config: names the machine file, if any, and the folders' I/O engine.
        device: where the model computes.
        dirs: folders of the NVMe tier.
        ranks: how many processes share the machine.
    """

    def __init__(self, config: Config, device: torch.device, dirs: tuple[Path, ...], ranks: Ranks) -> None:
        self._config, self._place, self._ranks = config, device, ranks
        self._dirs = tuple(Path(os.path.abspath(folder)) for folder in dirs)  # where the program is now
        self._device = device.type
        self._has_measured_updates = False
        if self.is_named:
            self.machine  # noqa: B018 - a file that is wrong is told now, not when the first plan is made

    @property
    def is_named(self) -> bool:
        """True when the config names a machine file."""
        return self._config.plan.machine is not None

    @functools.cached_property
    def machine(self) -> Machine:
        """The machine; measured on first use where no file is named.

        Raises:
            ConfigError: the file cannot be read.
            StoreError: a transfer failed while a folder was measured.
        """
        path, nvme = self._config.plan.machine, self._config.nvme
        if path is not None:
            machine = self._ranks.share_machine(load_machine(path), self._device)
        else:
            log.info("measuring links and folders for %.1f s; [plan] machine names a file that saves this", _MEASURE_S)
            machine = self._measured()
        return machine.with_checksums() if nvme.checksum == "always" else machine

    @property
    def unmeasured(self) -> Machine:
        """The machine where its speed does not matter: of the links it may say only that they are there."""
        if self.is_named or "machine" in self.__dict__:
            return self.machine
        nvme = 1 if self._dirs else 0
        return Machine(d2h_bytes_per_s=1, h2d_bytes_per_s=1, nvme_write_bytes_per_s=nvme, nvme_read_bytes_per_s=nvme)

    def knows_updates(self, host_bytes: int) -> bool:
        """Returns whether the machine says how fast the CPU updates; where no file is named that is measured, once.

        Args:
            host_bytes: the host budget.
        """
        if not self.is_named and not self._has_measured_updates:
            self._has_measured_updates = True
            room_bytes = host_bytes // _HOST_PART
            # The model is on the device meanwhile: copies take no more of that than those that measured the links.
            with self._measuring():
                rates = measure_updates(self._device, _MEASURE_UPDATES_S, host_bytes=room_bytes, copy_bytes=DEVICE_COPY_BYTES)
            self.machine = rates.of(self.machine)
        return self.machine.update_bytes_per_s > 0

    def _measured(self) -> Machine:
        engine = self._config.nvme.engine
        if self._device == "cpu":
            machine = measure_apart(self._dirs, engine=engine, seconds=_MEASURE_S)
            return replace(machine, move_compute_s=_MOVE_COMPUTE_S)
        with self._measuring():
            return measure_machine(self._device, self._dirs, engine=engine, seconds=_MEASURE_S)

    def _measuring(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, the model's device is the current one, where buffers are made: another may be full, or far from this link."""
        return torch.accelerator.device_index(self._place.index) if self._device != "cpu" else contextlib.nullcontext()

    def best_engine(self) -> str | None:
        """Returns the I/O engine that the machine file found fastest in the folders; None without a file."""
        return self.machine.best_engine(self._dirs) if self.is_named else None

    def write_rates(self) -> list[float] | None:
        """Returns the bytes per second written to each folder; None without a file that says so."""
        return self.machine.write_rates(self._dirs) if self.is_named else None

    def at(self, rates: dict[str, float]) -> Machine:
        """Returns the machine with links no faster than these bytes per second, which were seen beside compute.

        A probe has all cores to itself, and is faster than the same copies during a step.
        """
        seen: dict[str, Any] = {f"{link}_bytes_per_s": int(rate) for link, rate in rates.items()}
        slower: dict[str, Any] = {key: rate for key, rate in seen.items() if 0 < rate < getattr(self.machine, key)}
        return replace(self.machine, **slower) if slower else self.machine
