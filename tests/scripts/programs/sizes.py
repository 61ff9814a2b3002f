"""Pictures of ever other sizes in lists, with as many boxes as each has: no two batches are alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.scripts.script import Script


class Detector(nn.Module):
    """Losses in training, boxes in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *[part for i in range(4) for part in (nn.Conv2d(16 if i else 3, 16, 3, padding=1), nn.ReLU())]
        )
        self.classes, self.boxes = nn.Conv2d(16, 5, 1), nn.Conv2d(16, 4, 1)

    def forward(self, pictures: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> dict[str, Tensor]:
        height, width = max(p.shape[1] for p in pictures), max(p.shape[2] for p in pictures)
        batch = torch.stack([nn.functional.pad(p, (0, width - p.shape[2], 0, height - p.shape[1])) for p in pictures])
        seen = self.body(batch)
        classes, boxes = self.classes(seen).mean((2, 3)), self.boxes(seen).mean((2, 3))
        if targets is None:
            return {"boxes": boxes}
        labels = torch.stack([target["labels"].float().mean().long() for target in targets])
        wanted = torch.stack([target["boxes"].mean(0) for target in targets])
        return {"classes": nn.functional.cross_entropy(classes, labels), "boxes": nn.functional.l1_loss(boxes, wanted)}


def batch(step: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Returns two pictures and what is on them."""
    draw = torch.Generator().manual_seed(step)
    sizes = torch.randint(8, 24, (2, 2), generator=draw).tolist()
    counts = torch.randint(1, 5, (2,), generator=draw).tolist()
    pictures = [torch.randn(3, height, width, generator=draw) for height, width in sizes]
    return pictures, [{"boxes": torch.rand(n, 4, generator=draw), "labels": torch.arange(n)} for n in counts]


def main(script: Script) -> None:
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    script.wrap(model, optimizer)
    for step in range(24):
        pictures, targets = batch(step)
        losses = model(pictures, targets)
        total = torch.stack(list(losses.values())).sum()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        script.log(total)
    model.eval()
    with torch.no_grad():
        script.log(model(batch(99)[0])["boxes"].sum())
    script.keep(model=model, optimizer=optimizer)
