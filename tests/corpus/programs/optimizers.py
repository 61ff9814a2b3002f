"""Optimizers of one's own, and what people do round an update."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from tests.corpus.parts import LM, Mlp, adamw, cross_entropy, trained, update
from tests.corpus.run import Program, stranger

STEPS = 9


Update = Callable[[torch.Tensor, torch.Tensor, Any, float], None]


def own(params: Any, update: Update, lr: float = 1e-2) -> torch.optim.Optimizer:
    """Returns an optimizer of one's own that updates each parameter by itself."""

    class Own(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for q in group["params"]:
                    if q.grad is not None:
                        update(q, q.grad, self.state[q], group["lr"])

    return Own(params, {"lr": lr})


@stranger()
def muon_with_adam(p: Program) -> None:
    def muon_update(q: torch.Tensor, grad: torch.Tensor, state: Any, lr: float) -> None:
        if not state:
            state["m"] = torch.zeros_like(q)
            if q.ndim != 2:
                state["v"] = torch.zeros_like(q)
        state["m"].lerp_(grad, 0.1)
        if q.ndim != 2:
            state["v"].mul_(0.99).addcmul_(grad, grad, value=0.01)
            q.addcdiv_(state["m"], state["v"].sqrt().add_(1e-6), value=-lr)
            return
        x = state["m"] / (state["m"].norm() + 1e-7)
        for _ in range(3):
            a = x @ x.t()
            x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
        q.add_(x, alpha=-lr)

    model = Mlp().to(p.device)
    trained(p, model, own(model.parameters(), muon_update))


@stranger()
def first_update_that_makes_state_alone(p: Program) -> None:
    def adopt_update(q: torch.Tensor, grad: torch.Tensor, state: Any, lr: float) -> None:
        if not state:
            state["m"], state["v"] = torch.zeros_like(q), grad.square()
            return
        scale = state["v"].sqrt().clamp_(min=1e-6)
        normed, sign = grad / scale, grad.sign()
        state["m"].lerp_(normed + sign * 0.1, 0.1)
        q.add_(state["m"], alpha=-lr)
        state["v"].lerp_(grad.square(), 0.01)

    model = Mlp().to(p.device)
    trained(p, model, own(model.parameters(), adopt_update))


@stranger()
def state_made_anew(p: Program) -> None:
    def momentum_update(q: torch.Tensor, grad: torch.Tensor, state: Any, lr: float) -> None:
        state["m"] = state["m"] * 0.9 + grad if state else torch.zeros_like(q)
        q.add_(state["m"], alpha=-lr)

    model = Mlp().to(p.device)
    trained(p, model, own(model.parameters(), momentum_update))


@stranger()
def parameters_and_state_on_other_memory(p: Program) -> None:
    def assigning_update(q: torch.Tensor, grad: torch.Tensor, state: Any, lr: float) -> None:
        if not state:
            state["m"] = torch.zeros_like(q)
        state["m"].data = state["m"] * 0.9 + grad * 0.1
        q.data = q.data - lr * state["m"]

    model = Mlp().to(p.device)
    trained(p, model, own(model.parameters(), assigning_update))


@stranger()
def state_of_eight_bits(p: Program) -> None:
    def bytes_update(q: torch.Tensor, grad: torch.Tensor, state: Any, lr: float) -> None:
        if not state:
            state["m"] = torch.zeros_like(q, dtype=torch.int8)
            state["scale"] = torch.ones((), device=q.device)
        m = state["m"].float() * state["scale"] * 0.9 + grad * 0.1
        state["scale"].copy_(m.abs().amax().clamp_min(1e-8) / 127)
        state["m"].copy_((m / state["scale"]).round())
        q.add_(m, alpha=-lr)

    model = Mlp().to(p.device)
    trained(p, model, own(model.parameters(), bytes_update))


@stranger(on_host_bytes=32 << 10)
def sums_of_kahan(p: Program) -> None:
    def kahan_update(q: torch.Tensor, grad: torch.Tensor, state: Any, lr: float) -> None:
        if not state:
            state["lost"] = torch.zeros_like(q)
        step = grad * -lr + state["lost"]
        before = q.clone()
        q.add_(step)
        state["lost"].copy_(step - (q - before))

    class Half(Mlp):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x.bfloat16()).float()

    model = Half().to(p.device).bfloat16()
    trained(p, model, own(model.parameters(), kahan_update))


@stranger()
def low_rank_gradients(p: Program) -> None:
    """GaLore: moments live in a projection that is made anew now and then."""

    def galore_update(q: torch.Tensor, grad: torch.Tensor, state: Any, lr: float) -> None:
        if q.ndim != 2:
            q.add_(grad, alpha=-lr)
            return
        if not state:
            state["basis"], state["m"] = grad[:4].clone(), torch.zeros(q.shape[0], 4, device=q.device)
        low = grad @ state["basis"].t()
        state["m"].lerp_(low, 0.1)
        q.add_(state["m"] @ state["basis"], alpha=-lr)

    model = Mlp().to(p.device)
    trained(p, model, own(model.parameters(), galore_update))


@stranger()
def lists_of_matrices_made_anew(p: Program) -> None:
    """As Shampoo and SOAP have them: a list for each parameter, of which each update makes new tensors."""

    def shampoo_update(q: torch.Tensor, grad: torch.Tensor, state: Any, lr: float) -> None:
        if q.ndim != 2:
            q.add_(grad, alpha=-lr)
            return
        known = state.get("sides") or [torch.zeros(size, size, device=q.device) for size in q.shape]
        state["sides"] = [side * 0.9 + part for side, part in zip(known, (grad @ grad.t(), grad.t() @ grad), strict=True)]
        q.add_(state["sides"][0] @ grad, alpha=-lr)

    model = Mlp(layers=8).to(p.device)
    trained(p, model, own(model.parameters(), shampoo_update))


@stranger()
def schedule_free(p: Program) -> None:
    def free_update(q: torch.Tensor, grad: torch.Tensor, state: Any, lr: float) -> None:
        if not state:
            state["z"], state["k"] = q.clone(), 0
        state["k"] += 1
        q.lerp_(state["z"], 1 / (state["k"] + 1))
        q.add_(grad, alpha=lr * (0.9 * (1 - 1 / (state["k"] + 1)) - 1))
        state["z"].sub_(grad, alpha=lr)

    model = Mlp().to(p.device)
    trained(p, model, own(model.parameters(), free_update))


@stranger()
def clipping_by_unit(p: Program) -> None:
    """Adaptive clipping, histograms of gradients, and a step that is skipped where they are no numbers."""
    model = Mlp().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS + 3):
        loss = model(p.rows(index, 6, 32)).square().mean() * (float("nan") if index == 5 else 1.0)
        loss.backward()
        with torch.no_grad():
            for q in model.parameters():
                assert q.grad is not None
                limit = q.norm(dim=-1, keepdim=True).clamp_min(1e-3) * 0.1
                q.grad.mul_((limit / q.grad.norm(dim=-1, keepdim=True).clamp_min(1e-6)).clamp_max(1.0))
            p.note([q.grad.abs().amax() for q in model.parameters() if q.grad is not None])
        if all(bool(q.grad.isfinite().all()) for q in model.parameters() if q.grad is not None):
            optimizer.step()
        optimizer.zero_grad()
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def gradients_that_add_up(p: Program) -> None:
    model = LM(layers=2).to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        for part in range(3):
            ids = p.tokens(3 * index + part, 2, 12)
            loss = cross_entropy(model(ids), ids) / 3
            loss.backward()
        p.note(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger(is_counted=False)
def weights_that_are_perturbed(p: Program) -> None:
    """SAM: a second backward at weights that were moved along the first gradient."""
    model = Mlp().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        x = p.rows(index, 6, 32)
        model(x).square().mean().backward()
        with torch.no_grad():
            moved = [q.grad * 0.05 for q in model.parameters() if q.grad is not None]
            for q, delta in zip(model.parameters(), moved, strict=True):
                q.add_(delta)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for q, delta in zip(model.parameters(), moved, strict=True):
                q.sub_(delta)
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger(planned=1)
def group_added_in_mid_training(p: Program) -> None:
    model = Mlp().to(p.device)
    first, last = model.layers[0], model.layers[1:]
    optimizer = torch.optim.AdamW(last.parameters(), 1e-2)
    p.wrap(model, optimizer)
    for index in range(STEPS + 5):
        if index == 5:
            optimizer.add_param_group({"params": list(first.parameters()), "lr": 1e-3})
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        optimizer.step()
        model.zero_grad()
        p.end(model, loss)
    p.note(*model.parameters())


@stranger()
def options_that_change(p: Program) -> None:
    """Warm-up, another momentum, moments begun again in mid-training."""
    model = Mlp().to(p.device)
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    p.wrap(model, optimizer)
    for index in range(STEPS + 2):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        update(optimizer)
        schedule.step()
        if index == 4:
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
            optimizer.param_groups[0]["betas"] = (0.8, 0.95)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger(on_host_bytes=32 << 10)
def states_saved_and_put_back(p: Program) -> None:
    model = Mlp().to(p.device)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS + 5):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
        if index == 3:
            saved = {k: v.clone() for k, v in model.state_dict().items()}
            moments = torch.utils._pytree.tree_map(
                lambda v: v.clone() if isinstance(v, torch.Tensor) else v, optimizer.state_dict()
            )
        if index == 6:
            model.load_state_dict(saved)
            optimizer.load_state_dict(moments)
    p.note(*model.parameters())


@stranger()
def hooks_that_write_gradients(p: Program) -> None:
    model = Mlp().to(p.device)
    for q in model.parameters():
        q.register_hook(lambda grad: grad * 0.5)
    optimizer = adamw(model)
    p.wrap(model, optimizer)
    for index in range(STEPS):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        update(optimizer)
        p.end(model, loss)
    p.note(*model.parameters())


@stranger(planned=0)
def an_optimizer_for_each_parameter(p: Program) -> None:
    """Each is stepped in backward as its gradient arrives."""
    model = Mlp().to(p.device)
    each: dict[Any, Any] = {q: torch.optim.SGD([q], 1e-2, momentum=0.9) for q in model.parameters()}

    def arrived(q: torch.Tensor) -> None:
        each[q].step()
        each[q].zero_grad()

    for q in model.parameters():
        q.register_post_accumulate_grad_hook(arrived)
    p.wrap(model)
    for index in range(STEPS):
        loss = model(p.rows(index, 6, 32)).square().mean()
        loss.backward()
        p.note(loss)
    p.note(*model.parameters())


@stranger(is_counted=False)
def slow_weights_round_another_optimizer(p: Program) -> None:
    """Lookahead as timm has it: an optimizer of which torch's `__init__` never ran, with its state in the inner one."""

    class Ahead(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self._inner, self.param_groups, self.defaults, self.steps = inner, inner.param_groups, inner.defaults, 0
            self.state = inner.state
            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

        def state_dict(self) -> dict[str, Any]:
            return self._inner.state_dict()

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = self._inner.step(closure)
            self.steps += 1
            if self.steps % 3 == 0:
                for q in self.param_groups[0]["params"]:
                    slow = self._inner.state[q].setdefault("slow", q.clone())
                    slow.add_(q - slow, alpha=0.5)
                    q.copy_(slow)
            return loss

    model = Mlp().to(p.device)
    trained(p, model, Ahead(adamw(model)))
