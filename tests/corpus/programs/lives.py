"""Weights and states that go elsewhere and come back: masters, flat buffers, rollbacks, averages on the host, other models."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tests.corpus.parts import LM, Mlp, adamw, cross_entropy, update, with_adapters
from tests.corpus.run import Program, stranger

STEPS = 9


def step_of(p: Program, model: nn.Module, optimizer: Any, index: int) -> torch.Tensor:
    loss: torch.Tensor = model(p.rows(index, 6, 32)).square().mean()
    loss.backward()
    update(optimizer)
    return loss


@stranger()
def weights_written_through_the_state_dict(p: Program) -> None:
    """Loading by hand: `own_state[name].copy_(value)`, and moments that are cleared through the optimizer's."""
    model = Mlp().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS + 5):
        p.end(model, step_of(p, model, optimizer, index))
        if index in (3, 8):
            own = model.state_dict()
            with torch.no_grad():
                for value in own.values():
                    value.copy_(value * 0.5)
            del own
            p.note(*model.state_dict().values())
            for entries in optimizer.state_dict()["state"].values():
                entries["exp_avg"].zero_()
    p.note(*model.parameters(), [entries["exp_avg"] for entries in optimizer.state.values()])


@stranger(is_counted=False)
def masters_of_a_higher_type(p: Program) -> None:
    """A bf16 model is updated through float32 copies in the optimizer's state."""

    class Masters(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.05})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for q in group["params"]:
                    if q.grad is None:
                        continue
                    state = self.state[q]
                    if not state:
                        state["master"], state["m"] = q.detach().float(), torch.zeros_like(q, dtype=torch.float32)
                    state["m"].lerp_(q.grad.float(), 0.1)
                    state["master"].add_(state["m"], alpha=-group["lr"])
                    q.copy_(state["master"])
            return closure

    class Half(Mlp):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x.bfloat16()).float()

    model = Half().to(p.device).bfloat16()
    optimizer = Masters(model.parameters())
    p.wrap(model, optimizer)
    for index in range(STEPS):
        p.end(model, step_of(p, model, optimizer, index))
    p.note(*model.parameters(), [entries["master"] for entries in optimizer.state.values()])


@stranger(is_counted=False)
def gradients_in_one_flat_buffer(p: Program) -> None:
    """All gradients are views of one vector, which is cleared and scaled as a whole."""
    model = Mlp().to(p.device)
    optimizer = adamw(model)
    flat = torch.zeros(sum(q.numel() for q in model.parameters()), device=p.device)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        at = 0
        for q in model.parameters():
            q.grad = flat[at : at + q.numel()].view_as(q)
            at += q.numel()
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        flat.mul_(1 / flat.norm().clamp_min(1.0))
        p.note(flat)
        optimizer.step()
        flat.zero_()
        p.end(model, loss)
    p.note(*model.parameters())


@stranger(on_host_bytes=20 << 10)  # all weights "on the host"
def an_average_on_the_host(p: Program) -> None:
    model = Mlp().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    average = {name: q.detach().cpu().clone() for name, q in model.named_parameters()}
    for index in range(STEPS):
        loss = step_of(p, model, optimizer, index)
        p.end(model, loss)
        for name, q in model.named_parameters():
            average[name].lerp_(q.detach().cpu(), 0.1)
    p.note(*average.values(), *model.parameters())


@stranger(planned=1, on_host_bytes=32 << 10)
def rolled_back_to_the_best(p: Program) -> None:
    """Weights and moments of the best step are copied to the host, and put back where a later one was worse."""
    model = Mlp().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS + 6):
        p.end(model, step_of(p, model, optimizer, index))
        if index == 3:
            best = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
            moments = copy.deepcopy(optimizer.state_dict())
        if index == 7:
            model.load_state_dict(best)
            optimizer.load_state_dict(moments)
    p.note(*model.parameters())


@stranger()
def a_state_that_is_loaded_before_the_first_step(p: Program) -> None:
    first = Mlp().to(p.device)
    of_first = adamw(first)
    for index in range(2):
        step_of(p, first, of_first, index)
    model = Mlp().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    model.load_state_dict(first.state_dict())
    optimizer.load_state_dict(of_first.state_dict())
    del first, of_first
    for index in range(STEPS):
        p.end(model, step_of(p, model, optimizer, index + 2))
    p.note(*model.parameters(), [entries["step"] for entries in optimizer.state.values()])


@stranger()
def adapters_merged_for_a_look(p: Program) -> None:
    """For an evaluation the adapters go into the frozen weights through `.data`, and out of them after it."""
    model = LM(layers=2).to(p.device)
    made = with_adapters(model)
    for adapter in made:
        adapter.to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        ids = p.tokens(index, 3, 12)
        loss = cross_entropy(model(ids), ids)
        loss.backward()
        update(optimizer)
        p.end(model, loss)
        if index % 3 == 2:
            kept = [adapter.base.weight.detach().clone() for adapter in made]
            for adapter in made:
                adapter.base.weight.data += (adapter.b.weight @ adapter.a.weight).detach()
                adapter.is_on = False
            with torch.no_grad():
                p.note(model(ids))
            for adapter, weight in zip(made, kept, strict=True):
                adapter.base.weight.data.copy_(weight)
                adapter.is_on = True
            del kept, weight
    p.note(*model.parameters())


@stranger()
def a_function_that_saves_another_models_weight(p: Program) -> None:
    """Two models; a layer of the one multiplies by a weight of the other, which learns by its own steps as well."""

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x, w = ctx.saved_tensors
            return grads[0] @ w, grads[0].t() @ x

    other = Mlp().to(p.device)

    class Borrowing(Mlp):
        def forward(self, x: torch.Tensor) -> Any:
            lent: Any = other.layers[1]
            return super().forward(x) + torch.tanh(Times.apply(super().forward(x), lent.weight))  # type: ignore[no-untyped-call]

    model = Borrowing().to(p.device)
    optimizer, of_other = adamw(model), adamw(other)
    p.wrap([model, other], [optimizer, of_other])
    for index in range(STEPS):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
        p.note(step_of(p, other, of_other, index + 20))
    p.note(*model.parameters(), *other.parameters())


@stranger()
def a_penalty_on_gradients_of_the_input(p: Program) -> None:
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


@stranger()
def gradients_kept_and_never_cleared(p: Program) -> None:
    """Momentum by hand: gradients are scaled down and added to, and are never None."""
    model = Mlp().to(p.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        optimizer.step()
        for q in model.parameters():
            assert q.grad is not None
            q.grad.mul_(0.5)
        p.end(model, loss)
    p.note(*model.parameters(), [q.grad for q in model.parameters()])


class TwoHeads(nn.Module):
    """A trained trunk below two frozen heads, one of which each forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.used = nn.Linear(16, 64), 0
        self.heads = nn.ModuleList(nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)]) for _ in range(2))
        self.heads.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.heads[self.used](self.trunk(x))


@stranger(planned=8)
def frozen_heads_in_turn(p: Program) -> None:
    """Steps that begin alike; what the plan of one keeps on the device has no room there in the next."""
    model = TwoHeads().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(18):
        model.used = index % 2
        loss = model(p.rows(index, 4, 16)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
        del loss
    p.note(*model.parameters())


class Penalized(Mlp):
    """Its forward returns a penalty on the weights, too, where it is asked for one."""

    is_asked = False

    def forward(self, x: torch.Tensor) -> Any:
        weights: list[Any] = [layer.weight for layer in self.layers] if self.is_asked else []
        return super().forward(x), sum((weight @ weight).square().mean() for weight in weights)


@stranger(planned=6)
def a_penalty_in_every_third_step(p: Program) -> None:
    model = Penalized().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(24):
        model.is_asked = index % 3 == 2
        out, penalty = model(p.rows(index, 6, 32))
        loss = out.square().mean() + penalty
        loss.backward()
        update(optimizer)
        p.end(model, loss)
        del loss, penalty
    p.note(*model.parameters())
