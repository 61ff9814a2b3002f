"""What user code reads in the midst of a planned step comes up from below for it, and the step holds its budget with that.

By the allocator's count: user code gets one tensor after the other, and what the plan has on the device makes way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.accelerator import target
from tests.corpus.parts import Mlp, update
from tests.corpus.run import ROUNDING_BYTES, Program, differing, run
from tests.support.covering import in_turn

pytestmark = pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning")
WIDTH, LAYERS, STEPS = 64, 6, 7
SCALARS_BYTES = 2 * ROUNDING_BYTES  # of user code, which a step that is traced may have at another moment


def loss_of(model: Any, rows: Tensor) -> Tensor:
    loss: Tensor = model(rows).square().mean()
    return loss


def perturbed(model: Any, loss: Callable[[], Tensor]) -> Any:
    """SAM: each parameter moves along its gradient and back, with a backward in between."""
    loss().backward()
    with torch.no_grad():
        moved = [p.grad * 0.01 for p in model.parameters()]
        for p, way in zip(model.parameters(), moved, strict=True):
            p.add_(way)
    model.zero_grad()
    loss().backward()
    with torch.no_grad():
        for p, way in zip(model.parameters(), moved, strict=True):
            p.sub_(way)


def looked_at_before_backward(model: Any, loss: Callable[[], Tensor]) -> Any:
    value = loss()
    with torch.no_grad():
        most = torch.stack([p.abs().max() for p in model.parameters()]).sum()
    value.backward()
    return most


def used_in_pairs(model: Any, loss: Callable[[], Tensor]) -> Any:
    loss().backward()
    with torch.no_grad():
        return torch.stack([(a.weight @ b.weight).sum() for a, b in pairwise(model.layers)]).sum()


def decayed_in_hooks(model: Any, loss: Callable[[], Tensor]) -> Any:
    def decay(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.add_(p.detach(), alpha=1e-3)

    hooks = [p.register_post_accumulate_grad_hook(decay) for p in model.parameters()]
    loss().backward()
    for hook in hooks:
        hook.remove()


def cut_to_parameters(model: Any, loss: Callable[[], Tensor]) -> Any:
    """Adaptive clipping: norms of each parameter and its gradient, and a choice by them."""
    loss().backward()
    with torch.no_grad():
        for p in model.parameters():
            most = p.norm().clamp_(min=1e-3) * 0.01
            norm = p.grad.norm()
            p.grad.copy_(torch.where(norm > most, p.grad * (most / norm.clamp(min=1e-6)), p.grad))


def stacked(model: Any, loss: Callable[[], Tensor]) -> Any:
    """One call that needs more than any op of the step: all weights, and as much beside them."""
    loss().backward()
    with torch.no_grad():
        return torch.stack([layer.weight for layer in model.layers]).var(0).sum()


def multiplied(model: Any, loss: Callable[[], Tensor]) -> Any:
    loss().backward()
    with torch.no_grad():
        return torch.linalg.multi_dot([layer.weight for layer in model.layers]).sum()


def used_at_once_between_steps(model: Any, loss: Callable[[], Tensor]) -> Any:
    """Views of all parameters that are held at once, as averages of weights have them."""
    with torch.no_grad():
        views = [p.detach() for p in model.parameters()]
        most = views[0].norm()
        for view in views:
            torch.maximum(most, view.norm(), out=most)
    del views, view
    loss().backward()
    return most


READS = {
    reads.__name__: reads
    for reads in (
        perturbed,
        looked_at_before_backward,
        used_in_pairs,
        decayed_in_hooks,
        cut_to_parameters,
        stacked,
        multiplied,
        used_at_once_between_steps,
    )
}


@pytest.mark.parametrize(("reads", "budget"), in_turn(list(READS), ["min", "30%"]))
def test_steps_hold_their_budget_with_what_user_code_reads(reads: str, budget: str, tmp_path: Path) -> None:
    def usage(p: Program) -> None:
        model = Mlp(WIDTH, LAYERS).to(p.device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        p.wrap(model, optimizer)
        for index in range(STEPS):
            seen = READS[reads](model, partial(loss_of, model, p.rows(index, 32, WIDTH)))
            update(optimizer)
            p.end(model, seen)
        p.note(*model.parameters())

    device = target.device()
    plain, wrapped = run(usage, Program(device, tmp_path)), run(usage, Program(device, tmp_path, budget, target.backend))
    assert differing(plain, wrapped) == []
    last = wrapped.steps[-3:]
    assert [(step.phase, step.fallbacks) for step in last] == [("planned", 0)] * 3
    for step in last:
        assert step.limit_bytes is not None
        assert step.peak_bytes <= step.limit_bytes + SCALARS_BYTES, step
