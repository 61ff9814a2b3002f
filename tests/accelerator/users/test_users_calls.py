"""Calls on the device that get tensors whose bytes may lie below.

Tensors of several wrapped models, of which one may be unwrapped, parameters that a transform of `torch.func` gets, and what
another thread may call beside a step.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vjp, vmap
from torch.utils._pytree import tree_leaves

import tieroff
from tests.accelerator import target
from tests.accelerator.users.loops import ROWS, SEED, STEPS, WIDTH, Net, Program, adamw, check
from tests.support.injector import before_every_line
from tests.support.parity import HOST, assert_accounts, config_for, copy_of
from tieroff.runtime.items.offloaded import is_offloaded


def batch(index: int) -> Tensor:
    torch.manual_seed(SEED + index)
    return torch.randn(ROWS, WIDTH).to(target.device())


def run(folder: Path | None, unwrapped: str | None = None) -> list[Tensor]:
    """Trains a model through another one, with an average of the first in a third; returns all that came out.

    Each is wrapped where there is a folder, and one of them is unwrapped in mid-training.
    """
    torch.manual_seed(SEED)
    first, second = Net().to(target.device()), Net().to(target.device())
    mean = copy.deepcopy(first).requires_grad_(False)
    optimizers = [adamw(first), adamw(second)]
    models = {"first": first, "second": second, "mean": mean}
    if folder is not None:
        for model, optimizer in zip(models.values(), [*optimizers, None], strict=True):
            tieroff.wrap(model, optimizer, config_for(HOST, folder, policy="floor"), backend=target.backend())
    seen: list[Tensor] = []
    for index in range(STEPS):
        if index == STEPS // 2 and unwrapped is not None and folder is not None:
            tieroff.unwrap(models.pop(unwrapped))
        loss = second(first(batch(index))).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_([*first.parameters(), *second.parameters()], 0.01)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for average, value in zip(mean.parameters(), first.parameters(), strict=True):
                average.lerp_(value, 0.1)
            torch._foreach_add_([*second.fourth.parameters()], [*mean.first.parameters()], alpha=0.1)
            seen += [copy_of(loss), copy_of(norm), copy_of(mean(batch(index)))]
        for model in models.values() if folder is not None else ():
            assert_accounts(tieroff.engine(model))
    for model in models.values() if folder is not None else ():
        tieroff.unwrap(model)
    seen += [copy_of(p) for model in (first, second, mean) for p in model.parameters()]
    return seen


@pytest.mark.parametrize("unwrapped", [None, "first", "second", "mean"])
def test_calls_that_get_tensors_of_several_models(unwrapped: str | None, tmp_path: Path) -> None:
    plain, wrapped = run(None), run(tmp_path, unwrapped)
    assert [i for i, (a, b) in enumerate(zip(plain, wrapped, strict=True)) if not torch.equal(a, b)] == []


def named(p: Program) -> dict[str, Any]:
    return dict(p.model.named_parameters())


def value(p: Program, parameters: dict[str, Any], rows: Tensor) -> Tensor:
    out: Tensor = functional_call(p.model, parameters, (rows,))
    return out.square().mean()


def gradients(p: Program) -> Any:
    return grad(lambda parameters: value(p, parameters, p.rows(50)))(named(p))


def of_each_row(p: Program) -> Any:
    def of_row(parameters: dict[str, Any], row: Tensor) -> Tensor:
        return value(p, parameters, row[None])

    return vmap(grad(of_row), in_dims=(None, 0))(named(p), p.rows(50))


def hessian_times_ones(p: Program) -> Any:
    ones = {name: torch.ones_like(parameter) for name, parameter in named(p).items()}

    def of(parameters: dict[str, Any]) -> Tensor:
        return value(p, parameters, p.rows(50))

    return vjp(grad(of), named(p))[1](ones)


FROM_OUTSIDE: dict[str, Callable[[Program], Any]] = {
    "grad": gradients,
    "grad of each row": of_each_row,
    "vjp": lambda p: vjp(lambda parameters: value(p, parameters, p.rows(50)), named(p))[1](
        torch.ones((), device=target.device())
    ),
    "jacobian": lambda p: jacrev(lambda weight: value(p, {"second.weight": weight}, p.rows(50)))(p.model.second.weight),
    "hessian": hessian_times_ones,
    "vmap": lambda p: vmap(lambda a, b, c: (a * b).sum() + c)(p.model.first.weight, p.model.third.weight, p.model.second.bias),
}


@pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning")  # gradients of each row take more than the budget
@pytest.mark.parametrize("device", ["100%", "60%"])
@pytest.mark.parametrize("name", FROM_OUTSIDE)
def test_a_transform_gets_parameters_between_forward_and_update(name: str, device: str, tmp_path: Path) -> None:
    def usage(p: Program) -> None:
        p.wrap()
        for index in range(STEPS):
            p.note(*tree_leaves(FROM_OUTSIDE[name](p)))
            loss = p.loss(index)
            loss.backward()
            p.note(*tree_leaves(FROM_OUTSIDE[name](p)))
            p.update(loss)

    check(usage, tmp_path, device=device)


@pytest.mark.parametrize("device", ["100%", "min"])
def test_a_transform_inside_forward_gets_several_parameters(device: str, tmp_path: Path) -> None:
    """All of them are read before the first one is used, and the next reads send it below."""

    def several(model: Any, x: Tensor) -> Tensor:
        used: Tensor = vmap(lambda a, b, c: torch.tanh(a * b) + c)(model.first.weight, model.third.weight, model.fourth.bias)
        return x + x @ used

    def usage(p: Program) -> None:
        p.model.inside = several
        p.wrap()
        p.steps()

    check(usage, tmp_path, device=device)


def test_a_transform_inside_forward_gets_parameters_that_no_module_read(tmp_path: Path) -> None:
    def iterated(model: Any, x: Tensor) -> Tensor:
        given = dict(model.named_parameters())
        used: Tensor = vmap(lambda each: torch.tanh(each["third.weight"]) + each["second.bias"])(
            {name: given[name] for name in ("third.weight", "second.bias")}
        )
        return x + used.sum() / ROWS

    def usage(p: Program) -> None:
        p.model.inside = iterated
        p.wrap()
        p.steps()

    check(usage, tmp_path)


def test_what_is_not_offloaded_has_its_bytes_at_every_line_of_a_step(tmp_path: Path) -> None:
    """A function that another thread calls is served, or finds them, wherever in the engine the step is."""
    wrong: set[str] = set()
    looks = 0

    def usage(p: Program) -> None:
        p.wrap()
        p.steps()

        def look(place: str) -> None:
            nonlocal looks
            for tensor in tensors:
                if not is_offloaded(tensor):
                    looks += 1
                    try:
                        tensor.data_ptr()
                    except RuntimeError as error:
                        wrong.add(f"{place}: {error}")

        for index in range(2):
            tensors = [*p.parameters, *tree_leaves([*p.optimizer.state.values()])]
            with before_every_line(look) if p.engine is not None else nullcontext():
                p.step(STEPS + index)

    check(usage, tmp_path)
    assert looks > 0
    assert wrong == set()


@pytest.mark.parametrize("budget", ["min", "40%"])
def test_a_thread_that_reads_takes_nothing_from_the_step_that_runs(budget: str, tmp_path: Path) -> None:
    """Which goes by its plan, whose last tensors at `"min"` are those that its next op uses."""

    def usage(p: Program) -> None:
        p.wrap()
        p.steps(STEPS)
        is_over, reads = threading.Event(), 0

        def read() -> None:
            nonlocal reads
            while not is_over.is_set():
                for parameter in p.parameters:
                    with suppress(RuntimeError):  # it may meet one that leaves in the midst of `detach`
                        parameter.detach().cpu()
                    reads += 1

        reader = threading.Thread(target=read)
        reader.start()
        try:
            p.steps(STEPS, STEPS)
        finally:
            is_over.set()
            reader.join()
        p.note(reads >= len(p.parameters))

    check(usage, tmp_path, device=budget, policy="auto")
