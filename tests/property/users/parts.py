"""What the programs of users train: a small model, and optimizers of which the engine knows some and tries others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Planned(Exception):
    """Raised by the program's own forward or hook."""


class Small(nn.Module):
    """Three layers, the last of them twice.

    Attributes:
        fails: forward raises.
        runs_again: the middle is checkpointed.
        writes: forward scales its second weight through `.data` before it uses it.
        counts_anew: forward makes a new buffer instead of writing the old one.
    """

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(1))
        self.fails = self.runs_again = self.writes = self.counts_anew = False

    def _middle(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.drop(self.second(torch.tanh(self.first(x))))
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.second.weight.data.mul_(0.9)
        h = checkpoint(self._middle, x, use_reentrant=False) if self.runs_again else self._middle(x)
        if self.fails:
            raise Planned
        if self.counts_anew:
            self.seen = self.seen + 1
        else:
            self.seen += 1
        out: torch.Tensor = self.third(torch.relu(self.third(h)))
        return out


class Signs(torch.optim.Optimizer):
    """An optimizer of one's own that treats each parameter alone."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    entries = self.state[p]
                    if not entries:
                        entries["mean"] = torch.zeros_like(p)
                    p.add_(entries["mean"].lerp(p.grad, 0.1).sign_(), alpha=-group["lr"])
                    entries["mean"].lerp_(p.grad, 0.02)
        return loss


class Normed(Signs):
    """One whose updates depend on the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if gradients:
            scale = 1 / (1 + sum(grad.square().sum() for grad in gradients))
            for grad in gradients:
                grad.mul_(scale)
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, 1e-2, amsgrad=True, foreach=False),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, 1e-3, centered=True),
    "own": Signs,
    "normed": Normed,
}
