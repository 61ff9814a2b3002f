"""Inputs, layouts and kinds of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpus.parts import LM, Mlp, adamw, cross_entropy, update
from tests.corpus.run import Program, stranger

STEPS = 9


def contrasted(p: Program, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    """Wraps a model that gives log-probabilities of pairs, and trains it to find each row's own."""
    p.wrap(model, optimizer)
    for index in range(steps):
        loss = -model(p.rows(index, 4, 32)).diagonal().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters(), *model.buffers())


@stranger()
def static_buffers_for_inputs(p: Program) -> None:
    """As for graphs of a device: each batch is copied into the same memory."""
    model = Mlp().to(p.device)
    optimizer = adamw(model)
    x = torch.zeros(6, 32, device=p.device)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        x.copy_(p.rows(index, 6, 32))
        loss = model(x).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger(on_host_bytes=32 << 10)
def channels_last(p: Program) -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 8)).to(p.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 3, 3, 8, 8).contiguous(memory_format=torch.channels_last)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters(), *model.buffers())


@stranger()
def transposed_parameters(p: Program) -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter((torch.randn(32, 32) / 6).t()) for _ in range(4))

        def forward(self, x: torch.Tensor) -> Any:
            for weight in self.weights:
                x = x + torch.tanh(x @ weight)
            return x

    model = Transposed().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@dataclass
class Batch:
    x: torch.Tensor
    scale: float


@stranger()
def batches_in_objects(p: Program) -> None:
    class Net(Mlp):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch.x * batch.scale)

    model = Net().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(Batch(p.rows(index, 6, 32), 0.5)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


class Cache:
    """What each layer made, as models of text return their keys and values."""

    def __init__(self) -> None:
        self.layers: list[torch.Tensor] = []


@stranger()
def outputs_in_objects(p: Program) -> None:
    """A loop has its last output until the next is there, and with it what an object in that holds."""

    class Cached(Mlp):
        def forward(self, x: torch.Tensor) -> Any:
            cache = Cache()
            for layer in self.layers:
                x = torch.tanh(layer(x))
                cache.layers.append(x)
            return {"last": x, "cache": cache}

    model = Cached().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        out = model(p.rows(index, 128, 32))
        loss = out["last"].square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss, out["cache"].layers[0])
    p.note(*model.parameters())


@stranger(needs_host=True)
def sparse_neighbours(p: Program) -> None:
    class Graph(Mlp):
        def forward(self, x: torch.Tensor, neighbours: Any = None) -> Any:
            for layer in self.layers:
                x = x + torch.tanh(neighbours @ layer(x))
            return x

    model = Graph().to(p.device)
    optimizer = adamw(model)
    neighbours = (torch.rand(12, 12, generator=torch.Generator().manual_seed(1)) > 0.7).float().to_sparse()
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 12, 32), neighbours).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger(on_host_bytes=32 << 10)
def mixed_precision(p: Program) -> None:
    model = LM(layers=2).to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        ids = p.tokens(index, 3, 12)
        with torch.autocast(p.device.type, dtype=torch.bfloat16, cache_enabled=False):
            loss = cross_entropy(model(ids), ids)
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def lengths_that_vary(p: Program) -> None:
    model = LM(layers=2).to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS + 3):
        ids = p.tokens(index, 3, (14, 9, 12)[index % 3] if index else 14)
        loss = cross_entropy(model(ids), ids)
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger(on_host_bytes=64 << 10)  # an LSTM takes a copy of its weights
def recurrent_layers(p: Program) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(16, 24, 2), nn.Linear(24, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.rnn(x)[0])

    model = Recurrent().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 5, 4, 16)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def outputs_in_place(p: Program) -> None:
    class InPlace(Mlp):
        def forward(self, x: torch.Tensor) -> Any:
            for layer in self.layers:
                h = layer(x)
                h.add_(x).relu_()
                x = h
            return x

    model = InPlace().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def momentum_encoder(p: Program) -> None:
    """A second encoder follows the first inside forward, and a queue of its outputs is a buffer."""

    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = Mlp(32, 2), Mlp(32, 2).requires_grad_(False)
            self.register_buffer("queue", torch.randn(12, 32))

        def forward(self, x: torch.Tensor) -> Any:
            q = self.query(x)
            with torch.no_grad():
                for k, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    k.data.mul_(0.9).add_(other.data, alpha=0.1)
                k = self.key(x)
                queue: Any = self.queue
                seen = queue.clone()
                queue.copy_(torch.cat((k, seen))[: len(seen)])
            return torch.log_softmax(q @ torch.cat((k, seen)).t(), -1)

    model = Contrast().to(p.device)
    contrasted(p, model, adamw(model))


@stranger()
def layers_of_frequencies(p: Program) -> None:
    """Parameters are complex, and the loop reads each gradient between backward and update."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights, self.beside = nn.Parameter(torch.randn(16, 16, 8, dtype=torch.cfloat) * 0.1), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> Any:
            found = torch.fft.rfft(x, dim=-1)
            kept = torch.zeros_like(found)
            kept[..., :8] = torch.einsum("bik,iok->bok", found[..., :8], self.weights)
            beside = self.beside(x.transpose(1, 2)).transpose(1, 2)
            return torch.nn.functional.gelu(torch.fft.irfft(kept, n=x.shape[-1], dim=-1) + beside)

    model = nn.Sequential(*(Spectral() for _ in range(3))).to(p.device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 2, 16, 32)).square().mean()
        loss.backward()
        p.note([q.grad for q in model.parameters()])
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def lengths_on_the_host(p: Program) -> None:
    """A recurrent net packs sequences of several lengths, which the program keeps on the host, for a loss over alignments."""

    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.head = nn.GRU(16, 32, 2, batch_first=True), nn.Linear(32, 12)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, _ = nn.utils.rnn.pad_packed_sequence(self.net(packed)[0], batch_first=True)
            return self.head(out).log_softmax(-1)

    model = Speech().to(p.device)
    optimizer = adamw(model)
    lengths = torch.tensor([20, 14, 9])
    p.wrap(model, optimizer)
    for index in range(STEPS):
        found = model(p.rows(index, 3, 20, 16), lengths).transpose(0, 1)
        loss = torch.ctc_loss(found, p.tokens(index, 3, 5, vocabulary=11) + 1, lengths.tolist(), [5, 4, 3]).mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def labels_without_times(p: Program) -> None:
    """Speech: `ctc_loss`, which gets lengths as tensors of the host, as its documentation has them."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 24)).to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    lengths, label_lengths = torch.full((3,), 12), torch.tensor([5, 4, 2])
    for index in range(STEPS):
        probabilities = model(p.rows(index, 12, 3, 32)).log_softmax(-1)
        labels = p.tokens(index, 3, 5, vocabulary=23) + 1
        loss = F.ctc_loss(probabilities, labels, lengths, label_lengths)
        loss = loss + nn.CTCLoss(reduction="sum", zero_infinity=True)(probabilities, labels, lengths, label_lengths) / 9
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger(is_counted=False)  # inside forward there are both, the old memory and the new one
def momentum_encoder_on_new_memory(p: Program) -> None:
    """An encoder that follows another by `k.data = ...` (MoCo); the plan keeps it on the device in part."""

    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = Mlp(32, 3), Mlp(32, 3).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> Any:
            q = self.query(x)
            with torch.no_grad():
                for k, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    k.data = k.data * 0.9 + other.data * 0.1
                k = self.key(x)
            return torch.log_softmax(q @ k.t(), -1)

    model = Contrast().to(p.device)
    # A plan made again, as at step 33 on a busy machine, may keep more there: then steps are traced again, twice at most.
    contrasted(p, model, torch.optim.SGD(model.query.parameters(), 0.1, momentum=0.9), steps=44)


@stranger()
def lengths_made_in_forward(p: Program) -> None:
    """A model computes its own loss over alignments, with lengths that it counts on the device (Wav2Vec2ForCTC)."""

    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.head = nn.Linear(16, 32), nn.Linear(32, 12)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            found = self.head(torch.tanh(self.up(x))).log_softmax(-1).transpose(0, 1)
            is_label = labels > 2
            lengths = torch.full((len(x),), x.shape[1], device=x.device)
            return F.ctc_loss(found, labels.masked_select(is_label), lengths, is_label.sum(-1))

    model = Speech().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        labels = p.tokens(0, 3, 5, vocabulary=12)
        loss = model(p.rows(index, 3, 20, 16), labels)
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def positions_that_are_gathered(p: Program) -> None:
    """A model predicts masked positions alone, of which every second step has more: sizes depend on values, by turns."""

    class Masked(LM):
        def forward(self, ids: torch.Tensor) -> Any:
            is_masked = ids < 4
            found = self.head(self.trunk(ids.clamp(min=4))[is_masked])
            return F.cross_entropy(found, ids[is_masked])

    model = Masked(layers=2).to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS + 1):
        ids = p.tokens(index, 3, 12, vocabulary=40) + 4
        ids[:, : 2 + index % 2] = index % 4
        loss = model(ids)
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())
