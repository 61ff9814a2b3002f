"""Ray Train: FSDP2 over Ray's workers, each with its shards on its own node's drive. usage: ray_train.py FOLDER"""

import sys
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tieroff


def train(options: dict[str, Any]) -> None:
    """Runs in every worker; Ray has made the process group and set the variables that torchrun sets."""
    device = get_device()
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).to(device)
    mesh = init_device_mesh(device.type, (ray.train.get_context().get_world_size(),))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    budget = {"device": "50%", "host": 0, "nvme": "256MiB"}  # host and nvme are of the node: its workers divide them
    tieroff.wrap(model, optimizer, {"budget": budget, "nvme": {"dirs": [options["folder"]]}, "plan": {"min_bytes": 0}})
    for _ in range(6):
        loss = model(torch.randn(64, 256, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    rank = ray.train.get_context().get_world_rank()
    Path(options["folder"], f"explain-{rank}.txt").write_text(tieroff.engine(model).explain())
    ray.train.report({"loss": loss.item()})


def main(folder: str) -> None:
    """Trains with two workers."""
    scaling = ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available())
    run = RunConfig(storage_path=folder)
    TorchTrainer(train, train_loop_config={"folder": folder}, scaling_config=scaling, run_config=run).fit()
    print(Path(folder, "explain-0.txt").read_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
