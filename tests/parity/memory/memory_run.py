"""Trains a model of about 1.6 GB and prints its peak resident memory as JSON; run in a process of its own by a test.

usage: memory_run.py FOLDER BUDGET_BYTES (0: plain, without tieroff) MACHINE
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

# Narrow and long: bytes to move, and little to compute. The last step runs as planned.
ROWS, WIDTH, BLOCKS, STEPS = 131072, 32, 10, 3


def resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field} in /proc/self/status")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mlp(self.norm(x))
        return out


def main(folder: str, budget_bytes: int, machine: str) -> None:
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    if budget_bytes:
        tieroff.wrap(
            model,
            optimizer,
            {
                "device": "cpu",
                "budget": {"device": budget_bytes, "host": 0, "nvme": "3GiB"},
                "nvme": {"dirs": [folder]},
                "plan": {"background": False, "machine": machine},
            },
        )
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = model(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
    found = {"losses": losses, "peak_bytes": resident_bytes("VmHWM") - before}
    if budget_bytes:
        engine = tieroff.engine(model)
        stats = engine.stats()
        found |= {
            "phase": stats.phase,
            "counted_bytes": stats.peak_device_bytes,
            "fallbacks": stats.fallbacks,
            "planned_bytes": engine.plan.peak_bytes[tieroff.core.tensor.Tier.DEVICE],
            "moved": stats.moved_bytes,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
