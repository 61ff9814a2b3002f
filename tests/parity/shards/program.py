"""Cases of FSDP2 that run in every rank of a launch: plain and wrapped, compared bit for bit after every step.

Run as `torchrun … -m tests.parity.shards.program DEVICE FOLDER CASE…`; rank 0 prints a JSON list per case: what each
rank found. DEVICE is "cpu", or "sim" for ranks that have a simulated device each.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import tieroff
from tests.accelerator import communication, sim, vendor
from tests.support.delayed import DelayedBackend
from tests.support.twins import MACHINE
from tieroff.core.tensor import Tier
from tieroff.planner.problem.problem import live_bytes
from tieroff.runtime.backend.cpu import settle_vector_math

STEPS = 6
LATE_S = 0.0005
"""On the simulated device copies come up to so much later than they could: what does not wait for them reads poison."""
BF16: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


class Block(nn.Module):
    """Sizes that two and four ranks do not divide evenly."""

    def __init__(self, width: int, is_rerun: bool = False, has_norm: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(33) if has_norm else nn.Identity()
        self.up, self.down = nn.Linear(33, width), nn.Linear(width, 33)
        self.is_rerun = is_rerun

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (checkpoint(self._inner, x, use_reentrant=False) if self.is_rerun else self._inner(x))

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Tied(nn.Module):
    """An embedding whose weight is the head's too: both belong to the root's group."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(19, 33), nn.Linear(33, 19, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.Sequential(Block(65), Block(66))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(x.abs().long() % 19).sum(-2)))


def blocks(is_rerun: bool = False) -> nn.Module:
    return nn.Sequential(*[Block(65 + i, is_rerun) for i in range(3)])


def linear_blocks() -> nn.Module:
    """Without layer norm, whose kernels of the CPU give statistics in bf16, which no device's do."""
    return nn.Sequential(*[Block(65 + i, has_norm=False) for i in range(3)])


def lora() -> nn.Module:
    """Weights are frozen, what is beside them trains."""
    model = blocks()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "bias" in name)
    return model


def even() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(2)])


class Transformer(nn.Module):
    """Small, with groups of about 200 KB each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
        self.blocks = nn.Sequential(*[nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed((x * 50).abs().long() % 256).flatten(1, 2)))


def shard(model: nn.Module, mesh: DeviceMesh, **policy: Any) -> nn.Module:
    inner = model.blocks if isinstance(model, Tied | Transformer) else model
    for block in (*inner.children(), model):
        fully_shard(block, mesh=mesh, **policy)
    return model


def device() -> str:
    """Returns the kind of device that this rank trains on."""
    return sys.argv[1]


def batch(rows: int, width: int) -> torch.Tensor:
    """Returns random inputs: the same numbers on every device."""
    return torch.randn(rows, 5, width).to(device())


def one_dim() -> DeviceMesh:
    return init_device_mesh(device(), (dist.get_world_size(),))


def hybrid(groups: int) -> DeviceMesh:
    """Replicated over `groups`, sharded inside of each."""
    return init_device_mesh(device(), (groups, dist.get_world_size() // groups), mesh_dim_names=("replicas", "shards"))


def with_tensor_parallel(model: nn.Module, shards: int) -> nn.Module:
    mesh = init_device_mesh(device(), (shards, dist.get_world_size() // shards), mesh_dim_names=("shards", "parts"))
    for block in model.children():
        parallelize_module(block, mesh["parts"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return shard(model, mesh["shards"])


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().to("cpu", copy=True)


def usual(model: nn.Module, optimizer: torch.optim.Optimizer, index: int, width: int) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(batch(12, width)).float().square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.5)
    optimizer.step()
    return loss


def clipped_by_tieroff(model: nn.Module, optimizer: torch.optim.Optimizer, index: int, width: int) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(batch(12, width)).float().square().mean()
    loss.backward()
    tieroff.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss


def with_evaluation(model: nn.Module, optimizer: torch.optim.Optimizer, index: int, width: int) -> torch.Tensor:
    loss = usual(model, optimizer, index, width)
    model.eval()
    with torch.no_grad():
        seen = model(batch(4, width)).float().sum()
    model.train()
    return torch.stack([loss.detach(), seen])


def accumulating(
    model: Any, optimizer: torch.optim.Optimizer, index: int, width: int, *, syncs: bool = True, reshards: bool = True
) -> torch.Tensor:
    """Three backward passes for an update; gradients are summed on each rank, or reduced each time."""
    optimizer.zero_grad()
    total = torch.zeros((), device=device())
    for part in range(3):
        model.set_requires_gradient_sync(part == 2 or syncs)
        model.set_reshard_after_backward(part == 2 or reshards)
        loss = model(batch(6, width)).float().square().mean()
        loss.backward()
        total += loss.detach()
    optimizer.step()
    return total


adam = functools.partial(torch.optim.AdamW, lr=0.01)


@dataclass
class Case:
    """One model, sharded in one way, and trained by one loop."""

    make: Callable[[], nn.Module]
    loop: Callable[..., torch.Tensor] = usual
    width: int = 33
    tiers: str = "host"
    delayed: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] = adam
    planning: dict[str, Any] = field(default_factory=dict)
    device: str = "1GiB"
    looks: bool = True  # after every step, which takes memory of its own


def sharded(make: Callable[[], nn.Module] = blocks, **policy: Any) -> Callable[[], nn.Module]:
    return lambda: shard(make(), one_dim(), **policy)


CASES: dict[str, Case] = {
    "host": Case(sharded()),
    "nvme": Case(sharded(), tiers="nvme"),
    "mixed": Case(sharded(), tiers="mixed"),
    "delayed": Case(sharded(), delayed=True),
    "even": Case(sharded(even), width=32),
    "bf16": Case(sharded(**BF16), tiers="nvme"),
    "bf16 on a device": Case(sharded(linear_blocks, **BF16), tiers="nvme"),
    "summed without sync, bf16, on a device": Case(
        sharded(linear_blocks, **BF16), functools.partial(accumulating, syncs=False)
    ),
    "auto": Case(sharded(), planning={"policy": "auto"}, device="70%"),
    "transformer": Case(sharded(Transformer), width=2, planning={"policy": "auto"}, device="40%", looks=False),
    "transformer in the least": Case(sharded(Transformer), width=2, planning={"policy": "auto"}, device="min", looks=False),
    "tied": Case(sharded(Tied), width=4),
    "tied bf16": Case(sharded(Tied, **BF16), width=4),
    "lora": Case(sharded(lora)),
    "lora bf16": Case(sharded(lora, **BF16)),
    "rerun": Case(sharded(functools.partial(blocks, True))),
    "evaluation": Case(sharded(), with_evaluation),
    "summed": Case(sharded(), accumulating),
    "summed without sync": Case(sharded(), functools.partial(accumulating, syncs=False)),
    "summed without sync, kept": Case(sharded(), functools.partial(accumulating, syncs=False, reshards=False)),
    "summed without sync, bf16": Case(sharded(**BF16), functools.partial(accumulating, syncs=False)),
    "kept after forward": Case(sharded(reshard_after_forward=False)),
    "kept after forward, evaluation": Case(sharded(reshard_after_forward=False), with_evaluation),
    "fewer ranks after forward": Case(sharded(reshard_after_forward=2)),
    "offloaded": Case(
        sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)),
        optimizer=functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    ),
    "offloaded, clipped by tieroff": Case(
        sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)),
        clipped_by_tieroff,
        optimizer=functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    ),
    "hybrid": Case(lambda: shard(blocks(), hybrid(2))),
    "hybrid without sync": Case(lambda: shard(blocks(), hybrid(2)), functools.partial(accumulating, syncs=False)),
    "tensor parallel": Case(lambda: with_tensor_parallel(even(), dist.get_world_size() // 2), width=32),
    "clipped by tieroff": Case(sharded(), clipped_by_tieroff),
    "sgd": Case(sharded(), optimizer=functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)),
    "one rank": Case(lambda: shard(blocks(), hybrid(dist.get_world_size()))),
}


def config_of(case: Case, folder: Path) -> dict[str, Any]:
    nvme = folder / "nvme"
    nvme.mkdir(exist_ok=True)
    machine = folder / "machine.toml"
    budget: dict[str, dict[str, Any]] = {
        "host": {"host": "16MiB", "nvme": 0},
        "nvme": {"host": 0, "nvme": "64MiB"},
        "mixed": {"host": "64KiB", "nvme": "64MiB"},
    }
    tables: dict[str, Any] = {"budget": {"device": case.device, **budget[case.tiers]}, "device": device()}
    if case.tiers != "host":
        tables["nvme"] = {"dirs": [str(nvme)], "staging": "1MiB", "checksum": "always"}
    return {**tables, "plan": {"policy": "floor", "min_bytes": 0, "machine": str(machine), **case.planning}}


def train(case: Case, config: dict[str, Any] | None) -> tuple[list[dict[str, torch.Tensor]], dict[str, Any]]:
    """Returns what people see after every step, and what the engine says."""
    gc.collect()  # the model of another run is part of cycles
    others_bytes = torch.accelerator.memory_allocated() if device() != "cpu" else 0
    torch.manual_seed(0)
    model = case.make()
    optimizer = case.optimizer([p for p in model.parameters() if p.requires_grad])
    if config is not None:
        tieroff.wrap(model, optimizer, config, backend=DelayedBackend(seed=3) if case.delayed else None)
    seen = []
    for index in range(STEPS):
        torch.manual_seed(100 * index + dist.get_rank())
        if device() != "cpu":
            torch.accelerator.reset_peak_memory_stats()
        values = {"loss": local(case.loop(model, optimizer, index, case.width))}
        seen.append(values | (dict(look(model, optimizer)) if case.looks else {}))
    found: dict[str, Any] = {}
    if config is not None:
        engine = tieroff.engine(model)
        stats = engine.stats()
        found = {
            "phase": stats.phase,
            "moved": stats.moved_bytes_by_class,
            "explain": engine.explain(),
            "fallbacks": stats.fallbacks,
        }
        found |= {"peak": engine.executor.runner.peak_bytes, "budget": engine.plan.budget_bytes[Tier.DEVICE]}
        found |= {"unmoved_peak": int(live_bytes(engine.trace).max())}
        if device() != "cpu":
            found |= {"allocated_peak": torch.accelerator.max_memory_allocated() - others_bytes}
        found |= {"held_by_fsdp2": held_bytes(model), "shards": sum(1 for _ in model.parameters())}
        before = dict(look(model, optimizer))
        tieroff.unwrap(model)
        after = dict(look(model, optimizer))
        found["differ"] = [name for name in before if not torch.equal(before[name], after[name])]
    seen.append(dict(look(model, optimizer)))
    # Without tieroff, FSDP2 goes on with the shards where they lie now.
    torch.manual_seed(7)
    seen.append({"after unwrap": local(case.loop(model, optimizer, STEPS, case.width))})
    return seen, found


def groups_of(module: Any) -> list[Any]:
    """Returns what FSDP2 gathers for a module that it has a state of; torch 2.11 has one group, or none."""
    state = module._get_fsdp_state()
    return [group for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] if group is not None]


def held_bytes(model: nn.Module) -> int:
    """Returns the bytes that FSDP2 holds of shards by itself."""
    params = [
        param
        for module in model.modules()
        if hasattr(module, "_get_fsdp_state")
        for group in groups_of(module)
        for param in group.fsdp_params
    ]
    return sum(param._sharded_param_data.untyped_storage().nbytes() for param in params)


def look(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, local(parameter)
        if parameter.grad is not None:
            yield f"gradient of {name}", local(parameter.grad)
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{key} of {name}", local(value)


def check(case: Case, folder: Path) -> dict[str, Any]:
    """Runs a case twice; returns what differed, and what the engine says."""
    watched()
    plain, _ = train(case, None)
    wrong_before = watched()  # FSDP2 frees memory early in evaluations
    wrapped, found = train(case, config_of(case, folder))
    found["wrong"] = {name: count for name, count in watched().items() if count and name not in wrong_before}
    found["differ"] += [
        f"step {step}: {name}"
        for step, (a, b) in enumerate(zip(plain, wrapped, strict=True))
        for name in sorted({*a, *b})
        if name not in a or name not in b or not torch.equal(a[name], b[name])
    ]
    return found


def watched() -> dict[str, int]:
    """Returns what the simulated device saw that no right program does, since the last call."""
    if device() != sim.NAME:
        return {}
    found = {**sim.mistakes(), **({"races": len(sim.races())} if sim.races() else {})}
    sim.reset()
    return found


def tell(found: Any) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found, group=dist.new_group(backend="gloo"))  # the others may be a device's
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(everyone) + "\n")
        sys.stdout.flush()


def begin() -> tuple[Path, list[str]]:
    """Joins the ranks; returns the folder of this one, below the first argument of the command line, and the others."""
    kind, folder, *names = sys.argv[1:]
    torch.set_num_threads(1)
    if kind == sim.NAME:
        sim.load()
        sim.set_late_links(LATE_S)
        vendor.install()
        communication.register()
        dist.init_process_group(communication.NAME)
    else:
        settle_vector_math()
        dist.init_process_group("gloo")
    own = Path(folder) / f"rank-{dist.get_rank()}"
    own.mkdir(exist_ok=True)  # a run that resumes has the folder of the one before
    (own / "machine.toml").write_text(MACHINE)
    return own, names


def main() -> None:
    """Runs `DEVICE FOLDER CASE…` of the command line."""
    own, names = begin()
    for name in names:
        tell(check(CASES[name], own))
    gc.collect()  # torch's gloo thread may still hold the last collective's tensors, and would die in freeing them
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
