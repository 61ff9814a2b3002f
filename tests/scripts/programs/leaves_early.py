"""`sys.exit` in the middle of a step, after the last checkpoint, as a script does that was asked to stop."""

from __future__ import annotations

import sys

import torch
from torch import nn

from tests.scripts.script import Script


def main(script: Script) -> None:
    model = nn.Sequential(*[part for _ in range(5) for part in (nn.Linear(64, 64), nn.ReLU())])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    script.wrap(model, optimizer)
    path = script.folder / "last.pt"
    script.keep(model=model, optimizer=optimizer, file=path)
    for step in range(20):
        loss = model(torch.randn(32, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        script.log(loss)
        if step == 8:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
            sys.exit(3)
        optimizer.step()
