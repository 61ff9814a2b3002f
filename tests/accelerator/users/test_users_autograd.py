"""Autograd's ways round `loss.backward()`, on a model whose parameters lie below the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tieroff
from tests.accelerator import target
from tests.accelerator.users.loops import ROWS, SEED, STEPS, WIDTH, Program, Usage, check


def assign_gradients(p: Program, gradients: Any) -> None:
    for parameter, gradient in zip(p.parameters, gradients, strict=True):
        parameter.grad = gradient


def grad_of_parameters(p: Program) -> None:
    p.wrap()
    for index in range(STEPS):
        loss = p.loss(index)
        gradients = torch.autograd.grad(loss, p.parameters)
        p.note(*gradients, str({gradient.device.type for gradient in gradients}))
        assign_gradients(p, gradients)
        p.update(loss)


def gradients_of_gradients(p: Program) -> None:
    p.wrap()
    for index in range(STEPS):
        loss = p.loss(index)
        gradients = torch.autograd.grad(loss, p.parameters, create_graph=True)
        (loss + sum(gradient.square().sum() for gradient in gradients)).backward()
        p.note(*gradients)
        p.update(loss)


def two_backwards_of_one_graph(p: Program) -> None:
    p.wrap()
    for index in range(STEPS):
        loss = p.loss(index)
        loss.backward(retain_graph=True)
        loss.backward()
        p.note(*[parameter.grad for parameter in p.parameters])
        p.update(loss)


def two_losses(p: Program) -> None:
    p.wrap()
    for index in range(STEPS):
        first, second = p.loss(index), p.loss(index + 1)
        first.backward()
        second.backward()
        p.update(first)


def accumulation(p: Program) -> None:
    p.wrap()
    for index in range(STEPS):
        for part in range(3):
            p.loss(3 * index + part).backward()
        p.note(*[parameter.grad for parameter in p.parameters])
        p.update(p.rows(index).mean())


def penalty_on_parameters(p: Program) -> None:
    p.wrap()
    for index in range(STEPS):
        penalty = 1e-2 * sum(parameter.square().sum() for parameter in p.parameters)
        loss = p.loss(index) + penalty
        loss.backward()
        p.update(loss)


def penalty_inside_forward(p: Program) -> None:
    captured = p.parameters
    p.model.inside = lambda _, x: x + 1e-3 * sum(parameter.square().sum() for parameter in captured)
    p.wrap()
    p.steps()


def checkpointing(use_reentrant: bool) -> Usage:
    def usage(p: Program) -> None:
        layer = p.model.second
        forward = layer.forward
        layer.forward = lambda x: checkpoint(forward, x, use_reentrant=use_reentrant)
        p.wrap()
        p.steps()
        del layer.forward  # it refers to the layer

    return usage


class Product(torch.autograd.Function):
    """A product with a weight that is no module's argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


def function_of_a_parameter(p: Program) -> None:
    weight = p.model.second.weight
    p.wrap()
    for index in range(STEPS):
        product: Tensor = Product.apply(p.model(p.rows(index)), weight)  # type: ignore[no-untyped-call]
        loss = product.square().mean()
        loss.backward()
        p.update(loss)


def hooks_that_read_parameters(p: Program) -> None:
    other = p.model.first.weight
    p.model.third.weight.register_hook(lambda gradient: gradient + 0.1 * other.detach())
    p.wrap()
    p.model.second.weight.register_hook(lambda gradient: gradient * 0.5)
    p.steps()


def hooks_after_accumulation(p: Program) -> None:
    """They run in the thread of the device, in the order of the plain run, and may write gradients."""

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        p.note(list(parameter.shape), parameter.grad.device.type, parameter.device.type)
        parameter.grad.data.mul_(0.5)

    for parameter in p.parameters:
        parameter.register_post_accumulate_grad_hook(halve)
    p.wrap()
    p.steps()


def hooks_on_nodes(before: bool) -> Usage:
    """What DDP's reducer does: it keeps the node that accumulates, and hooks it."""

    def usage(p: Program) -> None:
        if not before:
            p.wrap()
        nodes: list[Any] = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in p.parameters]
        for number, (node, parameter) in enumerate(zip(nodes, p.parameters, strict=True)):

            def triple(_: Any, __: Any, number: int = number, parameter: Any = parameter) -> None:
                p.note(number)
                parameter.grad.mul_(3)

            node.register_hook(triple)
        if before:
            p.wrap()
        p.steps()

    return usage


def functions_of_functions(p: Program) -> None:
    p.wrap()
    for index in range(STEPS):
        p.step(index)
        values = {name: parameter.detach() * 1.1 for name, parameter in p.model.named_parameters()}
        with torch.no_grad():
            p.note(torch.func.functional_call(p.model, values, (p.rows(index),)))

        def loss_of(given: dict[str, Tensor], index: int = index) -> Tensor:
            out: Tensor = torch.func.functional_call(p.model, given, (p.rows(index),))
            return out.square().mean()

        p.note(*torch.func.grad(loss_of)({name: value.detach() for name, value in p.model.named_parameters()}).values())


def evaluation_inside_a_step(p: Program) -> None:
    p.wrap()
    for index in range(STEPS):
        loss = p.loss(index)
        with torch.no_grad():
            p.note(p.loss(50 + index))
        loss.backward()
        p.update(loss)
        with torch.inference_mode():
            p.note(p.loss(70 + index).clone(), sum(parameter.norm() for parameter in p.parameters))


REGULAR = {
    "grad": grad_of_parameters,
    "function_of_a_parameter": function_of_a_parameter,
    "hooks_that_read": hooks_that_read_parameters,
    "hooks_after_accumulation": hooks_after_accumulation,
    "hooks_on_nodes_before": hooks_on_nodes(before=True),
    "hooks_on_nodes_after": hooks_on_nodes(before=False),
    "create_graph": gradients_of_gradients,
    "two_backwards": two_backwards_of_one_graph,
    "two_losses": two_losses,
    "accumulation": accumulation,
    "penalty_in_forward": penalty_inside_forward,
    "checkpoint": checkpointing(use_reentrant=False),
    "checkpoint_reentrant": checkpointing(use_reentrant=True),
    "penalty_in_loss": penalty_on_parameters,
    "functions": functions_of_functions,
    "evaluation": evaluation_inside_a_step,
}


@pytest.mark.parametrize("usage", REGULAR.values(), ids=REGULAR)
def test_autograd_gives_the_same(usage: Usage, tmp_path: Path) -> None:
    check(usage, tmp_path)


def test_gradients_are_kept_over_steps_where_nothing_moves(tmp_path: Path) -> None:
    def usage(p: Program) -> None:
        p.wrap()
        for index in range(STEPS):
            loss = p.loss(index)
            loss.backward()
            p.optimizer.step()
            p.note(loss, *[parameter.grad for parameter in p.parameters])
        assert p.engine is None or p.engine.stats().phase == "nothing moved"

    check(usage, tmp_path, planned=0, policy="auto")


def test_a_write_between_forward_and_backward_is_autograds_own_error(tmp_path: Path) -> None:
    def usage(p: Program) -> None:
        p.wrap()
        p.steps()
        loss = p.loss(STEPS)
        with torch.no_grad():
            p.model.third.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        p.optimizer.zero_grad()

    check(usage, tmp_path)


def test_a_gradient_under_autocast_is_the_same(tmp_path: Path) -> None:
    def usage(p: Program) -> None:
        p.wrap()
        for index in range(STEPS):
            with torch.autocast(target.NAME, dtype=torch.bfloat16):
                loss = p.loss(index + SEED)
            loss.backward()
            p.update(loss)

    check(usage, tmp_path)


def test_an_evaluation_between_forward_and_backward_leaves_what_backward_saved(tmp_path: Path) -> None:
    """It sends below what the plan has on the device all the time, and what autograd therefore saved as it lies."""

    def usage(p: Program) -> None:
        p.wrap()
        for index in range(2 * STEPS):
            loss = p.loss(index)
            if index % 3 == 2:
                with torch.no_grad():
                    p.note(p.model(p.rows(index + 1)))
            loss.backward()
            p.update(loss)

    def make() -> nn.Module:
        return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())))

    check(usage, tmp_path, policy="auto", device="70%", make=make)


def test_figures_of_a_step_after_which_another_backward_ran(tmp_path: Path) -> None:
    """Its events come after the update, and the last one's op runs until the next step begins."""

    def usage(p: Program) -> None:
        p.wrap()
        for index in range(STEPS):
            p.loss(index).backward()
            p.optimizer.step()
            p.optimizer.zero_grad()
            loss = p.model.second(p.rows(index).requires_grad_()).square().sum()
            loss.backward()
            p.optimizer.zero_grad()
            assert p.engine is None or p.engine.stats().compute_s >= 0

    check(usage, tmp_path, planned=0, device="35%")


class Products(nn.Module):
    """Saves parameters of one size, and activations of that size beside them, in the one order or in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(ROWS, WIDTH) / 4) for _ in range(8))
        self.is_reversed = self.is_swapped = False

    def forward(self, x: Tensor) -> Tensor:
        for weight in reversed(self.weights) if self.is_reversed else self.weights:
            x = torch.tanh(weight * x if self.is_swapped else x * weight)
        return x


@pytest.mark.parametrize("change", ["is_reversed", "is_swapped"])
def test_a_parameter_is_not_kept_as_it_is_where_another_tensor_was_saved(change: str, tmp_path: Path) -> None:
    """It would follow its home below, where the device cannot read it."""
    were_quiet = []

    def usage(p: Program) -> None:
        p.wrap()
        p.steps(21)
        setattr(p.model, change, True)
        kept = p.loss(30)
        if p.engine is not None:
            were_quiet.append(not p.engine.executor.clock.times.is_whole)  # such a step does not see at once that it is another
            tieroff.sleep(p.model)
        kept.backward()
        p.update(kept)

    check(usage, tmp_path, make=Products, device="80%", policy="auto", planned=0)
    assert were_quiet == [True]


class Fused(torch.autograd.Function):
    """A norm and a gated perceptron as one Function, which saves four leaves and computes its forward again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale, *weights)
        return Fused.compute(x, scale, *weights)

    @staticmethod
    def compute(x: Tensor, scale: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        y = nn.functional.rms_norm(x, scale.shape, scale)
        return nn.functional.linear(nn.functional.silu(nn.functional.linear(y, gate)) * nn.functional.linear(y, up), down)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [saved.detach().requires_grad_() for saved in ctx.saved_tensors]
            out = Fused.compute(*leaves)
        return torch.autograd.grad(out, leaves, gradient)


class FusedLayer(nn.Module):
    """Adds what `Fused` makes of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.norm.weight, self.gate.weight, self.up.weight, self.down.weight
        return x + Fused.apply(x, *weights)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("device", ["50%", "min"])
def test_a_function_that_saves_more_leaves_than_stay_at_hand(device: str, tmp_path: Path) -> None:
    """It saves them when its forward is over; the first that it read lie below again by then."""

    def usage(p: Program) -> None:
        p.wrap()
        p.steps(6)

    check(usage, tmp_path, policy="auto", device=device, make=lambda: nn.Sequential(*(FusedLayer() for _ in range(4))))


class Parts(torch.autograd.Function):
    """Keeps two halves of one weight, which is saved itself too, and a square one with its transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fused: Tensor, square: Tensor) -> Tensor:
        first, second = fused.chunk(2)
        ctx.save_for_backward(x, first, second, fused, square, square.t())
        return x @ first.t() + torch.tanh(x @ second.t()) @ square

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, first, second, fused, square, transposed = ctx.saved_tensors
        assert fused.shape == (2 * WIDTH, WIDTH)
        hidden = torch.tanh(x @ second.t())
        inner = (gradient @ transposed) * (1 - hidden * hidden)
        of_square = hidden.t() @ gradient + 0 * square
        return gradient @ first + inner @ second, torch.cat([gradient.t() @ x, inner.t() @ x]), of_square


class PartsLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) * 0.2)
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Parts.apply(x, self.fused, self.square)  # type: ignore[no-untyped-call]
        return x + out


def test_a_function_that_saves_views_of_a_leaf_finds_these(tmp_path: Path) -> None:
    check(grad_of_parameters, tmp_path, make=lambda: nn.Sequential(PartsLayer(), PartsLayer()), planned=3)


class Inside(torch.autograd.Function):
    """Runs a layer again in backward, asks for what it saved inside of others' hooks, and computes on behind these."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, hooks: str, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.hooks, ctx.counts = layer, hooks, counts
        with torch.no_grad():
            return torch.sin(layer(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        count = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return tensor

        def run(moved: Tensor) -> Any:
            return ctx.layer(ctx.saved_tensors[0].detach() + moved)

        moved = torch.zeros_like(gradient).requires_grad_()
        with torch.enable_grad():
            if ctx.hooks == "a checkpoint's":
                out = checkpoint(run, moved, use_reentrant=False)
            else:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    out = run(moved)
            out = torch.sin(out)
        ctx.counts.append(count)
        torch.autograd.backward(out, gradient)
        return moved.grad, None, None, None


@pytest.mark.parametrize("hooks", ["a checkpoint's", "of its own"])
def test_a_function_that_asks_for_what_it_saved_inside_of_other_hooks(hooks: str, tmp_path: Path) -> None:
    def usage(p: Program) -> None:
        counts: list[int] = []
        p.model.inside = lambda model, x: Inside.apply(x, model.second, hooks, counts)  # type: ignore[no-untyped-call]
        p.wrap()
        p.steps()
        p.note(counts)

    check(usage, tmp_path)
