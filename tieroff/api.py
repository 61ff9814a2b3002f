"""The face of the library: composition of tracing, planning and running, and nothing else."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tieroff.config import Config
from tieroff.core.check.plan import check
from tieroff.core.io.json_files import load_plan
from tieroff.core.io.run_folder import Run
from tieroff.core.machine import Machine, load_machine
from tieroff.core.plan import RUNTIME_EXECUTOR, Capabilities, Plan
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.trace import Trace
from tieroff.errors import ConfigError, InfeasiblePlanError, StateError, TraceMismatchError
from tieroff.planner.compare.predict import forecast, predict
from tieroff.planner.foresight import Correlation
from tieroff.planner.layers import choose_modules
from tieroff.planner.make_plan import make_plan
from tieroff.planner.policies import find_policy
from tieroff.planner.problem.problem import live_bytes, make_problem
from tieroff.planner.user_code import bring_back
from tieroff.probe import limits
from tieroff.probe.machine import measure_machine
from tieroff.runtime.backend.base import Backend, CpuBackend
from tieroff.runtime.custody import Settings
from tieroff.runtime.engine import Engine
from tieroff.runtime.hooks.forward import ForwardSlot
from tieroff.runtime.hooks.scope import scope_of
from tieroff.runtime.resident import Resident
from tieroff.session.ranks import Agreement, Need, Ranks, agreement_here, on_wrap
from tieroff.storage.engines import Engine as IoEngine
from tieroff.storage.engines import choose
from tieroff.storage.host.pool import HostStore
from tieroff.storage.limits import host_limit_bytes
from tieroff.storage.nvme.file_store import FileStore
from tieroff.storage.store import Store
from tieroff.tracing.recorder import StepRecorder
from tieroff.units import format_bytes

log = logging.getLogger("tieroff")

_CLASSES = {
    "activations": TensorClass.ACTIVATION,
    "parameters": TensorClass.PARAMETER,
    "gradients": TensorClass.GRADIENT,
    "optimizer": TensorClass.OPTIMIZER,
}
_COMPUTE_TYPES = {"bf16": torch.bfloat16}
# Freed blocks above this leave the process at once on the CPU backend; see docs/results for what it costs.
_ALLOCATOR_THRESHOLD_BYTES = 1 << 20
_PAGE_RETURN_S = 0.005
_MEASURE_S = 1.5
_SLACK_PART = 8
_OVERHEAD_SHARE_AT_MOST = 0.25

ConfigSource = Config | Mapping[str, Any] | str | Path | None


def wrap(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: ConfigSource = None,
    *,
    plan: Plan | str | Path | None = None,
    backend: Backend | None = None,
) -> torch.nn.Module:
    """Makes a model train within a memory budget, under an unchanged loop.

    Args:
        model: the root module whose forward begins a step.
        optimizer: whose `step` ends it; may be attached later with `engine(model).attach`.
        config: a path, a mapping or a `Config`; None takes the file named by TIEROFF_CONFIG, else `tieroff.toml`, else
            defaults.
        plan: run this plan (or the one in this file) instead of making one; it must be for the very step that is traced.
        backend: where computing happens; None follows `device` of the config. For tests.

    Returns:
        The same module.

    Raises:
        ConfigError: the config cannot be used on this machine.
        StateError: this is no module, it is wrapped already, or it or the optimizer cannot be wrapped.
        StoreError: a folder is missing, read-only or too small.
    """
    if not sys.platform.startswith("linux"):
        raise StateError(f"tieroff.wrap runs on Linux; this is {sys.platform}. plan and compare work everywhere")
    if not isinstance(model, torch.nn.Module):
        raise StateError(f"expected a torch.nn.Module to wrap, got {type(model).__name__}")
    if engine_of(model) is not None:
        raise StateError("this model is wrapped already; tieroff.unwrap(model) first to wrap it with another config")
    loaded = Config.load(config)
    find_policy(loaded.plan.policy)
    given = load_plan(plan) if isinstance(plan, (str, Path)) else plan
    engine = _Builder(loaded, backend, given).build(model)
    if optimizer is not None:
        try:
            engine.attach(optimizer)
        except BaseException:
            engine.close()
            raise
    if (note := on_wrap.get()) is not None:
        note(engine)
    return model


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Gives back a plain module and optimizer, values intact; files and threads of the engine end.

    Raises:
        StateError: the model is not wrapped.
    """
    engine(model).close()
    return model


def engine(model: torch.nn.Module) -> Engine:
    """Returns the engine of a wrapped model.

    Raises:
        StateError: the model is not wrapped.
    """
    found = engine_of(model)
    if found is None:
        raise StateError(f"this {type(model).__name__} is not wrapped (or is a copy of one that is); call tieroff.wrap first")
    return found


def scope(model: torch.nn.Module) -> Any:
    """Returns a context manager under which tensors saved outside the model (by a loss, say) are moved too."""
    return scope_of(engine(model))


def _write_report(run: Run, path: Path) -> None:
    from tieroff.report.page import check_page, write_page  # no training step needs it

    check_page(path)
    write_page(path, run, *predict(run))


def engine_of(model: torch.nn.Module) -> Engine | None:
    """Returns the engine of a wrapped model, None for one that is not."""
    slot = getattr(model, "__dict__", {}).get("forward")
    while slot is not None:
        owner = slot.engine if isinstance(slot, ForwardSlot) else None
        if isinstance(owner, Engine) and owner.model is model and not owner.is_closed:
            return owner
        # Others put theirs round ours (a trainer's mixed precision), and ours stays inside when it is removed.
        slot = slot.inner if isinstance(slot, ForwardSlot) else getattr(slot, "__wrapped__", None)
    return None


class _Builder:
    """Puts an engine together from a config."""

    def __init__(self, config: Config, backend: Backend | None, plan: Plan | None) -> None:
        self.config = config
        self.given_plan = plan
        self.backend = backend if backend is not None else _backend_for(config)
        self.is_cpu = self.backend.device.type == "cpu"
        self.ranks = Ranks.here()
        self.agreement: Agreement | None = None
        self.first_trace: Trace | None = None
        self.floor_bytes = self.needed_bytes = 0
        self.host_bytes, self.nvme_bytes = self._lower_budgets()
        self.dirs = tuple(config.nvme.dirs) if self.nvme_bytes else ()
        self.io: IoEngine | None = None
        self.engine: Engine | None = None
        self.resident: Resident | None = None
        self.granule_bytes = 1
        self.planned_machines: dict[str, Machine] = {}
        self.recomputed: tuple[str, ...] | None = None  # chosen once, for all kinds of steps
        self.chosen_bytes = 0  # the device budget under which they were
        self.kept_ratio = 0.0  # that of a step's peak without recomputing to the one with it; 0 before it is known

    def _lower_budgets(self) -> tuple[int, int]:
        budget, dirs = self.config.budget, self.config.nvme.dirs
        host = budget.host
        if host is None:
            host = 0 if self.is_cpu else limits.default_host_bytes()
        nvme = budget.nvme
        if nvme is None:
            nvme = limits.default_nvme_bytes(dirs) if dirs else 0
        if nvme and not dirs:
            raise ConfigError("[budget].nvme is set but [nvme].dirs is empty: name a folder on the drive")
        return self.ranks.share_bytes(host), self.ranks.share_bytes(nvme)

    def build(self, model: torch.nn.Module) -> Engine:
        stores: dict[Tier, Store] = {}
        try:
            if self.host_bytes or self.dirs:
                self.io = choose(self.config.nvme.engine, measured=self._measured_engine())
            if self.host_bytes:
                assert self.io is not None
                register, unregister = getattr(self.backend, "register", None), getattr(self.backend, "unregister", None)
                stores[Tier.HOST] = HostStore(self.host_bytes, self.io, register, unregister)
            if self.dirs:
                assert self.io is not None
                speeds = self.machine.write_rates(self.dirs) if self.config.plan.machine is not None else None
                checksum = self.config.nvme.checksum
                files = FileStore(self.dirs, self.nvme_bytes, self.io, checksum, write_bytes_per_s=speeds)
                files.return_pages(_PAGE_RETURN_S)
                stores[Tier.NVME] = files
            self.granule_bytes = max((store.alignment_bytes for store in stores.values()), default=1)
            if hasattr(self.backend, "use_staging"):
                is_staged = self.dirs and self.io is not None and self.io.name != "gds"
                self.backend.use_staging(self.config.nvme.staging if is_staged else 0)
            self.resident = Resident(model) if self.is_cpu else None
            self.engine = Engine(
                model, self.backend, stores, self._settings(stores), self._plan,
                self._recorder, functools.partial(self._close, stores),
                lambda trace: self.planned_machines.get(trace.digest), self._machine_as_seen, _write_report,
                self._spare_bytes, Correlation() if self.config.plan.policy != "demand" else None,
                self._bring_back, self._forecast,
            )  # fmt: skip
            if self.config.plan.recompute_layers and not self._recompute_layers():
                log.warning('[plan] recompute_layers has no effect: it needs policy = "auto", one rank and no given plan')
            return self.engine
        except BaseException:
            self._close(stores)
            raise

    def _measured_engine(self) -> str | None:
        """Returns the I/O engine that a machine file found fastest in the folders; None without such a file."""
        return self.machine.best_engine(self.dirs) if self.config.plan.machine is not None else None

    def _settings(self, stores: dict[Tier, Store]) -> Settings:
        planning = self.config.plan
        moves = bool(stores)
        return Settings(
            covers=frozenset(_CLASSES[name] for name in planning.cover) if moves else frozenset(),
            min_bytes=planning.min_bytes,
            spill=tuple(tier for tier in (Tier.HOST, Tier.NVME) if tier in stores),
            allocator_threshold_bytes=_ALLOCATOR_THRESHOLD_BYTES if self.is_cpu and moves else None,
            chosen={"io_engine": self.io.name if self.io is not None else "none"},
            config_toml=self.config.to_toml(),
            recompute_layers=self._recompute_layers(),
            update_in_backward=self.config.plan.update_in_backward,
            compute_dtype=_COMPUTE_TYPES[self.config.compute_dtype] if self.config.compute_dtype is not None else None,
        )

    def _close(self, stores: dict[Tier, Store]) -> None:
        for store in stores.values():
            store.close()
        if self.io is not None:
            self.io.close()

    @functools.cached_property
    def machine(self) -> Machine:
        path = self.config.plan.machine
        if path is not None:
            machine = self.ranks.share_machine(load_machine(path), self.backend.device.type)
        else:
            engine = self.config.nvme.engine
            log.info("measuring links and folders for %.1f s; [plan] machine names a file that saves this", _MEASURE_S)
            machine = measure_machine(self.backend.device.type, self.dirs, engine=engine, seconds=_MEASURE_S)
        return machine.with_checksums() if self.config.nvme.checksum == "always" else machine

    def _capabilities(self) -> Capabilities:
        return replace(
            RUNTIME_EXECUTOR,
            tiers=tuple(t for t, size in ((Tier.HOST, self.host_bytes), (Tier.NVME, self.nvme_bytes)) if size),
            recompute=self.config.plan.recompute,
            min_bytes=self.config.plan.min_bytes,
            granule_bytes=self.granule_bytes,
        )

    def _budget(self, trace: Trace) -> dict[Tier, int]:
        lower = {Tier.HOST: _plannable(self.host_bytes), Tier.NVME: _plannable(self.nvme_bytes)}
        return {Tier.DEVICE: self._device_bytes(trace), **lower}

    def _recorder(self) -> StepRecorder:
        if self.agreement is None and self.given_plan is None:
            self.agreement = agreement_here()
        return StepRecorder(self.backend.device, self._tell)

    def _tell(self, trace: Trace | None) -> None:
        """Lets the other ranks know what the first traced step may use and needs; None: that it cannot be traced."""
        if self.agreement is None or self.first_trace is not None:
            return
        if trace is None:
            self.agreement.leave()
            return
        self.first_trace = trace
        budget = self._budget(trace)
        self.floor_bytes = self._floor_bytes(trace, budget)
        self.agreement.tell(budget[Tier.DEVICE], self.floor_bytes)

    def _agreed(self, trace: Trace, own_bytes: int) -> Need:
        """Returns the device budget that all ranks plan with, and whose it is.

        Raises:
            InfeasiblePlanError: it would do for this rank, and another one needs more. That one raises too, and none is left
                to wait for it in its next collective.
            StateError: a rank began to train and hangs.
        """
        own = Need(own_bytes, self.floor_bytes, self.ranks.rank)
        agreed = self.agreement.settle() if self.agreement is not None else None
        wanted = self.config.budget.device
        # A share is of one kind of step. Other kinds have a share of their own.
        is_first = self.first_trace is not None and trace.tensors is self.first_trace.tensors
        if agreed is None or (not is_first and wanted is not None and wanted.share is not None):
            return own
        least = min(own, agreed.budget, key=lambda need: need.budget_bytes)
        if is_first and agreed.floor.floor_bytes > least.budget_bytes >= own.floor_bytes:
            raise InfeasiblePlanError(
                f"expected every op of every rank to fit in {format_bytes(least.budget_bytes)} of device memory, the least of "
                f"all ranks (rank {least.rank}'s), but rank {agreed.floor.rank} needs {format_bytes(agreed.floor.floor_bytes)} "
                f"with everything away that can be. A device budget of {agreed.floor.floor_bytes} bytes would do",
                needed_bytes=agreed.floor.floor_bytes,
                available_bytes=least.budget_bytes,
            )
        return least

    def _plan(self, trace: Trace, rates: dict[str, float]) -> Plan:
        capabilities = self._capabilities()
        if self.given_plan is not None:
            if self.given_plan.recompute and not trace.recompute_ops:
                return self.given_plan  # its layers run again from now on; it is compared with the step in which they do
            if self.given_plan.trace_digest != trace.digest:
                raise TraceMismatchError(
                    f"the given plan is for trace {self.given_plan.trace_digest}, this step's trace is {trace.digest}: "
                    "it was made for another model, batch or library version; make a new plan"
                )
            check(self.given_plan, trace, capabilities)
            if self.config.plan.machine is not None:
                self.planned_machines[trace.digest] = self.machine
            return self.given_plan
        budget = self._budget(trace)
        agreed = self._agreed(trace, budget[Tier.DEVICE])
        budget[Tier.DEVICE] = agreed.budget_bytes
        planning, machine = self.config.plan, self._slowed(rates)
        self.planned_machines[trace.digest] = machine
        counts = len(trace.ops), len(trace.tensors)
        log.info("planning %d ops and %d tensors (%s, %s)", *counts, planning.policy, planning.effort)

        def make(trace: Trace, effort: str = "fast") -> Plan:
            return make_plan(trace, machine, budget, planning.policy, effort, capabilities)

        try:
            plan = make(trace, planning.effort)
            if self.recomputed is None and planning.recompute and self._recompute_layers():
                self.recomputed = choose_modules(trace, plan, make)
                self.chosen_bytes = budget[Tier.DEVICE]
            return replace(plan, recompute=self.recomputed or ())
        except InfeasiblePlanError as error:
            if agreed.rank == self.ranks.rank:
                raise
            text = f"{error}. All ranks plan with the least budget of any, which is that of rank {agreed.rank}"
            sizes = {"needed_bytes": error.needed_bytes, "available_bytes": error.available_bytes}
            raise InfeasiblePlanError(text, op=error.op, **sizes) from None

    def _recompute_layers(self) -> tuple[str, ...]:
        """Returns which layers may run again. Ranks would choose different ones, and wait for each other in collectives."""
        planning = self.config.plan
        may_run = planning.policy == "auto" and self.ranks.world == 1 and self.given_plan is None
        return planning.recompute_layers if may_run else ()

    def _floor_bytes(self, trace: Trace, budget: dict[Tier, int]) -> int:
        """Returns the device bytes that the neediest op has with everything away that can be."""
        return int(make_problem(trace, self.machine, budget, self._capabilities()).base.max())

    def _spare_bytes(self, trace: Trace) -> int:
        """Returns the device bytes of this step's budget that no op of it, or of those before, needs, >= 0."""
        if self.given_plan is not None:
            return 0  # no machine was asked about, and no budget
        budget = self._budget(trace)
        used = {tensor for op in trace.ops for tensor in (*op.reads, *op.writes)}
        unused_bytes = sum(  # below while nothing is planned: a plan has what is never idle on the device
            tensor.size_bytes for i, tensor in enumerate(trace.tensors)
            if i not in used and tensor.is_persistent and tensor.is_movable and tensor.size_bytes >= self.config.plan.min_bytes
        )  # fmt: skip
        self.needed_bytes = max(self.needed_bytes, self._floor_bytes(trace, budget) - unused_bytes)
        return max(budget[Tier.DEVICE] - self.needed_bytes, 0)

    def _bring_back(self, trace: Trace, op: int, used: Mapping[int, bool]) -> Trace:
        """Returns the trace with what user code uses in that op on the device, as far as this rank can say how much fits."""
        if self.config.plan.policy != "auto" or self.ranks.world > 1:
            return trace
        budget_bytes = self._budget(trace)[Tier.DEVICE]
        if self.given_plan is not None:
            if self.given_plan.trace_digest == trace.digest:
                return trace
            budget_bytes = self.given_plan.budget_bytes[Tier.DEVICE]
        return bring_back(trace, op, used, budget_bytes, self.config.plan.min_bytes)

    def _machine_as_seen(self, rates: dict[str, float]) -> Machine | None:
        """Returns what `_slowed` does; None where no machine was asked about, since the plan was given."""
        return self._slowed(rates) if self.given_plan is None else None

    def _forecast(self, plan: Plan, trace: Trace, rates: dict[str, float]) -> tuple[int, int] | None:
        """Returns what `forecast` does for links of these rates; None for a plan that was given."""
        if self.given_plan is not None:
            return None
        machine = self.planned_machines[trace.digest] = self._slowed(rates)
        return forecast(plan, trace, machine)

    def _slowed(self, rates: dict[str, float]) -> Machine:
        """Returns the machine with links no faster than they were beside compute: a probe has the cores to itself."""
        seen: dict[str, Any] = {f"{link}_bytes_per_s": int(rate) for link, rate in rates.items()}
        slower: dict[str, Any] = {key: rate for key, rate in seen.items() if 0 < rate < getattr(self.machine, key)}
        return replace(self.machine, **slower) if slower else self.machine

    def _device_bytes(self, trace: Trace) -> int:
        wanted = self.config.budget.device
        if wanted is None:
            free_bytes = _free_bytes(self.backend.device)
            return self.ranks.share_bytes(free_bytes) if self.is_cpu else free_bytes
        limit = wanted.resolve(int(live_bytes(trace).max()))
        if wanted.share is not None and trace.recompute_ops:
            # The share is of a step that keeps all, and this one keeps less; of other kinds of steps likewise.
            self.kept_ratio = self.kept_ratio or max(self.chosen_bytes / limit, 1.0)
            limit = int(limit * self.kept_ratio)
        if wanted.size_bytes is None or self.resident is None or self.engine is None:
            return limit
        # Bytes that a person gave are resident bytes on the CPU: what the process itself takes comes off, up to a share.
        return limit - min(self.resident.overhead_bytes(self.engine), int(limit * _OVERHEAD_SHARE_AT_MOST))


def _plannable(size_bytes: int) -> int:
    """Returns what a plan may fill of a lower tier: the rest is for free memory in pieces, and for shadow extents."""
    return size_bytes - size_bytes // _SLACK_PART


def _free_bytes(device: torch.device) -> int:
    """Returns what this process may still take of the device's memory, and what it has taken for the step already."""
    if device.type == "cpu":
        return host_limit_bytes()
    return int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device)


def _backend_for(config: Config) -> Backend:
    wanted = config.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return CpuBackend(keeps_freed=config.budget.keep_freed)
    if not torch.cuda.is_available():
        raise ConfigError('device = "cuda", but torch sees no CUDA device; use "cpu" or "auto"')
    from tieroff.runtime.backend.cuda import CudaBackend

    return CudaBackend()
