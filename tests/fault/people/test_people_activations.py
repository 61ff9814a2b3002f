"""Activations that people write behind autograd's back after it saved them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.support.twins import Setting, assert_same, follow

pytestmark = pytest.mark.timeout(60)


class Written(nn.Module):
    """Layers of which one output is changed between the op that saved it and the op that reads it next."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.shift = nn.Parameter(torch.zeros(16))
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(12)])

    def change(self, h: torch.Tensor) -> None:
        if self.how == "data":
            h.data[:, ::2] = 0
        elif self.how == "data, nobody reads it":
            h.data.mul_(0.5)
        elif self.how == "numpy":
            h.detach().numpy()[:, 3] = 0.25

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            h = torch.sigmoid(layer(x))
            x = h
            if index == 2:
                if self.how == "data, nobody reads it":
                    x = h.sum(0, keepdim=True).expand(512, 16) + self.shift
                self.change(h)
        return x


HOW = ["data", "numpy", "data, nobody reads it"]


@pytest.mark.parametrize("how", HOW)
def test_an_activation_written_after_it_was_saved(how: str, planned_setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Any:
        model = Written(how)
        return model, torch.optim.AdamW(model.parameters(), 1e-2)

    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        loss = model(torch.randn(512, 16)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    with caplog.at_level(logging.INFO, "tieroff"):
        plain, wrapped = follow(make, step, 7), follow(make, step, 7, planned_setting)
    assert_same(plain.seen, wrapped.seen)
    assert wrapped.phase in ("planned", "nothing moved")
    told = [record.getMessage() for record in caplog.records if "it stays on the device from now on" in record.getMessage()]
    assert len(told) == 1, told


def test_what_nobody_writes_does_not_stay(each_setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.RReLU(), nn.Linear(8, 8), nn.Dropout(), nn.Softmax(-1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    each_setting.wrap(model, optimizer)
    with caplog.at_level(logging.INFO, "tieroff"):
        for _ in range(4):
            model(torch.randn(32, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "it stays on the device" not in caplog.text
    tieroff.unwrap(model)
