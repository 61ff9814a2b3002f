"""What went wrong under other ways to offload: saved views, weights in Functions, hooks on nodes, weights of other modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.corpus.parts import LM, Mlp, adamw, cross_entropy, update, with_adapters
from tests.corpus.run import Program, stranger

STEPS = 9


def trained(p: Program, model: nn.Module, optimizer: Any, *shape: int) -> None:
    """Wraps a model and trains it on rows of this shape."""
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, *(shape or (6, 32)))).square().mean()
        loss.backward()
        p.note([q.grad for q in model.parameters()])
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def views_of_one_activation(p: Program) -> None:
    """An activation is saved whole, transposed, as a slice with steps and flipped: of one memory, each of its own form."""

    class Views(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, x.t(), x[::2], x.flip(0))
            return x * x.t()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x, turned, some, _ = ctx.saved_tensors
            grad = grads[0] * turned + (grads[0] * x).t()
            return grad + some.mean() * 0.01

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

        def forward(self, x: torch.Tensor) -> Any:
            for layer in self.layers:
                x = x + torch.tanh(Views.apply(torch.tanh(layer(x))))  # type: ignore[no-untyped-call]
            return x

    model = Square().to(p.device)
    trained(p, model, adamw(model), 24, 24)


@stranger()
def tensors_of_the_host_in_a_function(p: Program) -> None:
    """A Function saves a table that lies on the host, wherever the model computes."""

    class Looked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, table)
            return x * table.to(x.device)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x, table = ctx.saved_tensors
            assert table.device.type == "cpu"
            return grads[0] * table.to(x.device), None

    class Scaled(Mlp):
        def forward(self, x: torch.Tensor) -> Any:
            for index, layer in enumerate(self.layers):
                table = torch.linspace(0.5, 1.5, 32) + index * 0.1
                x = x + torch.tanh(Looked.apply(layer(x), table))  # type: ignore[no-untyped-call]
            return x

    model = Scaled().to(p.device)
    trained(p, model, adamw(model))


@stranger()
def weights_that_ask_whether_they_learn(p: Program) -> None:
    """A Function computes the gradient of a weight where that says that it wants one: a frozen one does not."""

    class Asking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x, w = ctx.saved_tensors
            return grads[0] @ w, grads[0].t() @ x if w.requires_grad and w.is_leaf else None

    class Layers(Mlp):
        def forward(self, x: torch.Tensor) -> Any:
            for layer in self.layers:
                x = x + torch.tanh(Asking.apply(x, layer.weight) + layer.bias)  # type: ignore[no-untyped-call]
            return x

    model = Layers().to(p.device)
    model.layers[1].requires_grad_(False)
    trained(p, model, adamw(model))


@stranger()
def hooks_on_the_nodes_that_accumulate(p: Program) -> None:
    """As a trainer's own data parallelism: gradients go from a hook of the node into a buffer of a higher type."""
    model = Mlp().to(p.device)
    nodes, main = [], {name: torch.zeros_like(q) for name, q in model.named_parameters()}

    def hook_of(name: str, q: torch.Tensor) -> Any:
        def arrived(*_: Any) -> None:
            assert q.grad is not None
            main[name].add_(q.grad)
            q.grad = None

        return arrived

    for name, q in model.named_parameters():
        node: Any = q.expand_as(q).grad_fn
        nodes.append(node.next_functions[0][0])  # held: a parameter holds its node weakly
        nodes[-1].register_hook(hook_of(name, q))
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        for part in range(2):
            model(p.rows(2 * index + part, 6, 32)).square().mean().backward()
        for name, q in model.named_parameters():
            q.grad = main[name].clone()
            main[name].zero_()
        p.note([q.grad for q in model.parameters()])
        update(optimizer)
        p.end(model)
    p.note(*model.parameters())


@stranger()
def weights_of_another_module(p: Program) -> None:
    """A head reads the embedding of another module in its forward, and one layer has the weight and bias of the first."""

    class Head(nn.Module):
        def __init__(self, owner: Any) -> None:
            super().__init__()
            self.owner = [owner]  # no child

        def forward(self, x: torch.Tensor) -> Any:
            return x @ self.owner[0].weight.t() + self.owner[0].weight.sum(1) * 0.01

    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = nn.Embedding(48, 32), Mlp()
            last: Any = self.body.layers[3]
            first: Any = self.body.layers[0]
            last.weight, last.bias = first.weight, first.bias
            self.head = Head(self.embed)

        def forward(self, ids: torch.Tensor) -> Any:
            return self.head(self.body(self.embed(ids)))

    model = Sharing().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        ids = p.tokens(index, 3, 12)
        loss = cross_entropy(model(ids), ids)
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def parameters_of_the_root_and_buffers_that_are_written(p: Program) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((32, 32), 0.1))
            self.body = Mlp(32, 3)
            self.register_buffer("mean", torch.zeros(32), persistent=False)
            self.register_buffer("count", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> Any:
            mean: Any = self.mean
            mean.lerp_(x.detach().mean(0), 0.1)
            count: Any = self._buffers["count"]
            self.count = count + 1
            return self.body(x - mean) @ self.scale

    model = Root().to(p.device)
    trained(p, model, adamw(model))
    p.note(*model.buffers())


@stranger()
def a_weight_as_large_as_a_batch(p: Program) -> None:
    """A parameter of the batch's own shape, multiplied under a mask: what is saved of it is the parameter itself."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.randn(6, 32)) for _ in range(4))

        def forward(self, x: torch.Tensor) -> Any:
            for weight in self.weights:
                mask = (x > 0).to(x.dtype)
                x = x + torch.tanh((x * weight) * mask + weight * (1 - mask))
            return x

    model = Masked().to(p.device)
    trained(p, model, adamw(model))


@stranger()
def frozen_parameters_in_the_optimizer(p: Program) -> None:
    """All parameters are given to the optimizer, of which some never get a gradient; the rate is set by hand."""
    model = Mlp().to(p.device)
    model.layers[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * (1 - index / (2 * STEPS))
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters(), optimizer.state_dict()["state"])


@stranger()
def text_generated_before_each_step(p: Program) -> None:
    """A policy writes some tokens without gradients in eval mode, and learns of them right after."""
    model = LM(layers=2).to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        model.eval()
        with torch.no_grad():
            ids = p.tokens(index, 3, 6)
            for _ in range(4):
                ids = torch.cat((ids, model(ids)[:, -1].argmax(-1, keepdim=True)), 1)
        model.train()
        loss = cross_entropy(model(ids), ids)
        loss.backward()
        update(optimizer)
        p.end(model, ids, loss)
    p.note(*model.parameters())


@stranger(on_host_bytes=32 << 10)
def dropout_in_checkpoints_over_a_frozen_base(p: Program) -> None:
    class Dropping(LM):
        def trunk(self, ids: torch.Tensor) -> Any:
            x = self.embed(ids)
            for block in self.blocks:
                x = checkpoint(lambda h, block=block: F.dropout(block(h), 0.2), x, use_reentrant=False)
            return self.norm(x)

    model = Dropping().to(p.device)
    made = with_adapters(model)
    for adapter in made:
        adapter.to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        torch.manual_seed(index)
        ids = p.tokens(index, 3, 12)
        loss = cross_entropy(model(ids), ids)
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def gradients_of_tasks_that_are_made_to_agree(p: Program) -> None:
    """Two losses over one trunk: their gradients are taken apart, projected, and put where the optimizer looks."""
    model = Mlp().to(p.device)
    optimizer = adamw(model)
    parameters = list(model.parameters())
    p.wrap(model, optimizer)
    for index in range(STEPS):
        out = model(p.rows(index, 6, 32))
        losses = out.square().mean(), (out - 0.3).abs().mean()
        a, b = (torch.autograd.grad(loss, parameters, retain_graph=i == 0) for i, loss in enumerate(losses))
        dot: Any = sum((x * y).sum() for x, y in zip(a, b, strict=True))
        norm: Any = sum(y.square().sum() for y in b)
        for q, x, y in zip(parameters, a, b, strict=True):
            q.grad = x + y - torch.clamp(dot / norm, max=0.0) * y
        p.note([q.grad for q in parameters])
        update(optimizer)
        p.end(model, *losses)
    p.note(*parameters)


@stranger(on_host_bytes=32 << 10)
def normalized_kernels(p: Program) -> None:
    """Convolutions whose weights are standardized in forward."""

    class Standard(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> Any:
            w = self.weight
            w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.var((1, 2, 3), keepdim=True) + 1e-5).sqrt()
            return F.conv2d(x, w, self.bias, padding=1)

    layers = [Standard(3, 8, 3), nn.ReLU(), Standard(8, 8, 3), nn.ReLU(), Standard(8, 4, 3)]
    model = nn.Sequential(*layers).to(p.device)
    trained(p, model, adamw(model), 2, 3, 8, 8)
