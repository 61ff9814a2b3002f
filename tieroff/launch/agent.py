"""Starts the ranks under torch's elastic agent, as torchrun does, waits for them, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tieroff.config import CONFIG_VARIABLE, Config
from tieroff.core.machine import save_machine
from tieroff.errors import ConfigError
from tieroff.launch.folder import (
    CONFIG_FILE,
    ERROR_FILE,
    LAUNCH_FILE,
    MACHINE_FILE,
    STDERR_FILE,
    STDOUT_FILE,
    rank_folder,
    write_json,
)
from tieroff.launch.summary import Outcome, summarize
from tieroff.probe import limits
from tieroff.probe.machine import measure_machine
from tieroff.session.budget_messages import say_where
from tieroff.storage.host import numa

_SHUTDOWN_S = 5
"""How long ranks may take to end before they are killed."""

_MEASURE_S = 1.5
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# The summary repeats what the agent logs of failing ranks.
_NOISY = ("multiprocessing.api", "agent.server.api", "agent.server.local_elastic_agent")


@dataclass(frozen=True)
class Request:
    """What is to be launched.

    Attributes:
        config: where the config is; None as for `Config.load`.
        script, arguments: what every rank runs.
        nproc: ranks; None takes one per GPU, or one alone.
        log_dir: where the launch's folder is made; None takes the system's folder for temporary files.
        is_quiet: rank 0's output goes to logs as well.
        nnodes: machines that take part; this launch starts the ranks of one.
        node_rank: which of them this is; None lets them count themselves as they come.
        rdzv_endpoint: HOST:PORT where they meet; needed with several.
    """

    script: Path
    arguments: tuple[str, ...] = ()
    config: Path | None = None
    nproc: int | None = None
    log_dir: Path | None = None
    is_quiet: bool = False
    nnodes: int = 1
    node_rank: int | None = None
    rdzv_endpoint: str | None = None


class RankLogs(LogsSpecs):
    """Rank 0 of all nodes has its launcher's own streams, byte for byte; the others write to files."""

    def __init__(self, folder: Path, is_quiet: bool) -> None:
        super().__init__(str(folder))
        self._folder, self._is_quiet = folder, is_quiet

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        found = LogsDest()
        for local_rank, environment in envs.items():
            own = rank_folder(self._folder, local_rank)
            own.mkdir()
            is_shown = environment.get("RANK", "0") == "0" and not self._is_quiet  # of all nodes
            found.stdouts[local_rank] = "" if is_shown else str(own / STDOUT_FILE)
            found.stderrs[local_rank] = "" if is_shown else str(own / STDERR_FILE)
            found.error_files[local_rank] = environment["TORCHELASTIC_ERROR_FILE"] = str(own / ERROR_FILE)
        return found


def launch(request: Request) -> Outcome:
    """Runs a script in several ranks and returns when all have ended.

    Raises:
        ConfigError: the config, its partition or the nodes cannot be used, or there are fewer GPUs than ranks.
        OSError: a file of the launch cannot be written.
        StoreError: a folder of the NVMe tier could not be measured.
    """
    _check_nodes(request)
    config = Config.load(request.config)
    device = _device(config)
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    nproc = request.nproc or max(gpus, 1)
    if config.parallel.plan is not None:
        if request.nnodes > 1:
            raise ConfigError("[parallel] plan is for the devices of one machine: leave out --nnodes, or shard with FSDP2")
        from tieroff.partition.ranks import load_for_ranks  # DTensor takes long to import

        _, nproc = load_for_ranks(config.parallel.plan, request.nproc)
    if device == "cuda" and nproc > gpus:
        raise ConfigError(
            f'--nproc-per-node {nproc}: torch sees {gpus} GPUs, and each rank needs one; ask for fewer, or set device = "cpu"'
        )
    folder = _folder(request.log_dir)
    path = folder / CONFIG_FILE
    path.write_text(_written_out(config, device, nproc, folder).to_toml(), encoding="utf-8")
    cpus = numa.places(nproc, _gpus(nproc) if device == "cuda" and len(numa.nodes()) > 1 else ())
    write_json(folder / LAUNCH_FILE, {"pid": os.getpid(), "cpus": [sorted(c) for c in cpus] if cpus else None})
    changes = {CONFIG_VARIABLE: str(path)}
    if "OMP_NUM_THREADS" not in os.environ and nproc > 1:
        # torchrun would say 1. Cores are shared out instead, or every rank would start a thread on each.
        changes["OMP_NUM_THREADS"] = str(max(len(os.sched_getaffinity(0)) // nproc, 1))
    failures, ended_by = _run(request, nproc, folder, changes)
    return summarize(folder, nproc, failures, ended_by)


def _folder(log_dir: Path | None) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="tieroff-launch-", dir=log_dir)).resolve()
    except OSError as error:
        where = f"--log-dir {log_dir}" if log_dir is not None else "the folder for temporary files"
        raise ConfigError(
            f"{where}: no folder of logs can be made there: {error.strerror or error}; make it writable, or name another "
            "with --log-dir"
        ) from error


def _device(config: Config) -> str:
    if config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _written_out(config: Config, device: str, nproc: int, folder: Path) -> Config:
    """Returns the config with everything in it that ranks would else find out each for itself, while others take it.

    Budgets of the lower tiers are the machine's; a rank divides them. What links do is measured once, with nothing running.
    """
    budget, dirs = config.budget, config.nvme.dirs
    if dirs is None:
        dirs = limits.default_dirs(config, device)
    if dirs and config.nvme.dirs is None:
        say_where(dirs)
        config = config.model_copy(update={"nvme": config.nvme.model_copy(update={"dirs": dirs})})
    if budget.host is None and device == "cuda":
        budget = budget.model_copy(update={"host": limits.default_host_bytes()})
    if budget.nvme is None and dirs:
        budget = budget.model_copy(update={"nvme": limits.default_nvme_bytes(dirs)})
    config = config.model_copy(update={"budget": budget})
    if config.plan.machine is None and nproc > 1:
        engine = config.nvme.engine
        if device == "cuda":  # in a process of its own, or this one would hold a part of the first GPU's memory
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                machine = pool.submit(measure_machine, device, dirs, engine=engine, seconds=_MEASURE_S).result()
        else:
            machine = measure_machine(device, dirs, engine=engine, seconds=_MEASURE_S)
        save_machine(machine, folder / MACHINE_FILE)
        config = config.model_copy(update={"plan": config.plan.model_copy(update={"machine": folder / MACHINE_FILE})})
    return config


def _gpus(count: int) -> list[str]:
    """Returns the PCI addresses of the first GPUs."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # see `_written_out`
        return pool.submit(_pci_addresses, count).result()


def _pci_addresses(count: int) -> list[str]:
    found: list[Any] = [torch.cuda.get_device_properties(index) for index in range(count)]  # its stub lacks what is asked for
    return [numa.pci_address(gpu) for gpu in found]


def _run(request: Request, nproc: int, folder: Path, changes: Mapping[str, str]) -> tuple[dict[int, ProcessFailure], str]:
    """Returns the failures by local rank, and the signal that ended the launch from outside, or ""."""
    config = LaunchConfig(
        min_nodes=request.nnodes,
        max_nodes=request.nnodes,
        nproc_per_node=nproc,
        **_meeting(request),
        max_restarts=0,
        logs_specs=RankLogs(folder, request.is_quiet),
        shutdown_timeout=_SHUTDOWN_S,
    )
    arguments = ["-u", "-m", "tieroff.launch.rank", str(folder), str(request.script), *request.arguments]
    for name in _NOISY:
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    with _environment(changes), _nothing_left():
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            return {failure.local_rank: failure for failure in error.failures.values()}, ""
        except SignalException as error:
            return {}, error.sigval.name
        except (RendezvousError, torch.distributed.DistError) as error:
            why = next(iter(str(error.__cause__ or error).splitlines()), type(error).__name__)
            raise ConfigError(
                f"the {request.nnodes} machines did not meet at {request.rdzv_endpoint or 'localhost'}: {why}; "
                "--rdzv-endpoint is the same on every node: an address of one of them that all reach, and a free port there"
            ) from error
        except KeyboardInterrupt:  # before the agent had put its own answer to signals in place
            return {}, signal.SIGINT.name
    return {}, ""


def _meeting(request: Request) -> dict[str, Any]:
    """Returns where and how the agents of all nodes meet, as torch's `LaunchConfig` has it."""
    if request.nnodes == 1:
        # A free port: launches at once do not meet.
        return {"run_id": uuid.uuid4().hex, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
    meeting = {"run_id": f"tieroff {request.rdzv_endpoint}", "rdzv_endpoint": request.rdzv_endpoint}
    if request.node_rank is None:
        return {**meeting, "rdzv_backend": "c10d"}
    return {**meeting, "rdzv_backend": "static", "rdzv_configs": {"rank": request.node_rank}}


def _check_nodes(request: Request) -> None:
    if request.nnodes == 1 and request.node_rank:
        raise ConfigError(f"--node-rank {request.node_rank} is one of several machines: say how many with --nnodes")
    if request.nnodes > 1 and not request.rdzv_endpoint:
        raise ConfigError(
            f"--nnodes {request.nnodes} needs --rdzv-endpoint HOST:PORT, the same on every node: an address of one of them and "
            "a free port there"
        )
    host, _, port = (request.rdzv_endpoint or "").rpartition(":")
    if request.nnodes > 1 and not (host and port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ConfigError(
            f"expected --rdzv-endpoint HOST:PORT with a port from 1 to 65535, got {request.rdzv_endpoint!r}; write node0:29400"
        )
    if request.node_rank is not None and request.node_rank >= request.nnodes:
        raise ConfigError(f"expected --node-rank below --nnodes {request.nnodes}, got {request.node_rank}")


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Has processes that start meanwhile see changed variables."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _nothing_left() -> Iterator[None]:
    """Ends what the ranks started and left running.

    Orphans below this process become its children, so that it finds them. Signals that arrive meanwhile are ignored, because
    everything is being ended.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # The agent answers signals in the main thread only, and leaves its answers in place.
    answers = {number: signal.getsignal(number) for number in _SIGNALS if threading.current_thread() is threading.main_thread()}
    known = set(psutil.Process().children(recursive=True))
    try:
        yield
    finally:
        for number in answers:
            signal.signal(number, signal.SIG_IGN)
        while left := set(psutil.Process().children(recursive=True)) - known:
            known |= left  # a process that does not end now is stuck in the kernel
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=_SHUTDOWN_S)
        for number, answer in answers.items():
            signal.signal(number, signal.SIG_DFL if answer is None else answer)
