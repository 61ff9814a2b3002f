"""Loops: several losses and models, what runs between steps, what goes wrong and is caught."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from tests.corpus.parts import LM, Mlp, adamw, cross_entropy, trained, update
from tests.corpus.run import Program, stranger

STEPS = 9


@stranger()
def two_halves_of_a_backward(p: Program) -> None:
    """Zero bubble: gradients of inputs first, those of weights later, over one graph."""
    model = Mlp().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        x = p.rows(index, 6, 32).requires_grad_()
        loss = model(x).square().mean()
        (given,) = torch.autograd.grad(loss, x, retain_graph=True)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for q, grad in zip(model.parameters(), grads, strict=True):
            q.grad = grad
        update(optimizer)
        p.end(model, loss, given)
    p.note(*model.parameters())


@stranger()
def memory_that_ran_out(p: Program) -> None:
    """A batch that does not fit is halved; the error comes in the midst of forward."""

    class Limited(Mlp):
        most = 8

        def forward(self, x: torch.Tensor) -> Any:
            for i, layer in enumerate(self.layers):
                if i == 2 and len(x) > self.most:
                    raise torch.OutOfMemoryError("no room")
                x = x + torch.tanh(layer(x))
            return x

    model = Limited().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS + 3):
        x = p.rows(index, 12 if index in (0, 4) else 6, 32)
        try:
            loss = model(x).square().mean()
        except torch.OutOfMemoryError:
            loss = model(x[:6]).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger(on_host_bytes=20 << 10)  # the copy of all weights "on the host"
def checkpoints_by_a_thread(p: Program) -> None:
    model = Mlp().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
        if index % 3 == 2:
            saved: dict[str, torch.Tensor] = {}
            state = {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}
            thread = threading.Thread(target=saved.update, args=(state,))
            thread.start()
            thread.join()
            p.note(*saved.values())
    p.note(*model.parameters())


@stranger()
def evaluation_between_steps(p: Program) -> None:
    class Dropping(Mlp):
        def forward(self, x: torch.Tensor) -> Any:
            return F.dropout(super().forward(x), 0.0, self.training)

    model = Dropping().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
        if index % 2:
            model.eval()
            with torch.inference_mode():
                seen = model(p.rows(index + 40, 12, 32)).sum()
            p.note(seen)
            model.train()
    p.note(*model.parameters())


@stranger(planned=0)  # a backward inside forward: which of its events there are depends on the plan
def learning_inside_forward(p: Program) -> None:
    """The forward takes a gradient step on fast weights, through which the loss's gradients go."""

    class Fast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slow, self.head = nn.Linear(32, 32), nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> Any:
            weight = self.slow.weight
            inner = torch.tanh(F.linear(x, weight)).square().mean()
            (grad,) = torch.autograd.grad(inner, weight, create_graph=True)
            return self.head(torch.tanh(F.linear(x, weight - 0.1 * grad)))

    model = Fast().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def gradient_penalty(p: Program) -> None:
    model = Mlp().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        x = p.rows(index, 6, 32).requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.square().mean() + (grad.norm(dim=1) - 1).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger(planned=0)
def generator_and_discriminator(p: Program) -> None:
    makes, tells = Mlp(32, 2).to(p.device), nn.Sequential(Mlp(32, 2), nn.Linear(32, 1)).to(p.device)
    of_makes, of_tells = adamw(makes), adamw(tells)
    p.wrap([makes, tells], [of_makes, of_tells])
    for index in range(STEPS):
        made = makes(p.rows(index, 6, 32))
        loss = F.softplus(-tells(p.rows(index + 50, 6, 32))).mean() + F.softplus(tells(made.detach())).mean()
        loss.backward()
        update(of_tells)
        again = F.softplus(-tells(made)).mean()
        again.backward()
        update(of_makes)
        of_tells.zero_grad()
        p.note(loss, again)
    p.note(*makes.parameters(), *tells.parameters())


@stranger()
def text_made_between_steps(p: Program) -> None:
    model = LM(layers=2).to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        ids = p.tokens(index, 2, 6)
        with torch.no_grad():
            for _ in range(4):
                ids = torch.cat((ids, model(ids)[:, -1].argmax(-1, keepdim=True)), 1)
        loss = cross_entropy(model(ids), ids)
        loss.backward()
        update(optimizer)
        p.end(model, loss, ids)
    p.note(*model.parameters())


@stranger()
def gradients_of_each_sample(p: Program) -> None:
    model = Mlp(32, 2).to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        x = p.rows(index, 3, 32)
        losses = model(x).square().mean(1)
        total = [torch.zeros_like(q) for q in model.parameters()]
        for i in range(3):
            grads = torch.autograd.grad(losses[i], list(model.parameters()), retain_graph=i < 2)
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            for one, grad in zip(total, grads, strict=True):
                one += grad / norm.clamp_min(1.0)
        for q, one in zip(model.parameters(), total, strict=True):
            q.grad = one
        update(optimizer)
        p.end(model, losses)
    p.note(*model.parameters())


@stranger(planned=1)
def unwrapped_and_wrapped_again(p: Program) -> None:
    model = Mlp().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(2 * STEPS):
        if index == STEPS - 1:
            p.unwrap(model)
            p.note(*model.parameters())
            p.wrap(model, optimizer)
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def truncated_through_time(p: Program) -> None:
    """A state goes on from step to step, without its graph."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(16, 32), nn.Linear(32, 8)

        def forward(self, xs: torch.Tensor, h: torch.Tensor) -> Any:
            outs = []
            for x in xs:
                h = self.cell(x, h)
                outs.append(self.head(h))
            return torch.stack(outs), h

    model = Recurrent().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    h = torch.zeros(4, 32, device=p.device)
    for index in range(STEPS):
        out, h = model(p.rows(index, 5, 4, 16), h.detach())
        loss = out.square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss, h)
    p.note(*model.parameters())


@stranger(planned=0)
def counted_operations(p: Program) -> None:
    """A counter of operations, which is a dispatch mode, round one of the steps."""
    model = Mlp().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        counter = FlopCounterMode(display=False)
        with counter if index == 4 else torch.enable_grad():
            loss = model(p.rows(index, 6, 32)).square().mean()
            loss.backward()
        update(optimizer)
        p.end(model, loss, counter.get_total_flops())
    p.note(*model.parameters())


@stranger()
def several_losses(p: Program) -> None:
    """Deep supervision: every layer's output has a loss, each with a backward over what is shared."""

    class Deep(Mlp):
        def forward(self, x: torch.Tensor) -> Any:
            outs = []
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
                outs.append(x)
            return outs

    model = Deep().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        losses = [out.square().mean() for out in model(p.rows(index, 6, 32))]
        for i, loss in enumerate(losses):
            loss.backward(retain_graph=i + 1 < len(losses))
        update(optimizer)
        p.end(model, losses)
    p.note(*model.parameters())


@stranger()
def parts_called_without_the_forward(p: Program) -> None:
    """An agent is asked by a method of its own at first, and by its forward later."""

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = Mlp(), Mlp()

        def act(self, x: torch.Tensor) -> Any:
            return self.actor(x), self.critic(x)

        def forward(self, x: torch.Tensor) -> Any:
            return self.act(x)

    model = Agent().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS + 5):
        with torch.no_grad():
            p.note(model.act(p.rows(index, 2, 32)))
        ask = model.act if index < 6 else model
        actions, values = ask(p.rows(index + 50, 6, 32))
        loss = actions.square().mean() + values.square().mean()
        loss.backward()
        p.note(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        update(optimizer)
        if index < 6:
            p.note(loss)
        else:
            p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def weights_decayed_by_hand(p: Program) -> None:
    """Each weight has other memory after each update."""
    model = Mlp().to(p.device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        update(optimizer)
        for q in model.parameters():
            q.data = q.data * 0.99
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def weights_decayed_before_the_update(p: Program) -> None:
    """By hand: each gets other memory between backward and update."""
    model = Mlp().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        for q in model.parameters():
            q.data = q.data * 0.99
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def weights_clipped_before_each_step(p: Program) -> None:
    """A critic's, which get other memory before each forward."""
    model = LM(layers=2).to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        for q in model.parameters():
            q.data = q.data.clamp(-0.1, 0.1)
        ids = p.tokens(index, 2, 12)
        loss = cross_entropy(model(ids), ids)
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def penalties_on_weights_inside_forward(p: Program) -> None:
    """Before the layers that use them, and after half of these."""

    class Penalized(Mlp):
        def forward(self, x: torch.Tensor) -> Any:
            def penalty() -> Any:
                return 1e-3 * sum(q.square().sum() for q in self.parameters())

            for at, layer in enumerate(self.layers):
                x = torch.tanh(layer(x if at % 3 else x + penalty()))
            return x

    model = Penalized(layers=6).to(p.device)
    trained(p, model, adamw(model))


@stranger()
def a_penalty_on_weights_before_the_forward(p: Program) -> None:
    """The sum of the weights' squares, of which the graph saves every weight until backward."""
    model = Mlp(layers=6).to(p.device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        penalty = sum(q.pow(2).sum() for q in model.parameters())
        loss = model(p.rows(index, 6, 32)).square().mean() + 1e-3 * penalty
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def weights_that_hooks_keep_until_the_update(p: Program) -> None:
    """Hooks of activations keep aliases of weights, as some that watch a layer's gradient beside its weight do."""
    model = Mlp().to(p.device)
    optimizer = adamw(model)
    kept: list[torch.Tensor] = []

    def watch(module: nn.Module, _given: Any, out: torch.Tensor) -> None:
        out.register_hook(lambda _: kept.append(module.get_parameter("weight").detach()))

    for layer in model.layers:
        layer.register_forward_hook(watch)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        kept.clear()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())
