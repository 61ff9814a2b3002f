"""Models that are split over devices in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tieroff.core.machine import Machine

MACHINE = Machine(
    name="test",
    device_bytes=8_000_000_000,
    host_bytes=64_000_000_000,
    d2h_bytes_per_s=8_000_000_000,
    h2d_bytes_per_s=8_000_000_000,
    fp32_flops_per_s=15e12,
    device_memory_bytes_per_s=800_000_000_000,
    peer_bytes_per_s=25_000_000_000,
)


class Block(nn.Module):
    """A layer of a GPT with the parameters of each projection apart."""

    def __init__(self, width: int, heads: int, is_fused: bool = True) -> None:
        super().__init__()
        self.is_fused = is_fused
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.value, self.out = (nn.Linear(width, width) for _ in range(3))
        # Attention does not depend on a bias of the keys: its gradient is rounding alone, which AdamW makes large.
        self.key = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(b, t, self.heads, d // self.heads).transpose(1, 2) for f in (self.query, self.key, self.value))
        if self.is_fused:
            a = F.scaled_dot_product_attention(q, k, v)
        else:
            a = torch.softmax(q @ k.transpose(-1, -2) * (d // self.heads) ** -0.5, -1) @ v
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        result: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class Gpt(nn.Module):
    """Layers and a head."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2, words: int = 128, is_fused: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, is_fused) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(self.norm(x))
        return y


class Mlp(nn.Module):
    """Two layers."""

    def __init__(self, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return y


def layer_of_width_1024() -> tuple[nn.Module, tuple[Any, ...]]:
    """The layer in which Megatron's split is known to be good: batch 8, 64 words."""
    return Block(1024, 16), (torch.randn(8, 64, 1024),)


def small_gpt() -> tuple[nn.Module, tuple[Any, ...]]:
    """Two layers of width 64, batch 8, 16 words."""
    return Gpt(), (torch.randn(8, 16, 64),)


def fused_gpt() -> tuple[nn.Module, tuple[Any, ...]]:
    """One layer of width 32, batch 8, 8 words."""
    return Gpt(32, 4, 1, 64), (torch.randn(8, 8, 32),)


def plain_gpt() -> tuple[nn.Module, tuple[Any, ...]]:
    """One layer of width 32 whose attention is made of products, batch 8, 8 words."""
    return Gpt(32, 4, 1, 64, is_fused=False), (torch.randn(8, 8, 32),)


def small_mlp() -> tuple[nn.Module, tuple[Any, ...]]:
    """Width 32, batch 16."""
    return Mlp(), (torch.randn(16, 32),)


class Residual(nn.Module):
    """Two convolutions round which the input is added."""

    def __init__(self, channels: int, made: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, made, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(made), nn.BatchNorm2d(made)
        self.second = nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(channels, made, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.second(torch.relu(self.norm1(self.first(x)))))
        result: torch.Tensor = torch.relu(y + self.shortcut(x))
        return result


class ResNet(nn.Module):
    """A stem, two blocks and a head."""

    def __init__(self, channels: int = 8, classes: int = 16) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(4, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)
        self.blocks = nn.Sequential(Residual(channels, channels, 1), Residual(channels, 2 * channels, 2))
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.blocks(torch.relu(self.norm(self.stem(x))))
        found: torch.Tensor = self.head(y.mean((2, 3)))
        return found


def small_resnet() -> tuple[nn.Module, tuple[Any, ...]]:
    """Batch 8, 4 channels of 8 times 8."""
    return ResNet(), (torch.randn(8, 4, 8, 8),)


def wide_mlp() -> tuple[nn.Module, tuple[Any, ...]]:
    """Three layers with weights of 1 MiB each, beside which the activations of a batch of 32 are small."""
    layers = [nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 1024)]
    return nn.Sequential(*layers), (torch.randn(32, 256),)


@torch.library.custom_op("tieroff_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """An operator that nobody gives ways to split."""
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda context, gradient: gradient * 2)


class Unusual(nn.Module):
    """A layer, an operator that nobody knows, and a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.again = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.again.weight = self.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.again(doubled(self.linear(x)))
        return result


def unusual() -> tuple[nn.Module, tuple[Any, ...]]:
    """Batch 4."""
    return Unusual(), (torch.randn(4, 8),)


FACTORIES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "gpt": fused_gpt,
    "plain gpt": plain_gpt,
    "mlp": small_mlp,
    "resnet": small_resnet,
    "unusual": unusual,
}

Values = dict[str, torch.Tensor]


def made(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[nn.Module, torch.Tensor]:
    """Returns one of the models and its batch, the same in every process."""
    # AdamW moves an element by the learning rate however small its gradient is. With some seeds one element's gradient is
    # rounding alone, and then it differs by more than what sums in another order explain.
    torch.manual_seed(2)
    model, (batch,) = FACTORIES[name]()
    return model.to(device, dtype), batch.to(device, dtype)


def whole(model: nn.Module) -> Values:
    """Returns parameters and buffers on the CPU, each whole."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    plain = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in named.items()}
    return {key: value.detach().to("cpu", copy=True) for key, value in plain.items()}


def held_share(model: nn.Module, count: int) -> float:
    """Returns how many of a number of parameters this rank holds, as a share."""
    return sum(parameter.to_local().numel() for parameter in model.parameters()) / count  # type: ignore[attr-defined]


def distance(ours: Values, theirs: Values) -> float:
    """Returns the greatest difference of two models' values."""
    assert sorted(ours) == sorted(theirs)
    return max(float((ours[key] - value).abs().max()) for key, value in theirs.items())


def train(model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Takes some steps of an ordinary loop; returns the losses."""
    losses = []
    for _ in range(steps):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_otherwise(model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer) -> list[float]:
    """Takes steps that no plan is made for: rounds of gradients, other batches, clipping, evaluation. Returns sums."""
    sums = []
    for _ in range(2):
        for part in (batch, batch * 0.5, batch[: len(batch) // 2]):
            model(part).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        model.eval()
        with torch.no_grad():
            sums.append(model(batch).sum().item())
        model.train()
    return sums
