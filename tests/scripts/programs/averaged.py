"""An exponential moving average of the weights beside the model, updated after each step and used for evaluation."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.scripts.script import Script


def main(script: Script) -> None:
    model = nn.Sequential(*[part for _ in range(5) for part in (nn.Linear(64, 64), nn.GELU())], nn.Linear(64, 64))
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    script.wrap(model, optimizer)
    for step in range(12):
        x = torch.randn(64, 64)
        loss = nn.functional.mse_loss(model(x), x.roll(1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
        script.log(loss)
        if step % 5 == 4:
            with torch.no_grad():
                script.log(nn.functional.mse_loss(average(x), x.roll(1, 1)))
    script.keep(model=model, average=average, optimizer=optimizer)
