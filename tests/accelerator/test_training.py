"""Plain training on the simulated device: equal to the CPU's bit for bit, again and again, and without a race."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.accelerator import sim

STEPS = 4
BATCH = 8


class First(nn.Module):
    """The output of a recurrent module, without its state."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.module(x)[0]
        return output


class Attention(nn.Module):
    """Two heads of causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inward(x).view(BATCH, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.outward(mixed.transpose(1, 2).reshape(BATCH, 6, 16))
        return output


class OnTheSide(nn.Module):
    """Runs a part on a stream of its own, ordered by waits and told to the allocator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != sim.NAME:
            return self.second(F.relu(self.first(x)))
        main, side = torch.accelerator.current_stream(x.device), torch.Stream(x.device)
        side.wait_stream(main)
        with side:
            y = F.relu(self.first(x))
        x.record_stream(side)
        main.wait_stream(side)
        y.record_stream(main)
        return self.second(y)


def vectors() -> Tensor:
    return torch.randn(BATCH, 16)


def sequences() -> Tensor:
    return torch.randn(BATCH, 6, 16)


def images() -> Tensor:
    return torch.randn(BATCH, 3, 10, 10)


def tokens() -> Tensor:
    return torch.randint(0, 20, (BATCH, 6))


def square(y: Tensor) -> Tensor:
    return y.abs().square().mean()


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """One model, its data and how it is trained."""

    build: Callable[[], nn.Module]
    data: Callable[[], Tensor] = vectors
    loss: Callable[[Tensor], Tensor] = square
    optimizer: Callable[[object], torch.optim.Optimizer] = sgd
    clips: bool = False
    differs: float = 0.0  # what the CPU computes by another algorithm may differ by
    frees_unordered: bool = False  # what another stream still uses, which is ordered before the memory is given again


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def convolutions() -> nn.Module:
    first = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, nn.Conv2d(8, 4, 3, groups=2), nn.Flatten(), nn.Linear(36, 3))


def classes(y: Tensor) -> Tensor:
    return F.cross_entropy(y, torch.arange(BATCH, device=y.device) % y.shape[1])


def spectrum(y: Tensor) -> Tensor:
    return square(torch.fft.fft(y) * (1 + 2j))


def selection(y: Tensor) -> Tensor:
    return y[y > 0].sum() + y.topk(2).values.sum() + y.sort(descending=True).values[:, 0].sum()


def adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)  # type: ignore[arg-type]


CASES = {
    "mlp": Case(mlp),
    "mlp adamw": Case(mlp, optimizer=lambda p: torch.optim.AdamW(p, foreach=False)),  # type: ignore[arg-type]
    "mlp adamw foreach": Case(mlp, optimizer=lambda p: torch.optim.AdamW(p, foreach=True)),  # type: ignore[arg-type]
    "mlp adamw fused": Case(mlp, optimizer=lambda p: torch.optim.AdamW(p, fused=True)),  # type: ignore[arg-type]
    "mlp clipped": Case(mlp, clips=True),
    "convolutions": Case(convolutions, images, classes),
    "transposed convolution": Case(lambda: nn.Sequential(nn.ConvTranspose2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU()), images),
    "lstm": Case(lambda: First(nn.LSTM(16, 12, 2, batch_first=True)), sequences, differs=1e-6),
    "gru": Case(lambda: First(nn.GRU(16, 12, 2, bidirectional=True)), sequences, differs=1e-6),
    "rnn": Case(lambda: First(nn.RNN(16, 12)), sequences, differs=1e-6),
    "attention": Case(Attention, sequences),
    "transformer": Case(lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), sequences),
    "embedding": Case(lambda: nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 4)), tokens, optimizer=adamw),
    "sparse embedding": Case(
        lambda: nn.Sequential(nn.Embedding(20, 16, sparse=True), nn.Linear(16, 4)),
        tokens,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),  # type: ignore[arg-type]
    ),
    "sparse adam": Case(
        lambda: nn.Sequential(nn.Embedding(20, 16, sparse=True)),
        tokens,
        optimizer=lambda p: torch.optim.SparseAdam(p),  # type: ignore[arg-type]
    ),
    "complex": Case(lambda: nn.Linear(16, 8), loss=spectrum),
    "selection": Case(lambda: nn.Linear(16, 8), loss=selection),
    "side stream": Case(OnTheSide, frees_unordered=True),
}


def train(case: Case, device: str, autocast: torch.dtype | None = None) -> list[Tensor]:
    """Returns the loss of each step and the parameters at the end."""
    torch.manual_seed(0)
    model = case.build().to(device)
    optimizer = case.optimizer(model.parameters())
    scaler = torch.amp.GradScaler(device, enabled=autocast is torch.float16, init_scale=2.0**17)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        x = case.data().to(device)
        with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
            loss = case.loss(model(x).float() if autocast else model(x))
        scaler.scale(loss).backward()
        if case.clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
        del loss  # with its graph, whose AccumulateGrad nodes keep the streams of this step
    return [value.detach().cpu() for value in (*losses, *model.parameters())]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_training_is_that_of_the_cpu(case: Case) -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected, got, again = train(case, "cpu"), train(case, "sim"), train(case, "sim:1")
    assert equal(got, again)
    if case.differs:
        for a, b in zip(expected, got, strict=True):
            torch.testing.assert_close(b, a, rtol=case.differs, atol=case.differs)
    else:
        assert equal(expected, got)
    assert sim.races() == []
    counted = sim.counters()
    wrong = ["dropped_accesses", "unpinned_async_copies", "cross_device_waits", "unregistered_in_flight"]
    if not case.frees_unordered:
        wrong.append("unordered_frees")
    assert {name: counted[name] for name in wrong} == dict.fromkeys(wrong, 0)


def test_evaluation_is_that_of_the_cpu() -> None:
    torch.manual_seed(0)
    model, x = convolutions(), images()
    model(x)  # statistics to normalize by
    expected = model.eval()(x)
    assert torch.equal(model.to("sim")(x.to("sim")).cpu(), expected)


@pytest.mark.parametrize("is_threaded", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_mixed_precision_trains(dtype: torch.dtype, is_threaded: bool) -> None:
    case = Case(mlp, clips=True, optimizer=adamw)
    with torch.autograd.set_multithreading_enabled(is_threaded):
        first, second = train(case, "sim", dtype), train(case, "sim", dtype)
    assert equal(first, second)
    assert all(value.isfinite().all() for value in first)
    if dtype is torch.bfloat16:  # the CPU's autocast has other lists for fp16
        for a, b in zip(train(case, "cpu", dtype), first, strict=True):
            torch.testing.assert_close(b, a, rtol=0.05, atol=0.02)
    assert sim.races() == []


def test_scaler_skips_a_step_with_infinite_gradients() -> None:
    parameter = torch.ones(4, device="sim", requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("sim", init_scale=2.0)
    for factor, expected in ((float("inf"), 1.0), (1.0, 0.9)):
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert parameter.detach().cpu().allclose(torch.tensor(expected))
    assert scaler.get_scale() == 1.0


def test_dropout_repeats_itself_and_checkpoints_draw_it_again() -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 4)).to("sim")
    gradients = []
    for is_checkpointed in (False, True):
        torch.manual_seed(1)
        x = torch.randn(BATCH, 16, device="sim")
        y = checkpoint(model, x, use_reentrant=False) if is_checkpointed else model(x)
        model.zero_grad()
        y.square().sum().backward()
        gradients.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
    assert equal(*gradients)


def test_training_without_a_word_to_the_host_does_not_hold_it_up() -> None:
    model = mlp().to("sim")
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(BATCH, 16, device="sim")
    sim.reset()
    for _ in range(STEPS):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    counted = sim.counters()
    assert counted["kernels"] > 100 and counted["host_waits"] == counted["synchronous_kernels"] == 0
