"""Gradient accumulation whose number of rounds changes while the run goes on."""

from __future__ import annotations

import torch
from torch import nn

from tests.scripts.script import Script


def main(script: Script) -> None:
    model = nn.Sequential(*[part for _ in range(5) for part in (nn.Linear(64, 64), nn.GELU())], nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    script.wrap(model, optimizer)
    for step in range(12):
        rounds = 1 if step < 4 else 2 if step < 8 else 4
        for _ in range(rounds):
            x = torch.randn(32, 64).mul(1.1).add(0.1)
            loss = model(x).square().mean() / rounds
            loss.backward()
            script.log(loss)
        script.log(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    script.keep(model=model, optimizer=optimizer)
