"""The ways in which a row trains: PyTorch as it is, its own and other libraries' offloading, and tieroff."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import tieroff
from gpu_kit.rows import Row
from gpu_kit.subjects import Subject, adamw, foreach_adamw
from tieroff.core.machine import save_machine
from tieroff.probe.machine import measure_machine


class WayAbsent(Exception):
    """What this way of training needs is not installed."""


class Plain:
    """PyTorch as it is; the others change of it what they have to.

    Attributes:
        model, optimizer: what the loop calls.
    """

    model: nn.Module
    optimizer: Any
    make_optimizer = staticmethod(adamw)

    def __init__(self, row: Row, subject: Subject, device: torch.device, scratch: Path) -> None:
        self.row, self.subject, self.device, self.scratch = row, subject, device, scratch

    def prepare(self) -> None:
        """Makes model and optimizer."""
        self.model = self.subject.build(self.device)
        self.optimizer = self.make_optimizer(self.model.parameters())

    def step(self, batches: Sequence[Tensor]) -> Tensor:
        """Runs one update; returns the last batch's loss, on the device."""
        for tokens in batches:
            loss = self.forward(tokens)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the loss of a batch."""
        if self.subject.autocast is None:
            return self.subject.loss(self.model, tokens)
        with torch.autocast(self.device.type, self.subject.autocast):
            return self.subject.loss(self.model, tokens)

    def figures(self) -> dict[str, Any]:
        """Returns its own account of the last steps, where it gives one."""
        return {}

    def close(self) -> None:
        """Ends what it began."""


class SaveOnCpu(Plain):
    """`torch.autograd.graph.save_on_cpu`, pinned on a GPU."""

    def forward(self, tokens: Tensor) -> Tensor:
        with save_on_cpu(pin_memory=self.device.type == "cuda"):
            return super().forward(tokens)


class Fsdp2(Plain):
    """FSDP2 on one rank, `fully_shard` on each layer and on the whole, with `CPUOffloadPolicy`."""

    def prepare(self) -> None:
        is_cuda = self.device.type == "cuda"
        backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        mesh, policy = init_device_mesh(self.device.type, (1,)), CPUOffloadPolicy(pin_memory=is_cuda)
        model = self.subject.build(self.device).cpu()  # made on the device, where random numbers are fast
        for layer in (*self.subject.layers(model), model):
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        self.model, self.optimizer = model, adamw(model.parameters())

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class DeepSpeed(Plain):
    """ZeRO-3 on one rank: parameters and state on the CPU, updated by its own CPU Adam, which it builds on first use."""

    def prepare(self) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise WayAbsent("deepspeed is not installed")
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ.update({name: value for name, value in alone.items() if not os.environ.get(name)})
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # its builds call ninja
        library = importlib.import_module("deepspeed")
        model = self.subject.build(self.device).cpu()
        adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        on_cpu = {"device": "cpu", "pin_memory": True}
        config = {
            "train_micro_batch_size_per_gpu": self.subject.rows,
            "gradient_accumulation_steps": self.subject.rounds,
            "zero_optimization": {"stage": 3, "offload_param": on_cpu, "offload_optimizer": on_cpu},
            "torch_autocast": {"enabled": self.subject.autocast is not None, "dtype": "bfloat16"},
        }
        optimizer = adam(model.parameters(), lr=1e-5, adamw_mode=True)
        self.model, self.optimizer, *_ = library.initialize(model=model, optimizer=optimizer, config=config)

    def step(self, batches: Sequence[Tensor]) -> Tensor:
        engine: Any = self.model
        for tokens in batches:
            loss = self.subject.loss(self.model, tokens)
            engine.backward(loss)
            engine.step()
        return loss.detach()


class TrainStream(Plain):
    """TrainStream: model and optimizer wrapped as its page says; it measures the machine and decides."""

    def prepare(self) -> None:
        if importlib.util.find_spec("trainstream") is None:
            raise WayAbsent("trainstream is not installed")
        library = importlib.import_module("trainstream")  # builds its extension
        super().prepare()
        self.model, self.optimizer = library.wrap(self.model, self.optimizer)


class Tieroff(Plain):
    """tieroff within the row's budget; the device makes the updates."""

    update_on_host = False

    def prepare(self) -> None:
        super().prepare()
        self.model = tieroff.wrap(self.model, self.optimizer, config=self.config())

    def config(self) -> Mapping[str, Any]:
        """Returns the config of the row."""
        budget: dict[str, Any] = {} if self.row.budget is None else {"device": self.row.budget}
        nvme: dict[str, Any] = {"dirs": []}
        if self.row.is_on_drive:
            budget["host"], nvme = 0, {"dirs": [str(self.scratch)]}
        else:
            budget["host"] = host_bytes()
        return {"device": "auto", "budget": budget, "nvme": nvme, "plan": self._planning()}

    def _planning(self) -> Mapping[str, Any]:
        subject = self.subject
        # In this process: a plan made beside training would come some steps later, and each of them takes device time.
        rounds = subject.rounds if subject.is_updated_in_backward else 0
        chosen = {"background": False, "update_in_backward": rounds, "update_on_host": self.update_on_host}
        return chosen if subject.min_bytes is None else {**chosen, "min_bytes": subject.min_bytes}

    def figures(self) -> dict[str, Any]:
        """Returns what the engine says of its last steps."""
        engine = tieroff.engine(self.model)
        stats = engine.stats()
        found = {
            "phase": stats.phase,
            "stall_s": stats.stall_s,
            "compute_s": stats.compute_s,
            "recompute_s": stats.recompute_s,
            "host_ahead_s": stats.host_ahead_s,
            "host_updates": stats.host_updates,
            "moved_bytes": dict(stats.moved_bytes),
            "own_peak_bytes": stats.peak_device_bytes,
            "host_peak_bytes": stats.peak_host_bytes,
            "nvme_bytes": stats.nvme_bytes,
            "explain": engine.explain(),
        }
        with contextlib.suppress(tieroff.StateError):  # no plan yet
            plan = engine.plan
            found["planned_step_s"] = plan.step_ns / 1e9
            found["transfers"] = len(plan.transfers)
            found["budget_bytes"] = {tier.value: size for tier, size in plan.budget_bytes.items()}
        return found

    def close(self) -> None:
        tieroff.engine(self.model).close()


class TieroffHost(Tieroff):
    """tieroff with updates that the CPU may make, and an optimizer that it can equal."""

    make_optimizer = staticmethod(foreach_adamw)
    update_on_host = True

    def _planning(self) -> Mapping[str, Any]:
        """Adds a machine file: without one nobody knows how fast the CPU is."""
        path = self.scratch / "machine.toml"
        save_machine(measure_machine(self.device.type, has_updates=True), path)
        return {**super()._planning(), "machine": str(path)}


def host_bytes() -> int:
    """Returns a host budget: seven eighths of what this process may use, since a step's own host memory is small."""
    from tieroff.storage.limits import host_limit

    return host_limit().left_bytes * 7 // 8


WAYS: dict[str, Callable[[Row, Subject, torch.device, Path], Plain]] = {
    "plain": Plain,
    "save_on_cpu": SaveOnCpu,
    "fsdp2": Fsdp2,
    "deepspeed": DeepSpeed,
    "trainstream": TrainStream,
    "tieroff": Tieroff,
    "tieroff-host": TieroffHost,
}
