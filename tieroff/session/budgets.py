"""Budgets: the bytes of each tier that this process may use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from tieroff.config import Config, Nvme
from tieroff.core.buckets import bytes_apart, bytes_below
from tieroff.core.tensor import Tier
from tieroff.core.trace import Trace
from tieroff.errors import ConfigError
from tieroff.planner.least import Least
from tieroff.planner.problem.problem import live_bytes
from tieroff.probe import limits
from tieroff.runtime.engine import Engine
from tieroff.runtime.process_memory import ProcessMemory, elsewhere_bytes, shares_process
from tieroff.session.ranks import Ranks
from tieroff.session.shared import Part
from tieroff.storage.limits import host_limit
from tieroff.units import format_bytes, parse_bytes, pasteable

log = logging.getLogger("tieroff")

# A plan leaves this part of a lower tier free, for fragmentation and for extents that are written beside the old ones.
_SLACK_PART = 8
# Where a share saves less than this many of the smallest tensors that move, moving them costs more than it gives: a step of
# 1 ms took five times as long for 1 MiB, and the library itself takes 17 MiB.
WORTH_SAVING = 32
# On the CPU, memory of the process that is no tensor takes at most this share of a device budget given in bytes.
_OVERHEAD_SHARE_AT_MOST = 0.5
# A plan leaves this much of the host's free memory, at least, for what it does not count: pages kept, buffers of copies, heap.
_MARGIN_BYTES = 32 * 2**20
_MARGIN_PART = 16


def staging_of(host_bytes: int, nvme: Nvme) -> int:
    """Returns how much of the host budget an accelerator's bounce buffers take: what was asked for, and at most half.

    Without a host budget they are as large as was asked for. `gds` has none.
    """
    if nvme.engine == "gds":
        return 0
    return min(nvme.staging, host_bytes // 2) if host_bytes else nvme.staging


class Budgets:
    """The budgets of one wrapped model in this process.

    Attributes:
        host_bytes, nvme_bytes: sizes of the lower tiers; 0 for a tier that is not used.
        staging_bytes: bounce buffers of an accelerator's copies to files, which `host_bytes` is without; 0 for none.
        dirs: folders of the NVMe tier; () where it is not used.
        is_folder_by_default: the config names no folders.
        is_lowered: the machine or a cgroup leaves less than the device budget that was asked for last, and than its step takes.

    Args:
        config: asks for them.
        device: where the model computes.
        ranks: which process of a launch this is.
        part: this model's, where the device budget is for several models.

    Raises:
        ConfigError: there is an NVMe budget and no folder.
    """

    def __init__(self, config: Config, device: torch.device, ranks: Ranks, part: Part | None = None) -> None:
        self.part = part
        self._wanted, self._is_strict = config.budget.device, config.budget.strict
        self._worth_bytes = WORTH_SAVING * config.plan.min_bytes
        self._device, self._ranks = device, ranks
        self._is_cpu = device.type == "cpu"
        self._resident: ProcessMemory | None = None
        self._engine: Engine | None = None
        self._is_overhead_told = False
        self._chosen_bytes = 0  # the device budget under which layers were chosen to run again
        self.is_lowered = False
        self._kept_ratio = 0.0  # a step's peak when it keeps everything, over its peak with layers run again; 0: not known yet
        host, nvme, folders = config.budget.host, config.budget.nvme, config.nvme.dirs
        self.is_folder_by_default = folders is None
        folders = limits.default_dirs(config, device.type) if folders is None else folders
        if host is None:
            host = 0 if self._is_cpu else limits.default_host_bytes()
        if nvme is None:
            nvme = limits.default_nvme_bytes(folders) if folders else 0
        if nvme and not folders:
            raise ConfigError("[budget].nvme is set but [nvme].dirs is empty: name a folder on the drive")
        self.host_bytes, self.nvme_bytes = ranks.share_bytes(host), ranks.share_bytes(nvme)
        self.dirs: tuple[Path, ...] = tuple(folders) if self.nvme_bytes else ()
        self.staging_bytes = staging_of(self.host_bytes, config.nvme) if self.dirs and not self._is_cpu else 0
        if self.host_bytes:
            self.host_bytes -= self.staging_bytes

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The lower tiers that are used."""
        return tuple(tier for tier, size in ((Tier.HOST, self.host_bytes), (Tier.NVME, self.nvme_bytes)) if size)

    def watch(self, resident: ProcessMemory | None, engine: Engine) -> None:
        """Takes the engine, whose own memory is the step's.

        Args:
            resident: makes memory of the process that is no tensor count against a device budget given in bytes.
        """
        self._resident, self._engine = resident, engine
        shares_process(engine)
        if self.part is not None:
            self.part.watch(engine)

    def layers_chosen(self, device_bytes: int) -> None:
        """Layers were chosen to run again in backward, under this device budget."""
        self._chosen_bytes = device_bytes

    @property
    def lower(self) -> dict[Tier, int]:
        """The bytes of the lower tiers that a plan may use."""
        lower = {Tier.HOST: _plannable(self.host_bytes), Tier.NVME: _plannable(self.nvme_bytes)}
        return {tier: self.part.lower_bytes(size) for tier, size in lower.items()} if self.part is not None else lower

    def lower_of(self, trace: Trace) -> dict[Tier, int]:
        """Returns the same for this step, less what lies there and no plan moves."""
        taken = bytes_below(trace.meta)
        return {tier: max(size - taken.get(tier, 0), 0) for tier, size in self.lower.items()}

    def of(self, trace: Trace, least: Callable[[], Least]) -> dict[Tier, int]:
        """Returns the bytes of each tier that a plan of this step may use.

        Args:
            trace: the step.
            least: gives the least of the device that it runs in. A smaller budget is raised to it, unless it is strict or the
                device has less.
        """
        return {Tier.DEVICE: self._device_bytes(trace, least), **self.lower_of(trace)}

    @property
    def may_raise(self) -> bool:
        """True where a device budget was asked for that may be raised to what a step needs."""
        return self._wanted is not None and (self._wanted.is_least or not self._is_strict)

    def leaves_room(self, size_bytes: int) -> bool:
        """Returns whether a model of this size, of which no step is known, may be on the device: a share is of an unknown peak.

        Not where the least was asked for, or where more than what was asked for is an error or another model's. What the
        model's parts save is as much again, or nobody knows.
        """
        wanted = self._wanted
        if self._is_strict or self.part is not None or (wanted is not None and wanted.is_least):
            return False
        if wanted is not None and wanted.size_bytes is not None:
            return 2 * size_bytes <= wanted.size_bytes
        return 2 * size_bytes <= self._room_bytes()

    def saves_too_little(self, trace: Trace, least: Callable[[], Least]) -> bool:
        """Returns whether a share would save so little of a step that nothing is moved; see `WORTH_SAVING`.

        One that is strict, that several models divide or that ranks agree on is kept in any case.

        Args:
            trace: the step.
            least: gives the least of the device that it runs in: a share below saves no more than that.
        """
        is_share = self._wanted is not None and self._wanted.share is not None
        if not is_share or self._is_strict or self.part is not None or self._ranks.world > 1:
            return False
        peak, limit = int(live_bytes(trace).max()), self.limit_bytes(trace)
        return limit < peak and 0 < peak - max(limit, least().floor_bytes) < self._worth_bytes

    def raised(self, needed_bytes: int, limit_bytes: int) -> int | None:
        """Returns the device budget for a step that needs these bytes; None where it must not have them.

        Args:
            needed_bytes: by the op that needs most.
            limit_bytes: what was asked for, or what all ranks agreed on.
        """
        if self._wanted is None:
            return None
        if needed_bytes <= limit_bytes:
            return needed_bytes  # what the process itself takes comes off only as far as the step runs
        return parse_bytes(pasteable(needed_bytes)) if self.may_raise and needed_bytes <= self._free_bytes() else None

    def _device_bytes(self, trace: Trace, least: Callable[[], Least]) -> int:
        if self._wanted is None:
            return self._room_bytes()
        if self.part is not None:
            self.part.see(trace, least())
        if self.saves_too_little(trace, least):
            return int(live_bytes(trace).max())
        limit = self.limit_bytes(trace)
        overhead = self._overhead_bytes(trace, limit)
        device, needs = limit - overhead, least()
        if device < needs.floor_bytes:
            raised = self.raised(needs.floor_bytes if limit >= needs.floor_bytes else needs.enough_bytes, limit)
            device = limit if raised is None else raised
            self._tell_apart(overhead, device, limit)
            return device
        return self._within_machine(device, trace, needs) if self._is_cpu else device

    def _within_machine(self, device: int, trace: Trace, needs: Least) -> int:
        """Returns a device budget on the CPU, lowered where the step would take more than the machine or a cgroup leaves."""
        room = self._room_bytes()
        self.is_lowered = room < min(device, int(live_bytes(trace).max()))
        return max(room, needs.floor_bytes) if self.is_lowered else device

    def _free_bytes(self) -> int:
        """Returns the device memory that this process may still take, with what the step holds there already."""
        held_bytes = self._engine.own_device_bytes if self._engine is not None else 0
        if self._is_cpu:
            return self._ranks.share_bytes(host_limit().left_bytes) + held_bytes
        # What PyTorch's allocator has reserved and not lent is free for the step too; what it has lent to others is not.
        unused = torch.accelerator.memory_reserved(self._device) - torch.accelerator.memory_allocated(self._device)
        free, _ = torch.accelerator.get_memory_info(self._device)
        return int(free) + unused + held_bytes

    def _room_bytes(self) -> int:
        """Returns what of it a plan may use; on the CPU, where the kernel ends who takes too much, less than all."""
        free_bytes = self._free_bytes()
        return free_bytes - max(_MARGIN_BYTES, free_bytes // _MARGIN_PART) if self._is_cpu else free_bytes

    def limit_bytes(self, trace: Trace) -> int:
        """Returns the device bytes that were asked for, for this step; 0 where it is to have the least that it runs in.

        There is a device budget.
        """
        wanted = self._wanted
        assert wanted is not None
        if self.part is not None:
            return self.part.limit_bytes()
        limit = wanted.resolve(int(live_bytes(trace).max()))
        if wanted.share is not None and trace.recompute_ops:
            # The share is of a step that keeps everything; this one keeps less. Other kinds of steps use the same ratio.
            self._kept_ratio = self._kept_ratio or max(self._chosen_bytes / limit, 1.0)
            limit = int(limit * self._kept_ratio)
        return limit

    def elsewhere_bytes(self) -> int:
        """Returns what the engines of other models have on the device."""
        return elsewhere_bytes(self._engine) if self._engine is not None else 0

    def _overhead_bytes(self, trace: Trace, limit: int) -> int:
        """Returns what comes off a budget in bytes: what the program has on an accelerator apart from the step.

        On the CPU such a budget is about resident memory, and what comes off is what the process itself takes, up to a share.
        """
        is_size = self._wanted is not None and self._wanted.size_bytes is not None
        if not is_size or self._engine is None:
            return 0
        engines = self.part.engines if self.part is not None else (self._engine,)
        if self._resident is None:
            return bytes_apart(trace.meta) // len(engines)
        overhead_bytes = self._resident.overhead_bytes(*engines) // len(engines)
        taken_bytes = min(overhead_bytes, int(limit * _OVERHEAD_SHARE_AT_MOST))
        if overhead_bytes > taken_bytes and not self._is_overhead_told and self._ranks.rank == 0:
            self._is_overhead_told = True
            log.warning(
                "the process takes %s beside tensors (library code, heap, threads), more than half of the device budget of %s: "
                "resident memory will be above the budget by %s",
                format_bytes(overhead_bytes),
                format_bytes(limit),
                format_bytes(overhead_bytes - taken_bytes),
            )
        return taken_bytes

    def _tell_apart(self, apart: int, device: int, limit: int) -> None:
        """Says once that more than was asked for is on an accelerator: a step's least, beside what is there apart from it."""
        if self._is_cpu or not apart or device > limit or self._is_overhead_told or self._ranks.rank:
            return
        self._is_overhead_told = True
        log.warning(
            "the program has %s of the device apart from its step (copies of weights, data, other models), which nobody moves: "
            "with %s, the least that the step runs in, the device budget of %s is exceeded by %s",
            format_bytes(apart),
            format_bytes(device),
            format_bytes(limit),
            format_bytes(device + apart - limit),
        )


def _plannable(size_bytes: int) -> int:
    return size_bytes - size_bytes // _SLACK_PART
