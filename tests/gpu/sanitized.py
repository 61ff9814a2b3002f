"""A short training under PyTorch's sanitizer of CUDA, which is a dispatch mode: so it comes when the step has been traced.

    python tests/gpu/sanitized.py wrapped|planted [DEVICE]

`wrapped` trains with everything moved to host memory and ends well; `planted` has two streams use one tensor with nothing
between them, which the sanitizer has to raise.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.cuda._sanitizer import enable_cuda_sanitizer

import tieroff

TRACED_STEPS, STEPS, WIDTH = 3, 6, 128


def sanitize(device: torch.device) -> None:
    """Has PyTorch look at every kernel from here on; on a device that is no GPU's nothing does."""
    torch.accelerator.synchronize(device)
    if device.type == "cuda":
        enable_cuda_sanitizer()


def planted(device: torch.device) -> None:
    """A race."""
    sanitize(device)
    value = torch.zeros(1 << 20, device=device)
    with torch.Stream(device):
        value.add_(1)


def wrapped(device: torch.device) -> None:
    """A training whose every tensor moves."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {"budget": {"device": "100%", "host": "64MiB"}, "plan": {"policy": "floor", "min_bytes": 0}}
    tieroff.wrap(model, optimizer, config)
    x = torch.randn(32, WIDTH).to(device)
    for step in range(TRACED_STEPS + STEPS):
        if step == TRACED_STEPS:
            sanitize(device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = tieroff.engine(model).stats()
    if (stats.phase, stats.fallbacks) != ("planned", 0) or not stats.moved_bytes["h2d"]:
        raise SystemExit(f"expected a planned step that moves, got {stats}")
    tieroff.unwrap(model)


if __name__ == "__main__":
    place = torch.device(sys.argv[2] if len(sys.argv) > 2 else "cuda", 0)
    {"wrapped": wrapped, "planted": planted}[sys.argv[1]](place)
    torch.accelerator.synchronize()
