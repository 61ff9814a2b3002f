"""Activations that people write behind autograd's back after it saved them."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tieroff
from tests.support.twins import Setting, adam, assert_same, follow

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning")]
TOLD = "it stays on the device from now on"

SETTINGS: dict[str, dict[str, Any]] = {
    "cpu-floor": {"nvme": True},
    "delayed-auto-80": {"policy": "auto", "device": "80%", "delayed": True},
    "cpu-auto-50": {"policy": "auto", "device": "50%"},
    "delayed-auto-100": {"policy": "auto", "device": "100%", "nvme": True, "delayed": True},
    "cpu-demand": {"policy": "demand", "device": "90%"},
}


@pytest.fixture(params=SETTINGS)
def each(tmp_path: Path, request: pytest.FixtureRequest) -> Setting:
    return Setting(tmp_path, **SETTINGS[request.param])


class Written(nn.Module):
    """Layers of which one output is changed between the op that saved it and the op that reads it next."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.shift = nn.Parameter(torch.zeros(16))
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(8)])

    def change(self, h: torch.Tensor) -> None:
        if self.how == "data":
            h.data[:, ::2] = 0
        elif self.how == "numpy":
            h.detach().numpy()[:, 3] = 0.25
        else:
            h.data.mul_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            h = torch.sigmoid(layer(x))
            x = h
            if index == 2:
                if self.how == "data, nobody reads it":
                    x = h.sum(0, keepdim=True).expand(64, 16) + self.shift
                self.change(h)
        return x


def step_on(*shape: int) -> Callable[[Any, Any, int], Any]:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        loss = model(torch.randn(*shape)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def run(
    make: Callable[[], Any], step: Any, setting: Setting, caplog: pytest.LogCaptureFixture, steps: int = 7
) -> tuple[Any, int]:
    """Asserts equal bits after every step; returns how the last one ran, and how many activations were found written."""

    def made() -> tuple[Any, Any]:
        model = make()
        return model, adam(model)

    with caplog.at_level(logging.INFO, "tieroff"):
        plain, wrapped = follow(made, step, steps), follow(made, step, steps, setting)
    assert_same(plain.seen, wrapped.seen)
    return wrapped, sum(TOLD in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("how", ["data", "numpy", "data, nobody reads it"])
def test_an_activation_written_after_it_was_saved(how: str, each: Setting, caplog: pytest.LogCaptureFixture) -> None:
    wrapped, found = run(lambda: Written(how), step_on(64, 16), each, caplog)
    assert found == 1
    assert wrapped.phase in ("planned", "on demand", "nothing moved")
    assert caplog.text.count("traced again") == 0


def test_one_of_a_smaller_batch_that_follows_the_plan_of_a_larger(each: Setting, caplog: pytest.LogCaptureFixture) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        return step_on(64 if index < 6 else 48, 16)(model, optimizer, index)

    wrapped, found = run(lambda: Written("data"), step, each, caplog, steps=9)
    assert found == 1
    assert wrapped.phase in ("planned", "on demand", "nothing moved")


def test_a_written_activation_in_steps_that_leave_their_plan(each: Setting, caplog: pytest.LogCaptureFixture) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        out = step_on(64, 16)(model, optimizer, index)
        if index % 3 == 2:
            with torch.no_grad():
                model.layers[0].weight.clamp_(-1, 1)
            model(torch.randn(64, 16)).sum().backward()
            model(torch.randn(64, 16)).sum().backward()
        return out

    _, found = run(lambda: Written("data"), step, each, caplog, steps=9)
    assert found >= 1


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.inner, self.out = kind(8, 8, num_layers=2, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.inner(x)[0])
        return out


class InPlace(nn.Module):
    """Ops in place, views, dropout, a checkpoint, and a cache that is filled without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.noise = nn.Sequential(nn.ReLU(inplace=True), nn.RReLU(), nn.Dropout(0.3), nn.Softmax(-1))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.noise(self.norm(self.first(x)))
        parts = torch.zeros_like(h)
        for i in range(4):
            parts[:, 2 * i : 2 * i + 2] = h[:, 2 * i : 2 * i + 2] * (i + 1)
        h = checkpoint(self.second, parts, use_reentrant=False)
        with torch.no_grad():
            cache = torch.empty(4, *h.shape)
            for i in range(4):
                cache[i].copy_(self.third(h))
        left, right = h[:, :4], h[:, 4:]
        left = left.sigmoid_().mul(right)
        out: torch.Tensor = self.third(torch.cat([left, right], -1)) + cache.mean(0)
        return out


ORDINARY: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lstm": (lambda: Recurrent(nn.LSTM), (4, 5, 8)),
    "gru": (lambda: Recurrent(nn.GRU), (4, 5, 8)),
    "rnn": (lambda: Recurrent(nn.RNN), (4, 5, 8)),
    "in place": (InPlace, (16, 8)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (4, 5, 8)),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_what_nobody_writes_does_not_stay(name: str, setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    make, shape = ORDINARY[name]
    wrapped, found = run(make, step_on(*shape), setting, caplog, steps=5)
    assert found == 0
    assert wrapped.phase == "planned"


def test_generation_beside_training_keeps_nothing(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=32, bos_token_id=0, eos_token_id=1
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    setting.wrap(model, optimizer)
    with caplog.at_level(logging.INFO, "tieroff"):
        for _ in range(5):
            tokens = torch.randint(2, 32, (2, 8))
            model(input_ids=tokens, labels=tokens).loss.backward()
            model.generate(tokens[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
            optimizer.step()
            optimizer.zero_grad()
    assert TOLD not in caplog.text
    assert tieroff.engine(model).stats().phase == "planned"
    tieroff.unwrap(model)


class Parts(nn.Module):
    """Layers whose output is cut into parts that count their versions apart; each is written, then saved several times."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draws = random.Random(seed)
        self.layers = nn.ModuleList(nn.Linear(12, 24) for _ in range(3))
        self.out = nn.Linear(12, 12)
        self.cuts = [draws.choice(["unsafe_chunk", "unsafe_split"]) for _ in self.layers]
        self.ops = [[(draws.randrange(6), draws.randrange(2)) for _ in range(6)] for _ in self.layers]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, cut, ops in zip(self.layers, self.cuts, self.ops, strict=True):
            whole = layer(x)
            parts = list(whole.unsafe_chunk(2, 1) if cut == "unsafe_chunk" else whole.unsafe_split(12, 1))
            total = torch.zeros(())
            saved = set[int]()
            for op, at in ops:
                part, other = parts[at], parts[1 - at]
                if op < 3 and at not in saved:
                    parts[at] = (part.sigmoid_, part.tanh_, part.exp_)[op]()
                elif op == 3:
                    total = total + part * other
                    saved.add(1 - at)
                elif op == 4:
                    total = total + part.sin()
                else:
                    total = total + self.out(part)
                saved.add(at)
            x = torch.tanh(total + parts[0] + parts[1])
        return x


@pytest.mark.parametrize("seed", range(6))
def test_parts_of_a_storage_that_are_written_and_saved_one_by_one(seed: int, each: Setting) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Parts(seed)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    plain, wrapped = (follow(make, step_on(8, 12), 5, setting) for setting in (None, each))
    assert_same(plain.seen, wrapped.seen)
    assert wrapped.phase in ("planned", "nothing moved")
