"""Trains the demo model in one of several ways, in this process; benchmarks/bench_peers.py runs each in one of its own.

Model, data, seed, loop and measure are the same for all. What differs is in the classes below, one per way.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import tieroff
from shared.peak import PeakMemory
from shared.progress import Progress
from shared.repeatable import repeat_kernels
from tieroff.runtime.backend.cpu import settle_vector_math
from train_gpt import (
    GPT,
    UNTIMED_STEPS,
    OnStep,
    Options,
    Result,
    add_options,
    choose_device,
    cosine_with_warmup,
    draw_batch,
    load_text,
)

IN_BACKWARD = "tieroff-in-backward"
SHARDED = ("fsdp2-plain", "fsdp2", "deepspeed-cpu", "deepspeed-nvme", "tieroff-fsdp2")
"""Those that several ranks can train with; the first is what the others are compared with."""
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


class PeerAbsent(Exception):
    """What this way of training needs is not installed."""


class Plain:
    """PyTorch as it is; the others change of it what they have to.

    Making one does the imports and joins the ranks, which is no part of a run's memory; `prepare` is called with the model on
    the CPU.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, options: Options) -> None:
        self.options = options
        self.device = torch.device(choose_device(options.device))
        self.is_cuda = self.device.type == "cuda"

    def prepare(self, model: GPT) -> None:
        """Sets what is called with a batch of bytes, and the optimizer whose learning rate the schedule sets."""
        self.model = model.to(self.device)
        self.optimizer = self.adamw(self.model)

    def adamw(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.options.lr, weight_decay=WEIGHT_DECAY, betas=BETAS)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        """Clips the gradients, steps the optimizer and clears the gradients."""
        if self.options.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def stats(self) -> dict[str, Any] | None:
        """Returns its own account of the last step, where it gives one."""
        return None


class SavingOnCpu(nn.Module):
    """A model whose forward keeps what it saves for backward in host memory."""

    def __init__(self, model: nn.Module, *, is_pinned: bool) -> None:
        super().__init__()
        self.inner = model
        self.is_pinned = is_pinned

    def forward(self, x: Tensor) -> Tensor:
        with save_on_cpu(pin_memory=self.is_pinned):
            logits: Tensor = self.inner(x)
        return logits


class SaveOnCpu(Plain):
    """`torch.autograd.graph.save_on_cpu`, pinned on CUDA. On the CPU, where they lie already, it moves nothing."""

    def prepare(self, model: GPT) -> None:
        super().prepare(model)
        self.model = SavingOnCpu(self.model, is_pinned=self.is_cuda)


class Checkpointed(nn.Module):
    """A module whose activations are computed again in backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


class CheckpointPerBlock(Plain):
    """`torch.utils.checkpoint` round each block."""

    def prepare(self, model: GPT) -> None:
        model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
        super().prepare(model)


def join_group(device: torch.device) -> None:
    """Makes this process a rank of its launch, or the only one; on CUDA the group also serves tensors on the CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or "0"))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if rank_count() > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def rank_count() -> int:
    """Returns how many processes torchrun started together; 1 without it."""
    return int(os.environ.get("WORLD_SIZE") or "1")


class Fsdp2(Plain):
    """FSDP2: `fully_shard` on each block and on the whole, with `CPUOffloadPolicy` or without."""

    def __init__(self, options: Options, *, is_offloaded: bool = True) -> None:
        super().__init__(options)
        self.is_offloaded = is_offloaded
        join_group(self.device)
        self.mesh = init_device_mesh(self.device.type, (rank_count(),))

    def prepare(self, model: GPT) -> None:
        policy = CPUOffloadPolicy(pin_memory=self.is_cuda) if self.is_offloaded else OffloadPolicy()
        if not self.is_offloaded:
            model = model.to(self.device)
        for block in model.blocks:
            fully_shard(block, mesh=self.mesh, offload_policy=policy)
        # An offloaded model stays on the CPU: fully_shard brings each group to the device itself.
        fully_shard(model, mesh=self.mesh, offload_policy=policy)
        self.model, self.optimizer = model, self.adamw(model)


class DeepSpeed(Plain):
    """ZeRO-3 on one rank: parameters on the CPU, the optimizer's state there or on NVMe, updated by its own CPU Adam."""

    def __init__(self, options: Options, nvme_dir: Path | None = None) -> None:
        super().__init__(options)
        if importlib.util.find_spec("deepspeed") is None:
            raise PeerAbsent("deepspeed is not installed (`pip install deepspeed`)")
        # Its builds call ninja, which pip puts beside the interpreter. A rank's variables come from its launcher otherwise.
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ.update({name: value for name, value in alone.items() if not os.environ.get(name)})
        os.environ.setdefault("DS_ACCELERATOR", self.device.type)
        self.nvme_dir = nvme_dir
        self.library = importlib.import_module("deepspeed")
        # Built on their first use, and loaded here: they are imports too.
        ops = importlib.import_module("deepspeed.ops.op_builder")
        ops.CPUAdamBuilder().load()
        if nvme_dir is not None:
            ops.AsyncIOBuilder().load()
        join_group(self.device)

    def prepare(self, model: GPT) -> None:
        # Parameter by parameter, as users do whose model does not fit: `initialize` would bring the whole to the device.
        self.library.zero.Init(module=model, config_dict_or_path=self.config())
        adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        self.optimizer = adam(model.parameters(), lr=self.options.lr, weight_decay=WEIGHT_DECAY, betas=BETAS, adamw_mode=True)
        self.model, *_ = self.library.initialize(model=model, optimizer=self.optimizer, config=self.config())

    def config(self) -> dict[str, Any]:
        """Returns its config: what moves is said, the rest is left at its defaults."""
        on_cpu = {"device": "cpu", "pin_memory": self.is_cuda}
        on_nvme = {"device": "nvme", "nvme_path": str(self.nvme_dir), "pin_memory": self.is_cuda}
        return {
            "train_micro_batch_size_per_gpu": self.options.batch,
            "gradient_clipping": self.options.clip,
            "zero_optimization": {
                "stage": 3,
                "offload_param": on_cpu,
                "offload_optimizer": on_cpu if self.nvme_dir is None else on_nvme,
            },
        }

    def backward(self, loss: Tensor) -> None:
        engine: Any = self.model
        engine.backward(loss)

    def update(self) -> None:
        """Its engine clips, steps and clears."""
        engine: Any = self.model
        engine.step()


class Tieroff(Plain):
    """tieroff, under the config of the options."""

    def prepare(self, model: GPT) -> None:
        super().prepare(model)
        self.model = tieroff.wrap(self.model, self.optimizer, config=self.options.config)

    def stats(self) -> dict[str, Any] | None:
        return asdict(tieroff.engine(self.model).stats())


class TieroffFsdp2(Fsdp2):
    """tieroff on FSDP2's shards, under the config of the options."""

    def prepare(self, model: GPT) -> None:
        super().prepare(model)
        self.model = tieroff.wrap(self.model, self.optimizer, config=self.options.config)

    def stats(self) -> dict[str, Any] | None:
        return asdict(tieroff.engine(self.model).stats())


PEERS: dict[str, Callable[[Options, Path], Plain]] = {
    "plain": lambda options, nvme_dir: Plain(options),
    "save_on_cpu": lambda options, nvme_dir: SaveOnCpu(options),
    "checkpoint": lambda options, nvme_dir: CheckpointPerBlock(options),
    "fsdp2-plain": lambda options, nvme_dir: Fsdp2(options, is_offloaded=False),
    "fsdp2": lambda options, nvme_dir: Fsdp2(options),
    "deepspeed-cpu": lambda options, nvme_dir: DeepSpeed(options),
    "deepspeed-nvme": DeepSpeed,
    "tieroff": lambda options, nvme_dir: Tieroff(options),
    IN_BACKWARD: lambda options, nvme_dir: Tieroff(options),  # by its config
    "tieroff-fsdp2": lambda options, nvme_dir: TieroffFsdp2(options, is_offloaded=False),
}


def train(peer: Plain, on_step: OnStep) -> Result:
    """Trains as the options say, in the way of `peer`, and returns what was measured.

    Of several ranks: the losses of all, rank after rank, tokens of all together, and the highest peak of one.
    """
    options, device = peer.options, peer.device
    if options.deterministic:
        repeat_kernels()
    settle_vector_math()  # or two plain runs can differ in the last bit
    memory = PeakMemory(device)
    torch.manual_seed(options.seed)
    text = load_text(options.data)
    batches = torch.Generator().manual_seed(options.seed + 1 + int(os.environ.get("RANK") or "0"))

    model = GPT(options.layers, options.width, options.heads, options.length)
    parameters = sum(p.numel() for p in model.parameters())
    peer.prepare(model)
    del model  # or one that it copies from would stay
    scheduler = torch.optim.lr_scheduler.LambdaLR(peer.optimizer, cosine_with_warmup(options.steps))

    losses: list[str] = []
    step_s: list[float] = []
    for step in range(options.steps):
        start = time.perf_counter()
        x, y = draw_batch(text, options.batch, options.length, batches)
        logits = peer.model(x.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), y.to(device).flatten())
        del logits
        peer.backward(loss)
        peer.update()
        scheduler.step()
        value = float(loss.item())
        if peer.is_cuda:
            torch.cuda.synchronize()  # an update on another stream than the loss's belongs to its step too
        losses.append(value.hex())
        step_s.append(time.perf_counter() - start)
        on_step(step + 1, value, options.batch * options.length / step_s[-1])

    all_losses, peaks = [losses], [memory.peak_bytes()]
    if rank_count() > 1:
        found: list[Any] = [None] * rank_count()
        dist.all_gather_object(found, (losses, peaks[0]))
        all_losses, peaks = [own for own, _ in found], [peak for _, peak in found]
    tokens = options.batch * options.length * rank_count()
    return Result(
        losses=[loss for own in all_losses for loss in own],
        step_s=step_s,
        tokens_per_s=tokens / statistics.median(step_s[UNTIMED_STEPS:] or step_s),
        peak_bytes=max(peaks),
        parameters=parameters,
        stats=peer.stats(),
        options={key: str(value) for key, value in asdict(options).items()},
    )


def main() -> int:
    """Runs one training and writes `metrics.json`; an error that says all that is to say is written there instead."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--peer", choices=list(PEERS), default="plain")
    parser.add_argument("--nvme-dir", type=Path, default=Path.cwd(), help="folder for what a peer keeps on NVMe")
    add_options(parser)
    chosen = vars(parser.parse_args())
    options = Options(**{f.name: chosen[f.name] for f in fields(Options)})
    content: dict[str, Any]
    try:
        with Progress(chosen["peer"], options.steps) as progress:
            content = asdict(train(PEERS[chosen["peer"]](options, chosen["nvme_dir"]), progress.advance))
    except (PeerAbsent, tieroff.TieroffError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        content = {"error": {"type": type(error).__name__, "message": str(error)}}
    finally:
        if dist.is_initialized():
            gc.collect()  # torch's gloo thread may still hold the last collective's tensors, and would die in freeing them
            dist.destroy_process_group()  # also after an error, whose message is to be the last word
    if options.out is not None and ((os.environ.get("RANK") or "0") == "0" or "error" in content):
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "metrics.json").write_text(json.dumps(content, indent=1))
    return 1 if "error" in content else 0


if __name__ == "__main__":
    sys.exit(main())
