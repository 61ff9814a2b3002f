"""Two models that train against each other, each with an optimizer: the discriminator on a batch of each kind."""

from __future__ import annotations

import torch
from torch import nn

from tests.scripts.script import Script


def main(script: Script) -> None:
    maker = nn.Sequential(
        *[part for _ in range(4) for part in (nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU())], nn.Linear(48, 48)
    )
    judge = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(48, 48), nn.LeakyReLU(0.2))], nn.Linear(48, 1))
    makes = torch.optim.Adam(maker.parameters(), lr=2e-4, betas=(0.5, 0.999))
    judges = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
    script.wrap(maker, makes)
    script.wrap(judge, judges)
    measure = nn.BCEWithLogitsLoss()
    for _ in range(10):
        real = torch.randn(32, 48) * 2 + 1
        judge.zero_grad()
        on_real = measure(judge(real), torch.ones(32, 1))
        on_real.backward()
        fake = maker(torch.randn(32, 48))
        on_fake = measure(judge(fake.detach()), torch.zeros(32, 1))
        on_fake.backward()
        judges.step()
        maker.zero_grad()
        fooled = measure(judge(fake), torch.ones(32, 1))
        fooled.backward()
        makes.step()
        for loss in (on_real, on_fake, fooled):
            script.log(loss)
    script.keep(maker=maker, judge=judge, makes=makes, judges=judges)
