"""Building: from a config to the engine of one model."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from tieroff.config import Config
from tieroff.core.io.run_folder import Run
from tieroff.core.plan import RUNTIME_EXECUTOR, Plan
from tieroff.core.seams import PlanSource
from tieroff.core.tensor import TensorClass, Tier
from tieroff.errors import ConfigError, StoreError
from tieroff.planner.foresight import Correlation
from tieroff.planner.predict import predict
from tieroff.runtime.backend.base import Backend
from tieroff.runtime.backend.cpu import CpuBackend
from tieroff.runtime.engine import Engine
from tieroff.runtime.process_memory import ProcessMemory
from tieroff.runtime.resources import Resources, close_dropped
from tieroff.runtime.settings import Settings
from tieroff.session.budget_messages import say_where, show_on_terminal
from tieroff.session.budgets import Budgets
from tieroff.session.device import device_for
from tieroff.session.given_plan import GivenPlan
from tieroff.session.links import Links, stand_in
from tieroff.session.planning import Planning, layers_to_recompute
from tieroff.session.ranks import Ranks
from tieroff.session.shared import Budget
from tieroff.storage.engines import choose
from tieroff.storage.host.pool import HostStore
from tieroff.storage.nvme.file_store import FileStore
from tieroff.storage.store import Store
from tieroff.units import format_bytes

log = logging.getLogger("tieroff")

_CLASSES = {
    "activations": TensorClass.ACTIVATION,
    "parameters": TensorClass.PARAMETER,
    "gradients": TensorClass.GRADIENT,
    "optimizer": TensorClass.OPTIMIZER,
}
_COMPUTE_TYPES = {"bf16": torch.bfloat16}
# Freed blocks above this leave the process at once on the CPU backend; see docs/results for what it costs. It is glibc's own
# threshold before it adapts: with a larger one the heap keeps what models of small tensors freed, beyond any budget.
_ALLOCATOR_THRESHOLD_BYTES = 128 << 10
_PAGE_RETURN_S = 0.005


def build(
    model: torch.nn.Module,
    config: Config,
    backend: Backend | None = None,
    plan: Plan | None = None,
    shared: Budget | None = None,
) -> Engine:
    """Returns the engine of a model, which it has taken over.

    Args:
        model: the root module.
        config: checked, with defaults filled in.
        backend: where computing happens; None follows the config's `device`.
        plan: run this one instead of making one.
        shared: the device budget of this model and others.

    Raises:
        ConfigError: the config cannot be used on this machine: a folder is missing, say.
        StateError: the model cannot be wrapped.
        StoreError: a drive failed or is full.
    """
    close_dropped()
    backend = backend if backend is not None else _backend_for(config, model)
    device, ranks = backend.device, Ranks.here()
    if not backend.has_host_tier:
        config = _without_host_tier(config)
    part = shared.join(model) if shared is not None else None
    with ExitStack() as joined:
        if part is not None:
            joined.callback(part.leave)
        budgets = Budgets(config, device, ranks, part)
        links = Links(config, device, budgets.dirs, ranks)
        if part is None:
            resources = _open(config, backend, budgets, links)
        else:
            resources, links = part.resources(config, backend, links, lambda: _open(config, backend, budgets, links))
        joined.pop_all()
    try:
        layers = layers_to_recompute(config, ranks) if plan is None else ()
        updates_on_host = _may_update_on_host(config, resources, ranks)
        settings = _settings(config, resources, layers, updates_on_host=updates_on_host)
        plans = _plan_source(plan, config, resources, budgets, links, ranks, updates_on_host=updates_on_host)
        foresight = Correlation() if config.plan.policy != "demand" else None
        resident = ProcessMemory(model, backend, part.engines if part is not None else ()) if device.type == "cpu" else None
        is_staged = resources.io is not None and resources.io.name != "gds"
        backend.use_staging(budgets.staging_bytes if is_staged else 0)
        engine = Engine(model, settings, resources, plans, foresight, _write_report)
        backend.return_freed()  # where parameters lay that went below
    except BaseException:
        resources.close_stores()
        raise
    if part is None:  # models that share a budget are held by it
        resources.close_after(engine)
    budgets.watch(resident, engine)
    if ranks.rank == 0:
        show_on_terminal()
    if config.plan.recompute_layers and not layers:
        log.warning('[plan] recompute_layers has no effect: it needs policy = "auto", one rank and no given plan')
    return engine


def _without_host_tier(config: Config) -> Config:
    """Returns the config for a device whose memory is the host's: moving bytes to host memory would take as much of it.

    Raises:
        ConfigError: the config asks for a host tier.
    """
    if config.budget.host:
        raise ConfigError(
            "[budget] host is set, but this device's memory is the host's, and nothing is gained by moving tensors there; "
            "leave it out, or set it to 0, and name a folder under [nvme] dirs"
        )
    log.info("this device's memory is the host's: tensors move to NVMe only")
    return config.model_copy(update={"budget": config.budget.model_copy(update={"host": 0})})


def _open(config: Config, backend: Backend, budgets: Budgets, links: Links) -> Resources:
    """Opens the stores of the tiers that have a budget, and the I/O engine under them."""
    stores: dict[Tier, Store] = {}
    if not budgets.tiers:
        return Resources(backend, stores, None)
    with ExitStack() as opened:
        io = choose(config.nvme.engine, measured=links.best_engine())
        opened.callback(io.close)
        if budgets.host_bytes:
            stores[Tier.HOST] = HostStore(budgets.host_bytes, io, backend.slabs)
            opened.callback(stores[Tier.HOST].close)
        stand = stand_in.get()
        if stand is not None and budgets.nvme_bytes:
            stores[Tier.NVME] = stand.drive(budgets.nvme_bytes, io)
            opened.callback(stores[Tier.NVME].close)
        elif budgets.dirs:
            if budgets.is_folder_by_default:
                say_where(budgets.dirs)
            rates = links.write_rates()
            files = FileStore(budgets.dirs, budgets.nvme_bytes, io, config.nvme.checksum, write_bytes_per_s=rates)
            opened.callback(files.close)
            try:
                files.return_pages(_PAGE_RETURN_S)
            except OSError as error:
                size = format_bytes(budgets.nvme_bytes)
                raise StoreError(
                    f"[budget] nvme: {size} under [nvme] dirs take more address space than this process may have: "
                    f"{error.strerror}; lower [budget] nvme, or raise the limit (ulimit -v)",
                    errno=error.errno,
                ) from error
            stores[Tier.NVME] = files
        opened.pop_all()
    return Resources(backend, stores, io)


def _settings(config: Config, resources: Resources, layers: tuple[str, ...], *, updates_on_host: bool) -> Settings:
    planning, stores = config.plan, resources.stores
    moves = bool(stores)
    return Settings(
        covers=frozenset(_CLASSES[name] for name in planning.cover) if moves else frozenset(),
        min_bytes=planning.min_bytes,
        spill=tuple(tier for tier in (Tier.HOST, Tier.NVME) if tier in stores),
        allocator_threshold_bytes=_ALLOCATOR_THRESHOLD_BYTES if moves and resources.backend.device.type == "cpu" else None,
        chosen={"io_engine": resources.io.name if resources.io is not None else "none"},
        config_toml=config.to_toml(),
        recompute_layers=layers,
        update_in_backward=planning.update_in_backward,
        updates_on_host=updates_on_host,
        exact=planning.exact,
        device_budget=config.budget.device,
        compute_dtype=_COMPUTE_TYPES[config.compute_dtype] if config.compute_dtype is not None else None,
    )


def _plan_source(
    plan: Plan | None,
    config: Config,
    resources: Resources,
    budgets: Budgets,
    links: Links,
    ranks: Ranks,
    *,
    updates_on_host: bool,
) -> PlanSource:
    device = resources.backend.device
    capabilities = replace(
        RUNTIME_EXECUTOR,
        # On the host they would be early ones: see [Note: late evictions] in runtime/items/table.py.
        late_evictions=plan is not None or device.type != "cpu",
        updates_on_host=updates_on_host,
        updates_cross=updates_on_host,
        tiers=budgets.tiers,
        recompute=config.plan.recompute,
        min_bytes=config.plan.min_bytes,
        granule_bytes=max((store.alignment_bytes for store in resources.stores.values()), default=1),
    )
    if plan is not None:
        return GivenPlan(plan, config, device, links, ranks, capabilities)
    return Planning(config, device, budgets, links, ranks, capabilities)


def _may_update_on_host(config: Config, resources: Resources, ranks: Ranks) -> bool:
    """True where the CPU may update what lies in host memory below a device.

    Where that is the device's own memory nobody can be kept from reading what is being updated. A rank's shards are parts of
    what its optimizer has. In a rehearsal there is no memory.
    """
    backend, planning = resources.backend, config.plan
    is_below = backend.device.type != "cpu" and backend.slabs.is_backed and Tier.HOST in resources.stores
    is_asked = planning.update_on_host and not planning.update_in_backward and "optimizer" in planning.cover
    return is_asked and is_below and ranks.world == 1


def _backend_for(config: Config, model: torch.nn.Module) -> Backend:
    device = device_for(config.device, model)
    if device.type == "cpu":
        return CpuBackend(keeps_freed=config.budget.keep_freed)
    from tieroff.runtime.backend.accelerator import AcceleratorBackend

    return AcceleratorBackend(device)


def _write_report(run: Run, path: Path) -> None:
    from tieroff.report.page import check_page, write_page  # no training step needs it

    check_page(path)
    write_page(path, run, *predict(run))
