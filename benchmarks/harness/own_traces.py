"""Traces of small PyTorch models, recorded on the CPU by the runtime's own recorder."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tieroff
from tieroff.core.io.json_files import save_trace
from tieroff.core.trace import Trace
from train_gpt import GPT

STEPS = 8
"""The first is recorded and the second timed; those after it run under a plan, and their shortest times replace those."""

CONFIG = {"device": "cpu", "budget": {"device": "90%", "host": "512MiB"}, "plan": {"min_bytes": 0, "recompute": False}}
"""A little less than the step needs, so that the steps after the first two run under a plan."""


@dataclass(frozen=True)
class Subject:
    """A model, the class of its optimizer, and what makes a step's loss."""

    model: nn.Module
    optimizer: Callable[..., torch.optim.Optimizer]
    loss: Callable[[nn.Module], Tensor]


class Tagger(nn.Module):
    """LSTM layers between an embedding and a head."""

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (batch, length, vocabulary) for symbols (batch, length)."""
        h = self.embedding(x)
        for layer in self.layers:
            h, _ = layer(h)
        logits: Tensor = self.head(h)
        return logits


def gpt() -> Subject:
    """Returns a byte-level GPT under AdamW."""
    model = GPT(layers=6, width=256, heads=8, length=256)
    x, y = (torch.randint(256, (8, 256)) for _ in range(2))
    return Subject(model, torch.optim.AdamW, lambda net: F.cross_entropy(net(x).flatten(0, 1), y.flatten()))


class Residual(nn.Module):
    """Two convolutions, each with its norm, beside the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        convolutions = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.inner = nn.Sequential(*(nn.Sequential(one, nn.BatchNorm2d(width), nn.ReLU()) for one in convolutions))

    def forward(self, x: Tensor) -> Tensor:
        """Returns feature maps of the shape that came in: (batch, channels, height, width)."""
        return x + self.inner(x)  # type: ignore[no-any-return]


def cnn() -> Subject:
    """Returns a residual net under SGD with momentum."""
    stages: list[nn.Module] = []
    for before, width in itertools.pairwise((3, 32, 64, 128)):
        stages += [nn.Conv2d(before, width, 3, stride=2, padding=1), *(Residual(width) for _ in range(4))]
    model = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 100))
    x, y = torch.randn(32, 3, 64, 64), torch.randint(100, (32,))

    def momentum(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    return Subject(model, momentum, lambda net: F.cross_entropy(net(x), y))


def lstm() -> Subject:
    """Returns an LSTM under Adam."""
    model = Tagger(vocabulary=500, width=192, depth=8)
    x, y = (torch.randint(500, (32, 64)) for _ in range(2))
    return Subject(model, torch.optim.Adam, lambda net: F.cross_entropy(net(x).flatten(0, 1), y.flatten()))


SUBJECTS = {"gpt": gpt, "cnn": cnn, "lstm": lstm}


def record(name: str) -> Trace:
    """Returns the trace of a subject's step, its durations as measured here and now."""
    torch.manual_seed(0)
    subject = SUBJECTS[name]()
    optimizer = subject.optimizer(subject.model.parameters())
    model = tieroff.wrap(subject.model, optimizer, config=CONFIG)
    try:
        for _ in range(STEPS):
            subject.loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        trace = tieroff.engine(model).trace
    finally:
        tieroff.unwrap(model)
    return replace(trace, name=name)


def record_all(folder: Path) -> list[Path]:
    """Records every subject and writes NAME.json into a folder, which is made; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for name in SUBJECTS:
        paths.append(folder / f"{name}.json")
        save_trace(record(name), paths[-1])
    return paths
