"""A DataLoader with workers, augmentation in small steps, mixup and label smoothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.scripts.script import Script


class Pictures(Dataset[tuple[Tensor, int]]):
    """Pictures that are shifted, flipped and normalized one by one."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        picture = torch.randn(3, 12, 12, generator=generator)
        for shift in range(index % 5):
            picture = picture.roll(shift, dims=2)
        picture = picture.flip(2) if index % 2 else picture
        return (picture - picture.mean()) / (picture.std() + 1e-5), index % 10


def main(script: Script) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Linear(144, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    script.wrap(model, optimizer)
    loader = DataLoader(Pictures(), batch_size=16, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(1))
    measure = nn.CrossEntropyLoss(label_smoothing=0.1)
    for _ in range(2):
        for pictures, labels in loader:
            share = torch.distributions.Beta(0.4, 0.4).sample().item()
            order = torch.randperm(len(pictures))
            mixed = share * pictures + (1 - share) * pictures[order]
            out = model(mixed)
            loss = share * measure(out, labels) + (1 - share) * measure(out, labels[order])
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            script.log(loss)
    script.keep(model=model, optimizer=optimizer)
