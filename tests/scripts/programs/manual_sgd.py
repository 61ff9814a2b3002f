"""No optimizer: parameters are changed by hand, and gradients cleared by hand."""

from __future__ import annotations

import torch
from torch import nn

from tests.scripts.script import Script


def main(script: Script) -> None:
    model = nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(64, 64), nn.Tanh())], nn.Linear(64, 4))
    script.wrap(model)
    batches = [(torch.randn(24, 64), torch.randint(0, 4, (24,))) for _ in range(6)]
    rate = 0.05
    for epoch in range(3):
        for x, y in batches:
            loss = nn.functional.cross_entropy(model(x), y)
            model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.data.add_(parameter.grad, alpha=-rate)
            script.log(loss)
        rate /= 2 if epoch else 1
    script.keep(model=model)
