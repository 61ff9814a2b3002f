"""What the program itself has on the device comes off a budget in bytes, whether or not an op of the step uses it.

By the allocator's count of all that is there.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import tieroff
from tests.accelerator import target
from tests.corpus.parts import Mlp, update
from tests.corpus.run import ON_DEVICE_BYTES, Program, differing, run
from tieroff.core.tensor import Tier
from tieroff.units import format_bytes

WIDTH, LAYERS, STEPS = 64, 6, 8
BUDGET = 288 << 10
COPIES_BYTES = LAYERS * (WIDTH * WIDTH + 2 * WIDTH) * 4  # each bias in a block of 512 bytes
APART = "what the program has there apart from the step; a budget in bytes pays for it"


class Averaged:
    """Trains a model whose parameters an average on the device follows; keeps what `explain()` says, and what a step took.

    Args:
        with_another: another model, of a budget of its own, has something on the device, too.
    """

    def __init__(self, *, with_another: bool = False) -> None:
        self.with_another = with_another
        self.said: list[str] = []
        self.budget_bytes = self.most_bytes = 0

    def __call__(self, p: Program) -> None:
        other = Mlp(WIDTH, LAYERS).to(p.device) if self.with_another else None
        if other is not None:
            p.wrap(other, torch.optim.SGD(other.parameters(), 0.1))
        model = Mlp(WIDTH, LAYERS).to(p.device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        average = [q.detach().clone() for q in model.parameters()]
        p.wrap(model, optimizer)
        for index in range(STEPS):
            loss = model(p.rows(index, 32, WIDTH)).square().mean()
            loss.backward()
            update(optimizer)
            with torch.no_grad():
                for mean, q in zip(average, model.parameters(), strict=True):
                    mean.sub_(0.1 * (mean - q))
            p.end(model, loss)
        if not p.is_plain:
            self._note(tieroff.engine(model), p.steps[-1].peak_bytes)
        p.note(*model.parameters(), *average)

    def _note(self, engine: Any, peak_bytes: int) -> None:
        self.said = [line for line in engine.explain().splitlines() if line.startswith("Not managed, and why: ")]
        self.budget_bytes, self.most_bytes = engine.plan.budget_bytes[Tier.DEVICE], peak_bytes


def trained(folder: Path, budget: str, usage: Averaged) -> Program:
    """Returns the run under a budget, after it was compared with a plain one."""
    device = target.device()
    plain, wrapped = run(Averaged(), Program(device, folder)), run(usage, Program(device, folder, budget, target.backend))
    if not usage.with_another:
        assert differing(plain, wrapped) == []
    assert [(step.phase, step.fallbacks) for step in wrapped.steps[-3:]] == [("planned", 0)] * 3
    return wrapped


def test_a_budget_in_bytes_pays_for_copies_that_no_step_uses(tmp_path: Path) -> None:
    usage = Averaged()
    wrapped = trained(tmp_path, f"{BUDGET}B", usage)
    assert usage.most_bytes <= BUDGET + ON_DEVICE_BYTES
    assert usage.budget_bytes == BUDGET - COPIES_BYTES
    assert usage.said == [f"Not managed, and why: {format_bytes(COPIES_BYTES)} ({APART})."]
    assert wrapped.steps[-1].moved_bytes > 0


def test_a_share_is_of_what_the_step_takes(tmp_path: Path) -> None:
    usage = Averaged()
    trained(tmp_path, "50%", usage)
    assert usage.said == [f"Not managed, and why: {format_bytes(COPIES_BYTES)} ({APART})."]
    assert usage.most_bytes <= usage.budget_bytes + COPIES_BYTES + ON_DEVICE_BYTES


def test_what_another_engine_has_is_its_own(tmp_path: Path) -> None:
    usage = Averaged(with_another=True)
    trained(tmp_path, f"{BUDGET}B", usage)
    assert usage.budget_bytes == BUDGET - COPIES_BYTES


def test_it_is_told_where_the_least_of_the_step_is_too_much_beside_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    usage = Averaged()
    with caplog.at_level(logging.WARNING, "tieroff"):
        trained(tmp_path, f"{COPIES_BYTES + 4096}B", usage)
    said = [record.getMessage() for record in caplog.records if "apart from its step" in record.getMessage()]
    over_bytes = usage.budget_bytes - 4096
    assert len(said) == 1
    assert said[0].endswith(f"is exceeded by {format_bytes(over_bytes)}")
