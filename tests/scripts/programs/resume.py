"""A checkpoint of model, optimizer, schedule and random state; another model goes on from it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tests.scripts.script import Script


def start(script: Script, path: Path) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """Returns model, optimizer and the step to begin with, from the checkpoint if there is one."""
    model = nn.Sequential(*[part for _ in range(5) for part in (nn.Linear(64, 64), nn.Dropout(0.1), nn.SiLU())])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    script.wrap(model, optimizer)
    if not path.exists():
        return model, optimizer, 0
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"])
    return model, optimizer, saved["step"]


def main(script: Script) -> None:
    path = script.folder / "last.pt"
    for last in (7, 14):
        model, optimizer, first = start(script, path)
        for step in range(first, last):
            loss = model(torch.randn(32, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            script.log(loss)
            if step % 3 == 0:
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save({**saved, "random": torch.get_rng_state()}, path)
    script.keep(model=model, optimizer=optimizer, file=path)
