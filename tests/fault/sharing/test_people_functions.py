"""Functions of people's own: what they find among their saved tensors, and what they write there; as in the plain run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.twins import Setting, assert_same, follow

pytestmark = pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning")
STEPS = 7


class Head(torch.autograd.Function):
    """A fused head: forward computes the gradients, backward scales them where they were saved."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = h @ w
        ctx.save_for_backward(2 * (out @ w.t()), 2 * (h.t() @ out))
        return out.square().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        for saved in ctx.saved_tensors:
            saved.data.mul_(grads[0])  # as a kernel would that autograd knows nothing of
        return ctx.saved_tensors


class HeadByArray(Head):
    """The same by code that no dispatch mode sees."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = ctx.saved_tensors
        for saved in found:
            array = saved.detach().numpy()
            array *= grads[0].item()
        return found


class Fused(nn.Module):
    def __init__(self, head: type[Head]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh())
        self.weight, self.head = nn.Parameter(torch.randn(8, 8) / 8), head

    def forward(self, x: torch.Tensor) -> Any:
        return self.head.apply(self.layers(x), self.weight)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("head", [Head, HeadByArray])
def test_what_backward_writes_into_saved_tensors_counts_in_the_next_backward(
    head: type[Head], times: int, planned_setting: Setting
) -> None:
    def make() -> tuple[Any, Any]:
        model = Fused(head)
        return model, torch.optim.AdamW(model.parameters(), 0.01)

    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8))
        for left in reversed(range(times)):
            (loss * 0.5).backward(retain_graph=left > 0)
        optimizer.step()
        return loss.detach()

    plain, wrapped = follow(make, step, STEPS), follow(make, step, STEPS, planned_setting)
    assert_same(plain.seen, wrapped.seen)
    assert wrapped.phase in ("planned", "nothing moved")


def test_a_graph_retained_in_some_steps_only_gives_the_same(planned_setting: Setting) -> None:
    """Planned as one that is not: the step that retains it leaves its plan."""

    def make() -> tuple[Any, Any]:
        model = Fused(HeadByArray)
        return model, torch.optim.AdamW(model.parameters(), 0.01)

    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8))
        if index in (4, 6):
            (loss * 0.5).backward(retain_graph=True)
        (loss * 0.5).backward()
        optimizer.step()
        return loss.detach()

    assert_same(follow(make, step, STEPS).seen, follow(make, step, STEPS, planned_setting).seen)


class Accumulating(torch.autograd.Function):
    """A linear layer that adds its gradient to what hangs on the weight that it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: Any, frozen: Any, seen: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(x, w, w.detach(), frozen)
        ctx.leaves, ctx.seen = (w, frozen), seen
        return x @ w.t() + x @ frozen

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w, detached, frozen = ctx.saved_tensors
        same = (w is ctx.leaves[0], detached is ctx.leaves[0], frozen is ctx.leaves[1])
        ctx.seen.append((*same, frozen.scale, isinstance(w, nn.Parameter)))
        w.main_grad.add_(grads[0].t() @ x)
        w.grad_added = True
        return grads[0] @ w + grads[0] @ frozen.t() + 0 * (x @ detached), torch.zeros_like(w), None, None


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.weight.main_grad = torch.zeros(width, width)  # type: ignore[attr-defined]
        self.frozen = nn.Parameter(torch.randn(width, width) / width, requires_grad=False)
        self.frozen.scale = 3  # type: ignore[attr-defined]
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(Accumulating.apply(x, self.weight, self.frozen, self.seen))  # type: ignore[no-untyped-call]


def make_layers() -> tuple[Any, Any]:
    layers = [Layer(8) for _ in range(3)]
    return nn.Sequential(*layers), torch.optim.AdamW([layer.weight for layer in layers], 0.01)


def accumulate(model: Any, optimizer: Any, index: int) -> Any:
    for layer in model:
        layer.seen.clear()
        layer.weight.main_grad.zero_()
        layer.weight.grad_added = False
    loss = model(torch.randn(4, 8, requires_grad=True)).square().mean()
    loss.backward()
    assert all(layer.weight.grad_added for layer in model)
    for layer in model:
        layer.weight.grad = layer.weight.main_grad.clone()
    optimizer.step()
    return loss.detach(), [list(layer.seen) for layer in model], [layer.weight.main_grad.clone() for layer in model]


def test_a_function_finds_the_leaf_that_it_saved(planned_setting: Setting) -> None:
    plain, wrapped = follow(make_layers, accumulate, STEPS), follow(make_layers, accumulate, STEPS, planned_setting)
    assert_same(plain.seen, wrapped.seen)
    assert plain.seen[0]["out"][1][0] == [(True, False, True, 3, True)]
    assert wrapped.phase in ("planned", "nothing moved")


def test_a_function_that_comes_in_the_place_of_an_op_finds_the_leaf(planned_setting: Setting) -> None:
    """It saves the same tensors in the same order, so that the step does not leave its plan."""

    class Switched(nn.Linear):
        apply: Callable[..., Any] = staticmethod(torch.nn.functional.linear)

        def forward(self, x: torch.Tensor) -> Any:
            return torch.tanh(self.apply(x, self.weight))

    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x, w = ctx.saved_tensors
            assert w.mark == "mine"
            return grads[0] @ w, grads[0].t() @ x

    def make() -> tuple[Any, Any]:
        model = nn.Sequential(*(Switched(8, 8, bias=False) for _ in range(3)))
        for layer in model:
            layer.weight.mark = "mine"  # type: ignore[union-attr]
        return model, torch.optim.AdamW(model.parameters(), 0.01)

    def step(model: Any, optimizer: Any, index: int) -> Any:
        for layer in model:
            layer.apply = torch.nn.functional.linear if index < 4 else Multiply.apply
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    assert_same(follow(make, step, STEPS).seen, follow(make, step, STEPS, planned_setting).seen)
