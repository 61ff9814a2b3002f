"""The workloads of the parity tests: small models, each with something that is easy to get wrong."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.parity import Trainer, Workload

WIDTH = 32
VOCABULARY = 50


def tokens() -> tuple[Tensor, ...]:
    return (torch.randint(0, VOCABULARY, (2, 16)),)


def vectors() -> tuple[Tensor, ...]:
    return (torch.randn(8, WIDTH),)


def images() -> tuple[Tensor, ...]:
    return (torch.randn(4, 3, 12, 12),)


def sequences() -> tuple[Tensor, ...]:
    return (torch.randn(4, 6, WIDTH),)


def next_token(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())


class Block(nn.Module):
    """A transformer block with heads of 8."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(batch, length, 3, width // 8, 8).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """A language model; tied: the head shares the embedding, and the one block is called twice."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(16, WIDTH) * 0.02)
        block = Block()
        self.blocks = nn.ModuleList([block, block] if is_tied else [block, Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class CheckpointedRecurrent(Recurrent):
    """The LSTM, which reads its weights from a list of its own, runs once more in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(lambda y: self.rnn(y)[0][:, -1], x.exp().sin(), use_reentrant=False))


class InPlace(nn.Module):
    """In-place ops on outputs, and views of one storage saved for backward, some of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu_()
        a, b = y.chunk(2, dim=-1)
        z = a * b.sigmoid() + a.t().t() * self.scale
        z += x
        z = self.second(z).add_(1).mul_(self.scale)
        z[:, 0] = z[:, 1] * 2
        return z * z.view(-1, WIDTH // 2, 2).flip(-1).reshape(-1, WIDTH)


# A checkpoint keeps the state of the CPU's generator, which no operator makes.
KEPT_GENERATORS_BYTES = 2 * torch.get_rng_state().nbytes


class Checkpointed(nn.Module):
    """Two of three parts are recomputed in backward, with dropout in them."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.parts[0](x)
        for part in self.parts[1:]:
            x = x + checkpoint(part, x, use_reentrant=self.is_reentrant)
        return x


class Unused(nn.Module):
    """A parameter that no forward reads, and a branch whose output no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.ignored = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.ignored(x)
        return self.head(self.used(x).tanh())


def mlp(*, dropout: float = 0.0, norm: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)] if norm else [nn.Linear(WIDTH, WIDTH)]
        layers += [nn.GELU(), nn.Dropout(dropout)] if dropout else [nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4)).to(dtype)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3),
        nn.GroupNorm(4, 16),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 4),
    )


def frozen() -> nn.Module:
    model = mlp()
    assert isinstance(model, nn.Sequential)
    for parameter in model[:3].parameters():
        parameter.requires_grad_(False)
    model.get_parameter("2.bias").requires_grad_(True)
    return model


def under_autocast(model: nn.Module, *batch: Tensor) -> Tensor:
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        out = model(*batch)
    return out.float().square().mean()


def accumulate(trainer: Trainer, set_to_none: bool = True) -> None:
    for _ in range(3):
        (trainer.loss() / 3).backward()
    trainer.update(set_to_none=set_to_none)


def accumulate_into_zeros(trainer: Trainer) -> None:
    accumulate(trainer, set_to_none=False)


def clear_first(trainer: Trainer) -> None:
    """As many tutorials have it: gradients live on to the next step."""
    trainer.optimizer.zero_grad()
    trainer.loss().backward()
    trainer.update(clears=False)


def clear_between(trainer: Trainer) -> None:
    loss = trainer.loss()
    trainer.optimizer.zero_grad()
    loss.backward()
    trainer.update(clears=False)


def backward_twice(trainer: Trainer) -> None:
    out = trainer.model(*trainer.batch())
    trainer.note(out.square().mean()).backward(retain_graph=True)
    trainer.note(out.sum()).backward()
    trainer.update()


def one_loss_twice(trainer: Trainer) -> None:
    loss = trainer.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    trainer.update()


def penalize_input_gradient(trainer: Trainer) -> None:
    (x,) = trainer.batch()
    out = trainer.model(x.requires_grad_())
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    trainer.note(out.square().mean() + slope.square().mean()).backward()
    trainer.update()


def penalize_parameter_gradients(trainer: Trainer) -> None:
    loss = trainer.loss()
    slopes = torch.autograd.grad(loss, list(trainer.model.parameters()), create_graph=True)
    trainer.note(loss + sum(slope.square().sum() for slope in slopes)).backward()
    trainer.update()


GPT_WORKLOAD = Workload("gpt", GPT, tokens, next_token)
MLP_WORKLOAD = Workload("mlp", mlp, vectors)
DROPOUT = Workload("dropout", lambda: mlp(dropout=0.3), vectors)
CNN = Workload("cnn", cnn, images)

MODELS = (
    GPT_WORKLOAD,
    Workload("mlp_batchnorm", lambda: mlp(norm=True), vectors),
    CNN,
    Workload("lstm", lambda: Recurrent(nn.LSTM), sequences),
    Workload("gru", lambda: Recurrent(nn.GRU), sequences),
    Workload("tied_and_shared", lambda: GPT(is_tied=True), tokens, next_token),
    Workload("encoder_layer", lambda: nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True), sequences),
    Workload("in_place_and_views", InPlace, vectors),
    DROPOUT,
    Workload("checkpoint_reentrant", lambda: Checkpointed(is_reentrant=True), vectors, unseen_bytes=KEPT_GENERATORS_BYTES),
    Workload("checkpoint_nonreentrant", lambda: Checkpointed(is_reentrant=False), vectors, unseen_bytes=KEPT_GENERATORS_BYTES),
    Workload("checkpointed_lstm", lambda: CheckpointedRecurrent(nn.LSTM), sequences, unseen_bytes=KEPT_GENERATORS_BYTES),
    replace(GPT_WORKLOAD, name="autocast", objective=under_autocast),
    Workload("bfloat16", lambda: mlp(dtype=torch.bfloat16), lambda: (torch.randn(8, WIDTH).bfloat16(),)),
    Workload("frozen", frozen, vectors),
    Workload("unused", Unused, vectors),
    replace(GPT_WORKLOAD, name="accumulation", step=accumulate),
    replace(GPT_WORKLOAD, name="accumulation_into_zeros", step=accumulate_into_zeros, steps=8),
)

LOOPS = (
    replace(MLP_WORKLOAD, name="backward_twice", step=backward_twice),
    replace(GPT_WORKLOAD, name="one_loss_twice", step=one_loss_twice),
    replace(MLP_WORKLOAD, name="clear_first", step=clear_first),
    replace(MLP_WORKLOAD, name="clear_between", step=clear_between, steps=8),
    replace(MLP_WORKLOAD, name="input_gradient_penalty", step=penalize_input_gradient),
    replace(MLP_WORKLOAD, name="parameter_gradient_penalty", step=penalize_parameter_gradients),
)
