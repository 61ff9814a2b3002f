"""Functions of one's own: fused heads, tiles, caches, gradients that hang on weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import vjp
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.corpus.parts import LM, Mlp, adamw, cross_entropy, update
from tests.corpus.run import Program, stranger

STEPS = 9


class FusedHead(torch.autograd.Function):
    """Computes the gradients in forward, a chunk at a time, and scales them in backward where they were saved."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        gh, gw, loss = torch.zeros_like(h), torch.zeros_like(w), h.new_zeros(())
        for hc, tc, gc in zip(h.chunk(3), target.chunk(3), gh.chunk(3), strict=True):
            logp = torch.log_softmax(hc @ w.t(), -1)
            loss = loss - logp.gather(1, tc[:, None]).sum() / len(h)
            d = logp.exp()
            d.scatter_add_(1, tc[:, None], -torch.ones_like(d[:, :1]))
            d /= len(h)
            gc.copy_(d @ w)
            gw.addmm_(d.t(), hc)
        ctx.save_for_backward(gh.detach(), gw.detach())
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gh, gw = ctx.saved_tensors
        gh.data.mul_(grads[0])
        gw.data.mul_(grads[0])
        return gh, gw, None


class FusedLM(LM):
    def forward(self, ids: torch.Tensor) -> Any:
        h = self.trunk(ids)[:, :-1].flatten(0, 1)
        return FusedHead.apply(h, self.head.weight, ids[:, 1:].flatten())  # type: ignore[no-untyped-call]


@stranger()
def fused_head(p: Program) -> None:
    model = FusedLM(layers=2).to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.tokens(index, 3, 13))
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def fused_head_and_a_graph_that_is_retained(p: Program) -> None:
    model = FusedLM(layers=2).to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.tokens(index, 3, 13))
        (loss * 0.5).backward(retain_graph=True)
        (loss * 0.25).backward()
        p.note([q.grad for q in model.parameters()])
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def logits_that_the_loss_overwrites(p: Program) -> None:
    class Overwriting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            logp = torch.log_softmax(logits, -1)
            loss = F.nll_loss(logp, target)
            logits.data.copy_(logp.exp())
            logits.data.scatter_add_(1, target[:, None], -torch.ones_like(logits[:, :1]))
            logits.data.div_(len(target))
            ctx.save_for_backward(logits.detach())
            return loss

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return ctx.saved_tensors[0].mul_(grads[0]), None

    model = LM(layers=2).to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        ids = p.tokens(index, 3, 13)
        loss: Any = Overwriting.apply(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())  # type: ignore[no-untyped-call]
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def gradients_that_hang_on_weights(p: Program) -> None:
    """Gradients are added to `weight.main_grad` in a Function that finds the weight among its saved tensors."""

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x, w = ctx.saved_tensors
            w.main_grad.add_((grads[0].t() @ x).float())
            w.is_added = True
            return grads[0] @ w, torch.zeros(1, dtype=w.dtype, device=w.device).expand(w.shape)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter((torch.randn(32, 32) * 0.2).bfloat16())

        def forward(self, x: torch.Tensor) -> Any:
            return x + torch.tanh(Linear.apply(x, self.weight))  # type: ignore[no-untyped-call]

    model = nn.Sequential(*(Layer() for _ in range(4))).to(p.device)
    parameters: list[Any] = list(model.parameters())
    for q in parameters:
        q.main_grad = torch.zeros(q.shape, device=p.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        for half in range(2):
            loss = model(p.rows(2 * index + half, 6, 32, dtype=torch.bfloat16)).float().square().mean()
            loss.backward()
        p.note([q.main_grad for q in parameters], [q.is_added for q in parameters])
        for q in parameters:
            q.grad = q.main_grad.to(q.dtype)
            q.main_grad.zero_()
            q.is_added = False
        update(optimizer)
        p.end(model, loss)
    p.note(*parameters)


@stranger()
def low_precision_weights_cached_by_version(p: Program) -> None:
    class Cached(nn.Linear):
        version = -1

        def forward(self, x: torch.Tensor) -> Any:
            if self.weight._version != self.version:
                self.version, self.copy = self.weight._version, self.weight.detach().bfloat16().float()
            return x @ (self.weight + (self.copy - self.weight).detach()).t()

    model = nn.Sequential(Cached(32, 32), nn.Tanh(), Cached(32, 32), nn.Tanh(), Cached(32, 32)).to(p.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=True)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def tiled_perceptron(p: Program) -> None:
    """A Function whose backward runs the tiles again, each with a backward of its own."""

    class Tiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, mlp: Any, *weights: Any) -> torch.Tensor:
            ctx.save_for_backward(x)
            ctx.mlp = mlp
            with torch.no_grad():
                return torch.cat([mlp(part) for part in x.chunk(2)])

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x = ctx.saved_tensors[0].detach().requires_grad_()
            x.grad = torch.zeros_like(x)
            for i, (part, grad) in enumerate(zip(x.chunk(2), grads[0].chunk(2), strict=True)):
                tile = part.detach().requires_grad_()
                tile.grad = x.grad.chunk(2)[i]
                with torch.enable_grad():
                    out = ctx.mlp(tile)
                torch.autograd.backward(out, grad)
            return x.grad, None, *[None] * len(list(ctx.mlp.parameters()))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mlp, self.last = nn.Linear(32, 32), Mlp(32, 2), nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return self.last(Tiled.apply(self.first(x), self.mlp, *self.mlp.parameters()))  # type: ignore[no-untyped-call]

    model = Net().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def chunked_head(p: Program) -> None:
    """The head runs a chunk at a time, each with a backward of its own into a leaf; then the trunk's backward."""

    class Trunk(LM):
        def forward(self, ids: torch.Tensor) -> Any:
            h = self.trunk(ids)
            leaf = h.detach().requires_grad_()
            loss = torch.zeros((), device=h.device)
            for part, target in zip(leaf[:, :-1].chunk(2, 1), ids[:, 1:].chunk(2, 1), strict=True):
                one = F.cross_entropy(self.head(part).flatten(0, 1), target.flatten()) / 2
                one.backward()
                loss = loss + one.detach()
            return h, leaf.grad, loss

    model = Trunk(layers=2, is_tied=False).to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        h, grad, loss = model(p.tokens(index, 3, 13))
        h.backward(grad)
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def packed_activations(p: Program) -> None:
    class Byte(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            scale = x.abs().amax().clamp_min(1e-6) / 127
            ctx.save_for_backward((x / scale).round().to(torch.int8), scale)
            return F.silu(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            q, scale = ctx.saved_tensors
            x = q.float() * scale
            s = torch.sigmoid(x)
            return grads[0] * (s * (1 + x * (1 - s)))

    class Net(Mlp):
        def forward(self, x: torch.Tensor) -> Any:
            for layer in self.layers:
                x = x + Byte.apply(layer(x))  # type: ignore[no-untyped-call]
            return x

    model = Net().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 8, 32)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def own_offloaded_checkpoint(p: Program) -> None:
    """A checkpoint of one's own keeps its input on the host, and runs the block again in backward."""

    class Offloaded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, block: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.block, ctx.x = block, x.detach().to("cpu", copy=True)
            with torch.no_grad():
                return block(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x = ctx.x.to(grads[0].device).requires_grad_()
            with torch.enable_grad():
                out = ctx.block(x)
            torch.autograd.backward(out, grads[0])
            return None, x.grad

    class Net(LM):
        def trunk(self, ids: torch.Tensor) -> Any:
            x = self.embed(ids)
            for block in self.blocks:
                x = Offloaded.apply(block, x)  # type: ignore[no-untyped-call]
            return self.norm(x)

    model = Net(layers=2).to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        ids = p.tokens(index, 3, 12)
        loss = cross_entropy(model(ids), ids)
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


def _checkpointed(p: Program, *, use_reentrant: bool) -> None:
    class Net(LM):
        def trunk(self, ids: torch.Tensor) -> Any:
            x = self.embed(ids)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return self.norm(x)

    model = Net(layers=3).to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        ids = p.tokens(index, 3, 12)
        loss = cross_entropy(model(ids), ids)
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger(on_host_bytes=32 << 10)  # what a layer's recomputation takes
def reentrant_checkpoints(p: Program) -> None:
    _checkpointed(p, use_reentrant=True)


@stranger(on_host_bytes=32 << 10)  # what a layer's recomputation takes
def checkpoints(p: Program) -> None:
    _checkpointed(p, use_reentrant=False)


def linear_tanh(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w.t())


def pulled_back(of: Any, *inputs: torch.Tensor) -> Any:
    return vjp(of, *inputs)[1]


@stranger()
def gradients_by_torch_func(p: Program) -> None:
    """Functions compute their gradients by transforms: named whole, imported, and through a function of their own."""

    class Layer(nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.function, self.weight = function, nn.Parameter(torch.randn(32, 32) / 6)

        def forward(self, x: torch.Tensor) -> Any:
            return x + self.function.apply(x, self.weight)

    class Saving(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return linear_tanh(x, w)

    class Named(Saving):
        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return torch.func.vjp(linear_tanh, *ctx.saved_tensors)[1](grads[0])

    class Imported(Saving):
        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return vjp(linear_tanh, *ctx.saved_tensors)[1](grads[0])

    class Through(Saving):
        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return pulled_back(linear_tanh, *ctx.saved_tensors)(grads[0])

    model = nn.Sequential(*(Layer(function) for function in (Named, Imported, Through, Named))).to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


def _cached(model: nn.Module, chunks: Any) -> Any:
    """Returns the loss of what a model gives for chunks, and the gradients of that."""
    with torch.no_grad():
        found = [model(chunk).mean(1).requires_grad_() for chunk in chunks]
    h = torch.cat(found)
    loss = F.cross_entropy(h @ h.t(), torch.arange(len(h), device=h.device))
    loss.backward()
    return loss.detach().requires_grad_(), [one.grad for one in found]


@stranger()
def gradients_cached_by_chunk(p: Program) -> None:
    """GradCache: all chunks without gradients, the loss of what they gave, and each again in a hook, with its own backward."""
    model = nn.Sequential(nn.Embedding(300, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)).to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        chunks = p.tokens(index, 6, 7, vocabulary=300).chunk(2)
        loss, cache = _cached(model, chunks)

        def again(grad: torch.Tensor, chunks: Any = chunks, cache: Any = cache) -> None:
            for chunk, one in zip(chunks, cache, strict=True):
                with torch.enable_grad():
                    surrogate = (model(chunk).mean(1) * one).sum() * grad
                surrogate.backward()

        loss.register_hook(again)
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())
