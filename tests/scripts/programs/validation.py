"""Validation in mid-epoch, with the best weights saved and loaded again."""

from __future__ import annotations

import torch
from torch import nn

from tests.scripts.script import Script


def main(script: Script) -> None:
    layers = [part for _ in range(4) for part in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers, nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    script.wrap(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    best, path = float("inf"), script.folder / "best.pt"
    held_out, answers = torch.randn(48, 64), torch.randint(0, 8, (48,))
    for step in range(14):
        model.train()
        x, y = torch.randn(32, 64), torch.randint(0, 8, (32,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        script.log(loss)
        if step % 4 == 1:
            model.eval()
            with torch.no_grad():
                score = nn.functional.cross_entropy(model(held_out), answers).item()
            script.log(score)
            if score < best:
                best = score
                torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path, weights_only=True))
    model.eval()
    with torch.inference_mode():
        script.log(nn.functional.cross_entropy(model(held_out), answers))
    script.keep(model=model, optimizer=optimizer, file=path)
