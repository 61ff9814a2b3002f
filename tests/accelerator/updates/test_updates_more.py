"""Steps that take more from some step on than in the one that was traced: no event of theirs shows it, the allocator does."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import pytest
import torch

from tests.accelerator import target
from tests.corpus.parts import Mlp, update
from tests.corpus.run import ON_DEVICE_BYTES, Program, differing, run
from tieroff.units import format_bytes

WIDTH, LAYERS, STEPS = 64, 6, 16
WEIGHT_BYTES = WIDTH * WIDTH * 4
BUDGET = 192 << 10


class More:
    """Trains a model.

    Args:
        what: "rectified": by RAdam, one parameter after the other, which rectifies from its sixth update on; "each fourth": in
            every fourth step there is a tensor more between backward and update.
    """

    def __init__(self, what: str) -> None:
        self.what = what

    def __call__(self, p: Program) -> None:
        model = Mlp(WIDTH, LAYERS).to(p.device)
        kind = torch.optim.RAdam if self.what == "rectified" else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=1e-3, foreach=False)
        p.wrap(model, optimizer)
        for index in range(STEPS):
            loss = model(p.rows(index, 32, WIDTH)).square().mean()
            loss.backward()
            if self.what == "each fourth" and index % 4 == 3:
                p.note(torch.full((16 * WIDTH, WIDTH), float(index), device=p.device).sum())
            update(optimizer)
            p.end(model, loss)
        p.note(*model.parameters())


def trained(folder: Path, budget: str, what: str, caplog: pytest.LogCaptureFixture) -> tuple[Program, list[str]]:
    """Returns the run under a budget, after it was compared with a plain one, and what was said of steps that took more."""
    device = target.device()
    plain = run(More(what), Program(device, folder))
    with caplog.at_level(logging.WARNING, "tieroff"):
        wrapped = run(More(what), Program(device, folder, budget, target.backend))
    assert differing(plain, wrapped) == []
    assert [(step.phase, step.fallbacks) for step in wrapped.steps[-3:]] == [("planned", 0)] * 3
    said = [record.getMessage() for record in caplog.records]
    return wrapped, [message for message in said if "more than the step that was traced" in message]


@pytest.fixture
def before_bytes() -> int:
    """What other tests of this process have left on the device."""
    gc.collect()
    return torch.accelerator.memory_allocated(target.device())


def test_an_update_that_begins_to_make_more_is_told_and_traced_again(
    before_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped, said = trained(tmp_path, f"{BUDGET + before_bytes}B", "rectified", caplog)
    over = [step.peak_bytes - BUDGET for step in wrapped.steps]
    assert [index for index, bytes_over in enumerate(over) if bytes_over > ON_DEVICE_BYTES] == [5]
    assert over[5] >= WEIGHT_BYTES
    assert len(said) == 1
    assert f"above its budget of {format_bytes(BUDGET)}" in said[0]
    assert [step.phase for step in wrapped.steps].count("traced") == 2


@pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning")
def test_a_step_that_takes_more_now_and_then_is_traced_again_twice_at_most(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped, said = trained(tmp_path, "min", "each fourth", caplog)
    assert 2 <= [step.phase for step in wrapped.steps].count("traced") <= 3
    assert len(said) == 1
