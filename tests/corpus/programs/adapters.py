"""Adapters, frozen parts and layers that come and go."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from tests.corpus.parts import LM, Mlp, adamw, cross_entropy, update, with_adapters
from tests.corpus.run import Program, stranger

STEPS = 9


@stranger()
def adapters_switched_in_mid_forward(p: Program) -> None:
    """A policy and its reference are one model: adapters off for the reference, in the same step."""
    model = LM().to(p.device)
    made = with_adapters(model)
    for adapter in made:
        adapter.to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        ids = p.tokens(index, 3, 12)
        logits = model(ids)
        for adapter in made:
            adapter.is_on = False
        with torch.no_grad():
            reference = model(ids)
        for adapter in made:
            adapter.is_on = True
        loss = cross_entropy(logits, ids) + (logits - reference).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger(planned=0)
def gradients_switched_off_in_mid_forward(p: Program) -> None:
    class Switching(Mlp):
        def forward(self, x: torch.Tensor) -> Any:
            for i, layer in enumerate(self.layers):
                layer.requires_grad_(i != 1)
                x = x + torch.tanh(layer(x))
                layer.requires_grad_(True)
            return x

    model = Switching().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        p.note([q.grad for q in model.parameters()])
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def hooks_put_on_and_off_in_each_forward(p: Program) -> None:
    model = Mlp().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        handles = [layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,)) for layer in model.layers]
        loss = model(p.rows(index, 6, 32)).square().mean()
        for handle in handles:
            handle.remove()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger(planned=1)
def adapters_merged_and_begun_again(p: Program) -> None:
    """ReLoRA: every few steps what the adapters have learned goes into the frozen weight."""
    model = LM(layers=2).to(p.device)
    made = with_adapters(model)
    for adapter in made:
        adapter.to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS + 4):
        ids = p.tokens(index, 3, 12)
        loss = cross_entropy(model(ids), ids)
        loss.backward()
        update(optimizer)
        if index == 6:
            with torch.no_grad():
                for adapter in made:
                    adapter.base.weight += adapter.b.weight @ adapter.a.weight
                    adapter.b.weight.zero_()
                    for q in (adapter.a.weight, adapter.b.weight):
                        optimizer.state[q]["exp_avg"].zero_()
        p.end(model, loss)
    p.note(*model.parameters())


@stranger(planned=0)
def layers_that_take_turns(p: Program) -> None:
    """LISA: a few layers at a time are trained."""
    model = LM(layers=4).to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(12):
        if index % 4 == 0:
            for i, block in enumerate(model.blocks):
                block.requires_grad_(i == index // 4)
        ids = p.tokens(index, 3, 12)
        loss = cross_entropy(model(ids), ids)
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def frozen_prefix(p: Program) -> None:
    model = LM().to(p.device)
    for part in (model.embed, model.blocks[0], model.blocks[1]):
        part.requires_grad_(False)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        ids = p.tokens(index, 3, 12)
        loss = cross_entropy(model(ids), ids)
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


class Sparse(nn.Module):
    """A frozen layer and what is added to few elements of its weight."""

    positions: torch.Tensor

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.values = nn.Parameter(0.1 * torch.randn(count))
        self.register_buffer("positions", torch.randperm(width * width)[:count].sort().values)

    def forward(self, x: torch.Tensor) -> Any:
        rows, columns = self.positions // len(self.base.weight), self.positions % len(self.base.weight)
        added = torch.sparse_coo_tensor(
            torch.stack([rows, columns]), self.values * 2, self.base.weight.shape, is_coalesced=True
        )
        return torch.tanh(F.linear(x, self.base.weight + added, self.base.bias))


@stranger()
def sparse_adapters_computed_again(p: Program) -> None:
    """Adapters on checkpointed layers behind a frozen one, whose output is given gradients, as checkpoints want them."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(32, 48).requires_grad_(False)
            self.layers = nn.ModuleList(Sparse(48, 200) for _ in range(4))

        def forward(self, x: torch.Tensor) -> Any:
            x = self.embed(x).requires_grad_()
            for layer in self.layers:
                x = x + checkpoint(layer, x, use_reentrant=False)
            return x

    model = Net().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        out = model(p.rows(index, 64, 32))
        loss = out.square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def delegating_modules(p: Program) -> None:
    """A wrapper passes every attribute on to the module inside."""

    class Delegating(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x) + self.layers[0].weight.sum() * 0.01

    model = Delegating(Mlp()).to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def weight_norm_on_layers(p: Program) -> None:
    model = Mlp().to(p.device)
    for layer in model.layers:
        weight_norm(layer)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger(is_counted=False)
def averaged_weights_for_a_look(p: Program) -> None:
    """An average is swapped in for an evaluation between steps."""
    model = Mlp().to(p.device)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
        with torch.no_grad():
            for mean, q in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(q, 0.2)
            kept = [q.detach().clone() for q in model.parameters()]
            for mean, q in zip(average.parameters(), model.parameters(), strict=True):
                q.copy_(mean)
            p.note(model(p.rows(index + 50, 6, 32)))
            for old, q in zip(kept, model.parameters(), strict=True):
                q.copy_(old)
    p.note(*model.parameters())


@stranger()
def experts_of_which_some_are_unused(p: Program) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(32, 4), nn.ModuleList(Mlp(32, 2) for _ in range(4))

        def forward(self, x: torch.Tensor) -> Any:
            shares = self.gate(x).softmax(-1)
            return sum(shares[:, i : i + 1] * self.experts[i](x) for i in (0, 2))

    model = Experts().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def pieces_of_four_bits(p: Program) -> None:
    """A frozen weight lies packed in bytes; a Function unpacks it twice, and an adapter learns."""

    class Packed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            ctx.packed, ctx.scale = packed, scale
            return x @ unpacked(packed, scale).t()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] @ unpacked(ctx.packed, ctx.scale), None, None

    def unpacked(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        halves = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
        return (halves.float() - 8) * scale

    class Quantized(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.packed = nn.Parameter(torch.randint(0, 255, (width, width // 2), dtype=torch.uint8), requires_grad=False)
            self.register_buffer("scale", torch.full((), 0.02))
            self.adapter = nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> Any:
            return Packed.apply(x, self.packed, self.scale) + self.adapter(x)  # type: ignore[no-untyped-call]

    model = nn.Sequential(*(Quantized(32) for _ in range(3))).to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())
