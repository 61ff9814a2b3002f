"""A GAN, its two models under one budget. usage: gan.py FOLDER"""

import sys

import torch
from torch import nn

import tieroff

LAYERS, STEPS, EVERY = 8, 12, 2  # the generator steps after every second step of the discriminator


def train(folder: str | None) -> list[torch.Tensor]:
    """Returns the losses, and the parameters at the end; without a folder of a plain run."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(LAYERS)]
    generator = nn.Sequential(nn.Linear(16, 64), *layers, nn.Linear(64, 64))
    layers = [nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2)) for _ in range(LAYERS)]
    discriminator = nn.Sequential(*layers, nn.Linear(64, 1))
    of_generator = torch.optim.Adam(generator.parameters(), 1e-3)
    of_discriminator = torch.optim.Adam(discriminator.parameters(), 1e-3)
    if folder is not None:
        config = {
            "budget": {"host": 0, "nvme": "64MiB"},
            "nvme": {"dirs": [folder], "staging": "4MiB"},
            "plan": {"min_bytes": 0},  # such small tensors are not worth moving elsewhere
        }
        # Half of what both need together without tieroff; tieroff.Budget("50%") is for models that are not wrapped at once.
        tieroff.wrap([generator, discriminator], [of_generator, of_discriminator], config, budget="50%")
    criterion, losses = nn.BCEWithLogitsLoss(), []
    for step in range(STEPS):
        torch.manual_seed(step)
        real, noise = torch.randn(32, 64).cumsum(1), torch.randn(32, 16)
        of_discriminator.zero_grad()
        loss = criterion(discriminator(real), torch.ones(32, 1))
        loss.backward()
        fake = generator(noise)
        loss_of_fake = criterion(discriminator(fake.detach()), torch.zeros(32, 1))
        loss_of_fake.backward()
        of_discriminator.step()
        losses += [loss.detach(), loss_of_fake.detach()]
        if step % EVERY == 0:
            of_generator.zero_grad()
            loss = criterion(discriminator(fake), torch.ones(32, 1))
            loss.backward()
            of_generator.step()
            losses.append(loss.detach())
    models = (generator, discriminator)
    if folder is not None:
        for name, model in zip(("generator", "discriminator"), models, strict=True):
            stats = tieroff.engine(model).stats()
            print(f"{name}: {stats.phase}, moved {sum(stats.moved_bytes.values())} bytes in its last step")
            tieroff.unwrap(model)
    return [*losses, *(parameter.detach() for model in models for parameter in model.parameters())]


if __name__ == "__main__":
    train(sys.argv[1])
