"""What strangers' programs do besides: graphs that are kept, writes in backward, caches by version, groups that change."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch

from tests.property.users.further import ACTIONS as KNOWN
from tests.property.users.further import Versed
from tests.property.users.parts import OPTIMIZERS, WIDTH


class Squares(torch.autograd.Function):
    """Computes its gradient in forward, and scales it in backward where it was saved, past autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(2 * x / x.numel())
        return x.square().mean()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (saved,) = ctx.saved_tensors
        saved.data.mul_(grads[0])
        return saved


class Strange(Versed):
    """A `Versed` who writes programs as strangers do.

    Attributes:
        kept: a loss whose graph is retained, once there is one.
        cached: per parameter, a version and a copy of that.
    """

    def __init__(self, optimizer: str, wrap: Callable[[Any, Any, str | None], Any] | None) -> None:
        super().__init__(optimizer, wrap)
        self.name = optimizer
        self.kept: Any = None
        self.cached: dict[str, tuple[int, torch.Tensor]] = {}

    def retain(self, number: int) -> None:
        self.kept = None
        loss = self.loss(number)
        loss.backward(retain_graph=True)
        self.kept = self.said = loss

    def backward_over_what_is_retained(self, number: int) -> None:
        """Twice for an odd number; autograd's error where something was written."""
        if self.kept is not None:
            kept, self.kept = self.kept, None
            for _ in range(number % 2):
                kept.backward(retain_graph=True)
            kept.backward()

    def write_in_backward(self, number: int) -> None:
        self.optimizer.zero_grad()
        loss: Any = Squares.apply(self.model(self.batch(number)))  # type: ignore[no-untyped-call]
        for left in reversed(range(1 + number % 3)):
            (loss * 0.5).backward(retain_graph=left > 0)
        self.optimizer.step()
        self.said = loss.detach()

    def cache_by_version(self, number: int) -> None:
        """After an update, which moves versions."""
        self.step(number)
        for name, p in self.model.named_parameters():
            version, _ = self.cached.get(name, (-1, p))
            if p._version != version:
                self.cached[name] = p._version, p.detach().clone()
        self.said = [copied for _, copied in self.cached.values()]

    def regroup(self, number: int) -> None:
        """The same parameters in other groups, in another order."""
        groups = self.optimizer.param_groups
        together = [p for group in groups for p in group["params"]]
        together = together[number % 3 :] + together[: number % 3]
        cut = 1 + number % max(len(together) - 1, 1)
        options = {key: value for key, value in groups[0].items() if key != "params"}
        groups[:] = [{**options, "params": part} for part in (together[:cut], together[cut:]) if part]

    def alternate_halves(self, number: int) -> None:
        """One half of the parameters learns in one step, the other in the next."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        for half in (0, 1):
            for i, p in enumerate(parameters):
                p.requires_grad_(i % 2 == half or len(parameters) < 2)
            self.step(number + half)
        for p in parameters:
            p.requires_grad_(True)

    def drop_another_without_unwrap(self, number: int) -> None:
        model = copy.deepcopy(self.model).requires_grad_(True)
        optimizer = OPTIMIZERS[self.name](model.parameters())
        if self.wrap is not None:
            model = self.wrap(model, optimizer, None)
        for _ in range(1 + number % 4):
            optimizer.zero_grad()
            loss = model(torch.ones(2, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
        self.said = loss.detach()
        del model, optimizer, loss
        gc.collect()

    def to_where_it_is(self, number: int) -> None:
        self.model.to(("cpu", torch.float32, torch.device("cpu"))[number % 3])


ACTIONS = (*KNOWN, *(name for name, value in vars(Strange).items() if callable(value) and not name.startswith("_")))
