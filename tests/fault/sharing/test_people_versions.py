"""Programs that go by version counters: caches of weights, autograd's own check of what was written; as in the plain run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.twins import Setting, assert_same, check_twins, follow, usual_step
from tieroff.tracing.recording.arguments import Arguments

STEPS = 6


class Cached(nn.Module):
    """A linear layer that keeps a low-precision copy of its weight, and makes it anew when the weight was written."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.version, self.copy = -1, torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight._version != self.version:
            self.version, self.copy = self.weight._version, self.weight.detach().bfloat16()
        straight = self.weight + (self.copy.float() - self.weight).detach()  # gradients pass to the weight itself
        return torch.relu(x @ straight)


def cached_and_foreach() -> tuple[Any, Any]:
    model = nn.Sequential(*(Cached(8) for _ in range(3)))
    return model, torch.optim.AdamW(model.parameters(), 0.01, foreach=True)  # as torch does by itself on a GPU


def test_a_copy_of_a_weight_is_made_anew_when_the_update_moved_its_version(planned_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        before = [layer.weight._version for layer in model]
        loss = usual_step(model, optimizer)
        return loss, [layer.weight._version - version for layer, version in zip(model, before, strict=True)]

    plain = follow(cached_and_foreach, step, STEPS)
    wrapped = follow(cached_and_foreach, step, STEPS, planned_setting)
    assert all(moved > 0 for run in (plain, wrapped) for seen in run.seen for moved in seen["out"][1])
    for run in (plain, wrapped):
        for seen in run.seen:  # by how much a version moves is nobody's business
            seen["out"] = seen["out"][0]
    assert_same(plain.seen, wrapped.seen)
    assert wrapped.phase in ("planned", "nothing moved")


def make_mlp() -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=True)


def test_an_update_between_forward_and_backward_is_autograds_error(planned_setting: Setting) -> None:
    """In the recorded step as in any other."""

    def step(model: Any, optimizer: Any, index: int) -> Any:
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()

    assert_same(follow(make_mlp, step, 4).seen, follow(make_mlp, step, 4, planned_setting).seen)


def test_an_update_of_ones_own_that_writes_lists_gives_the_same(tmp_path: Path) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        loss = usual_step(model, optimizer)
        with torch.no_grad():
            torch._foreach_lerp_([p.data for p in model.parameters()], [torch.ones_like(p) for p in model.parameters()], 0.01)
        return loss

    check_twins(make_mlp, step, Setting(tmp_path), steps=STEPS)


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: torch._foreach_add_(a, 1.0),
    "addcdiv": lambda a, b: torch._foreach_addcdiv_(a, b, b),
    "copy": lambda a, b: torch._foreach_copy_(a, b),
    "out": lambda a, b: torch.ops.aten._foreach_add.List_out(a, b, out=a),
    "split": lambda a, b: torch.split_with_sizes_copy(torch.ones(6), [3, 3], out=a),
    "reads": lambda a, b: torch._foreach_add(a, b),
    "single": lambda a, b: a[0].add_(b[1]),
    "fused": lambda a, b: torch._fused_sgd_(
        a, b, [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False, maximize=False, is_first_step=True
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_an_op_moves_as_many_versions_below_a_mode_as_without_one(name: str) -> None:
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return arguments.call(func, args, kwargs or {})

    def moved() -> list[int]:
        tensors = [torch.ones(3) for _ in range(4)]
        WRITES[name](tensors[:2], tensors[2:])
        return [tensor._version for tensor in tensors]

    arguments = Arguments()
    plain = moved()
    with Mode():  # type: ignore[no-untyped-call]
        assert moved() == plain
