"""A variational autoencoder: methods of its own beside forward, random numbers inside, samples drawn between epochs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.scripts.script import Script


class Autoencoder(nn.Module):
    """Pictures of 64 values to a code of 8, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(64, 64), nn.Linear(64, 64)
        self.mean, self.spread = nn.Linear(64, 8), nn.Linear(64, 8)
        self.up, self.wide, self.out = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.middle(torch.relu(self.first(x))))
        return self.mean(hidden), self.spread(hidden)

    def decode(self, code: Tensor) -> Tensor:
        return torch.sigmoid(self.out(torch.relu(self.wide(torch.relu(self.up(code))))))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encode(x.view(-1, 64))
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * spread)
        return self.decode(code), mean, spread


def main(script: Script) -> None:
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    script.wrap(model, optimizer)
    for epoch in range(3):
        model.train()
        for _ in range(4):
            x = torch.rand(48, 1, 8, 8)
            optimizer.zero_grad()
            made, mean, spread = model(x)
            likeness = nn.functional.binary_cross_entropy(made, x.view(-1, 64), reduction="sum")
            loss = likeness - 0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())
            loss.backward()
            optimizer.step()
            script.log(loss)
        model.eval()
        with torch.no_grad():
            script.log(model.decode(torch.randn(5, 8)).mean())
            script.log(model(torch.rand(48, 1, 8, 8))[0].mean() + epoch)
    script.keep(model=model, optimizer=optimizer)
