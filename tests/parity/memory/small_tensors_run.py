"""Trains a model of which no tensor has 1 MiB and prints what resident memory grew by as JSON; run in a process of its own.

usage: small_tensors_run.py FOLDER BUDGET ("": plain, without tieroff) MACHINE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch._dynamo  # torch.optim imports it at its first use: an import too
from torch import nn

import tieroff
import tieroff.api  # its imports count as imports, not as training
from tieroff.core.tensor import Tier
from tieroff.session import workshop

ROWS, WIDTH, BLOCKS, STEPS, WARM_UP = 1024, 128, 24, 6, 4


def resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field} in /proc/self/status")


def main(folder: str, budget: str, machine: str) -> None:
    before = resident_bytes("VmRSS")
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh()) for _ in range(BLOCKS)]
    model: nn.Module = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    workshop.steps_wait = True  # for the plan, however busy the machine is
    if budget:
        config = {"device": "cpu", "budget": {"device": budget, "host": 0, "nvme": "1GiB"}, "nvme": {"dirs": [folder]}}
        tieroff.wrap(model, optimizer, {**config, "plan": {"min_bytes": "16KiB", "machine": machine}})
    losses = []
    for step in range(STEPS):
        if step == WARM_UP:  # steps run as planned from here on
            Path("/proc/self/clear_refs").write_text("5")
        torch.manual_seed(step)
        loss = model(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
    found = {"losses": losses, "growth_bytes": resident_bytes("VmHWM") - before}
    if budget:
        engine = tieroff.engine(model)
        found |= {"phase": engine.stats().phase, "planned_bytes": engine.plan.peak_bytes[Tier.DEVICE]}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
