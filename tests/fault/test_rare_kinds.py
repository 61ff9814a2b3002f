"""Kinds of tensors and modules that are rare in one model: the plain run's numbers, and steps that keep their plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

from tests.support.twins import Setting, adam, check_twins
from tests.support.twins import usual_step as usual

pytestmark = pytest.mark.timeout(60)


class Kinds(nn.Module):
    """Parameters of many types: bf16, 8 bits, integers, none or one element, a part of a storage, transposed, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.eight = nn.Parameter(torch.randn(8, 8).to(torch.float8_e4m3fn), requires_grad=False)
        self.one, self.none = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 8))
        self.part = nn.Parameter(torch.randn(9 * 8)[8:].view(8, 8))
        self.transposed = nn.Parameter(torch.randn(8, 8).t())
        self.expanded = nn.Parameter(torch.randn(8, 1).expand(8, 8), requires_grad=False)
        self.integers = nn.Parameter(torch.arange(8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.low(x.bfloat16()).float() @ self.eight.float() * self.one + self.none.sum()
        return h @ self.part @ self.transposed + self.integers + self.expanded[:1]


class Doubling(torch.autograd.Function):
    """Writes its input, and has an output without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        x.mul_(2)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        is_positive = x.detach() > 0
        ctx.mark_non_differentiable(is_positive)
        return x, is_positive

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return None if grads[0] is None else grads[0] * 2, x.sum(0)


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, is_positive = Doubling.apply(self.first(x) * 1, self.weight)  # type: ignore[no-untyped-call]
        out: torch.Tensor = self.last(y * is_positive) + self.weight
        return out


class Quantized(nn.Module):
    """Training as if weights and activations had 8 bits; observers write their buffers in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        observed = FakeQuantize.with_args(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
        self.of_weights, self.of_values = observed(), observed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.linear(x, self.of_weights(self.first.weight), self.first.bias)
        out: torch.Tensor = self.last(self.of_values(torch.relu(h)))
        return out


class Own(torch.Tensor):
    """A class of one's own."""


class Classes(nn.Module):
    """Activations of a class of one's own, complex ones, and conjugates."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: Any = torch.tanh(self.first(x.as_subclass(Own)))
        h = torch.complex(h.as_subclass(torch.Tensor), self.first(x)).conj().exp().conj()
        out: torch.Tensor = self.last(torch.tanh(h).real) + h.imag
        return out


@pytest.mark.parametrize("build", [Kinds, Doubled, Quantized, Classes])
def test_rare_kinds(build: type[nn.Module], each_setting: Setting) -> None:
    def make() -> Any:
        model = build()
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)

    check_twins(make, usual, each_setting)


def test_evaluation_by_the_fast_path_of_an_encoder(each_setting: Setting) -> None:
    """In evaluation torch's encoder runs as one kernel, which reads its parameters past Python."""

    def make() -> Any:
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        return model, adam(model)

    def step(model: Any, optimizer: Any, index: int) -> Any:
        model.train()
        optimizer.zero_grad()
        loss = model(torch.randn(2, 4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            seen = model(torch.randn(2, 4, 8))
        with torch.inference_mode():
            return loss, seen, model(torch.randn(2, 4, 8)).clone()

    check_twins(make, step, each_setting)
