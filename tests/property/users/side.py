"""One side of a program: a model, its optimizer, and what every action uses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

import tieroff
from tests.property.users.parts import OPTIMIZERS, WIDTH, Small


class Side:
    """One side of a program.

    Attributes:
        wrap: makes the model and its optimizer a wrapped side's, within a budget of the device or the usual one; None on the
            plain side.
        said: what the last action showed.
        is_wrapped: the model is.
    """

    def __init__(self, optimizer: str, wrap: Callable[[Any, Any, str | None], Any] | None) -> None:
        torch.manual_seed(0)
        self.model = Small()
        self.extra = nn.Parameter(torch.randn(WIDTH))
        parameters = list(self.model.parameters())
        self.optimizer = OPTIMIZERS[optimizer](parameters)
        self.wrap = wrap
        self.aliases: list[Any] = []
        self.saved: list[Any] = []
        self.pending: torch.Tensor | None = None
        self.hooks: list[Any] = []
        self.said: Any = None
        self.draws = 0
        self.is_wrapped = wrap is not None
        if wrap is not None:
            wrap(self.model, self.optimizer, None)

    def act(self, name: str, number: int) -> None:
        """Does one action; `number` says on which parameter, or in which of its ways."""
        self.draws += 1
        torch.manual_seed(self.draws)
        self.said = None
        getattr(self, name)(number)

    def look(self) -> dict[str, Any]:
        """Returns copies of everything that a person could print."""
        shown = {f"parameter {name}": p.detach().clone() for name, p in self.model.named_parameters()}
        shown |= {f"gradient of {n}": p.grad.detach().clone() for n, p in self.model.named_parameters() if p.grad is not None}
        for index, entries in self.optimizer.state_dict()["state"].items():
            shown |= {f"{key} of {index}": copy.deepcopy(value) for key, value in entries.items()}
        shown |= {f"alias {i}": torch.as_tensor(alias).detach().clone() for i, alias in enumerate(self.aliases)}
        shown["buffer"] = self.model.seen.clone()
        shown["said"] = self.said.detach().clone() if isinstance(self.said, torch.Tensor) else self.said
        return shown

    def end(self) -> None:
        """The program is over."""
        self.pending = None
        if self.is_wrapped:
            tieroff.unwrap(self.model)

    def rewrapped(self, device: str | None, between: Callable[[], Any] = lambda: None) -> None:
        """Unwraps the model, does something, and wraps it again, which may be refused."""
        if self.wrap is not None:
            tieroff.unwrap(self.model)
            self.is_wrapped = False
        try:
            between()
        finally:
            if self.wrap is not None:
                self.wrap(self.model, self.optimizer, device)
                self.is_wrapped = True

    def parameter(self, number: int) -> nn.Parameter:
        parameters = list(self.model.parameters())
        return parameters[number % len(parameters)]

    def batch(self, number: int) -> torch.Tensor:
        return torch.randn(4 if number % 4 else 3, WIDTH)

    def loss(self, number: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(self.batch(number)).square().mean()
        return loss

    def set_group(self, parameters: list[nn.Parameter]) -> None:
        for gone in self.optimizer.state.keys() - set(parameters):
            del self.optimizer.state[gone]
        self.optimizer.param_groups[0]["params"] = parameters

    def in_thread(self, work: Callable[[], Any]) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()

    def without_grad(self, number: int) -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = self.model(self.batch(number))
            return out
