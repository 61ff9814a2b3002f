"""Loads a model of 620 MB into a drive and saves it again; writes what that took as JSON. Run in a process of its own.

usage: checkpoint_memory_run.py FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # torch.optim imports it at its first use: an import too
from torch import nn

import tieroff
import tieroff.api  # its imports count as imports
import tieroff.checkpoint

WIDTH, LAYERS = 2048, 37


def resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field} in /proc/self/status")


def growth_of(work: Callable[[], object]) -> int:
    """Returns by how much the resident set peaked above its level before."""
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return resident_bytes("VmHWM") - before


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def make(folder: Path) -> int:
    """Writes the checkpoint from a plain model; returns its bytes."""
    model = build()
    with torch.no_grad():
        for value, parameter in enumerate(model.parameters()):
            parameter.fill_(value)
            parameter[-1, -1] = -value
    tieroff.save_weights(model, folder, max_shard_bytes="150MB")
    return sum(p.numel() * p.element_size() for p in model.parameters())


def are_right(model: nn.Module) -> bool:
    values = [parameter.detach().view(-1) for parameter in model.parameters()]
    return all(bool((held[:-1] == value).all()) and float(held[-1]) == -value for value, held in enumerate(values))


def main(folder: Path) -> None:
    source, target, drive = folder / "source", folder / "target", folder / "drive"
    drive.mkdir()
    found: dict[str, object] = {"model_bytes": make(source)}
    with torch.device("meta"):
        model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    tieroff.wrap(
        model,
        optimizer,
        {"device": "cpu", "budget": {"device": "64MiB", "host": 0, "nvme": "2GiB"}, "nvme": {"dirs": [str(drive)]}},
    )
    found["load"] = growth_of(lambda: tieroff.load_weights(model, source))
    found["save"] = growth_of(lambda: tieroff.save_weights(model, target, max_shard_bytes="400MB"))
    found["load_again"] = growth_of(lambda: tieroff.load_weights(model, target))
    state = {"model": model.state_dict()}
    found["torch_save"] = growth_of(lambda: torch.save(state, folder / "model.pt"))
    found["is_right"] = are_right(model)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
