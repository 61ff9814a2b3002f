"""What the program itself has on the device comes off a budget in bytes, and steps that take more than the traced one are told.

By the allocator's count of all that is there.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from functools import partial
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
WEIGHT_BYTES = WIDTH * WIDTH * 4
MORE = "more than the step that was traced"
APART = "what the program has there apart from the step; a budget in bytes pays for it"


class Late:
    """Trains a model, and from a step on has copies of its weights on the device, or ever more of something.

    Args:
        what: "a penalty" on the distance from the copies is in the loss; "an average" follows the weights after each update; "a
            buffer" gets a tensor in each step; "a look" has copies of the weights after each update, from the first on.
    """

    AT, STEPS = 4, 14

    def __init__(self, what: str) -> None:
        self.what = what
        self.kept: list[torch.Tensor] = []

    def __call__(self, p: Program) -> None:
        self.kept = []
        model = Mlp(WIDTH, LAYERS).to(p.device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        p.wrap(model, optimizer)
        for index in range(self.STEPS):
            loss = model(p.rows(index, 32, WIDTH)).square().mean()
            if self.what == "a penalty" and self.kept:
                pairs = zip(model.parameters(), self.kept, strict=True)
                loss = loss + 0.1 * sum((q - old).square().sum() for q, old in pairs)
            loss.backward()
            update(optimizer)
            self._keep(p, model, index)
            p.end(model, loss)
        p.note(*model.parameters())

    def _keep(self, p: Program, model: torch.nn.Module, index: int) -> None:
        if self.what == "a buffer":
            self.kept.append(torch.ones(WIDTH, WIDTH, device=p.device))
        elif index == self.AT or self.what == "a look":
            self.kept = [q.detach().clone() for q in model.parameters()]
        elif self.what == "an average" and self.kept:
            with torch.no_grad():
                for mean, q in zip(self.kept, model.parameters(), strict=True):
                    mean.lerp_(q, 0.1)


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


class More:
    """Trains a model whose steps take more than the traced one, which no event shows.

    Args:
        what: "rectified": by RAdam, one parameter after the other, which rectifies from its sixth update on; "each fourth": in
            every fourth step there is a tensor more between backward and update; "nothing": they do not.
    """

    STEPS = 16

    def __init__(self, what: str) -> None:
        self.what = what

    def __call__(self, p: Program) -> None:
        model = Mlp(WIDTH, LAYERS).to(p.device)
        kind = torch.optim.RAdam if self.what == "rectified" else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=1e-3, foreach=False)
        p.wrap(model, optimizer)
        for index in range(self.STEPS):
            loss = model(p.rows(index, 32, WIDTH)).square().mean()
            loss.backward()
            if self.what == "each fourth" and index % 4 == 3:
                p.note(torch.full((16 * WIDTH, WIDTH), float(index), device=p.device).sum())
            update(optimizer)
            p.end(model, loss)
        p.note(*model.parameters())


@pytest.fixture
def before_bytes() -> int:
    """What other tests of this process have left on the device."""
    gc.collect()
    return torch.accelerator.memory_allocated(target.device())


def trained(folder: Path, budget: str, usage: Averaged) -> Program:
    """Returns the run under a budget, after it was compared with a plain one."""
    device = target.device()
    plain, wrapped = run(Averaged(), Program(device, folder)), run(usage, Program(device, folder, budget, target.backend))
    if not usage.with_another:
        assert differing(plain, wrapped) == []
    assert [(step.phase, step.fallbacks) for step in wrapped.steps[-3:]] == [("planned", 0)] * 3
    return wrapped


def test_a_budget_in_bytes_pays_for_copies_that_no_step_uses(before_bytes: int, tmp_path: Path) -> None:
    usage = Averaged()
    wrapped = trained(tmp_path, f"{BUDGET + before_bytes}B", usage)
    assert usage.most_bytes <= BUDGET + ON_DEVICE_BYTES
    assert usage.budget_bytes == BUDGET - COPIES_BYTES
    assert usage.said == [f"Not managed, and why: {format_bytes(COPIES_BYTES + before_bytes)} ({APART})."]
    assert wrapped.steps[-1].moved_bytes > 0


def test_a_share_is_of_what_the_step_takes(before_bytes: int, tmp_path: Path) -> None:
    usage = Averaged()
    trained(tmp_path, "50%", usage)
    assert usage.said == [f"Not managed, and why: {format_bytes(COPIES_BYTES + before_bytes)} ({APART})."]
    assert usage.most_bytes <= usage.budget_bytes + COPIES_BYTES + ON_DEVICE_BYTES


def test_what_another_engine_has_is_its_own(before_bytes: int, tmp_path: Path) -> None:
    usage = Averaged(with_another=True)
    trained(tmp_path, f"{BUDGET + before_bytes}B", usage)
    assert usage.budget_bytes == BUDGET - COPIES_BYTES


def test_it_is_told_where_the_least_of_the_step_is_too_much_beside_it(
    before_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    usage = Averaged()
    with caplog.at_level(logging.WARNING, "tieroff"):
        trained(tmp_path, f"{COPIES_BYTES + before_bytes + 4096}B", usage)
    said = [record.getMessage() for record in caplog.records if "apart from its step" in record.getMessage()]
    over_bytes = usage.budget_bytes - 4096
    assert len(said) == 1
    assert said[0].endswith(f"is exceeded by {format_bytes(over_bytes)}")


def late(
    folder: Path, budget: str, usage: Late | More, caplog: pytest.LogCaptureFixture, told: str = "than when its step was traced"
) -> tuple[Program, list[str]]:
    """Returns the run under a budget, after it was compared with a plain one, and what was said with the words `told`."""
    device = target.device()
    plain = run(usage, Program(device, folder))
    with caplog.at_level(logging.WARNING, "tieroff"):
        wrapped = run(usage, Program(device, folder, budget, target.backend))
    assert differing(plain, wrapped) == []
    assert [(step.phase, step.fallbacks) for step in wrapped.steps[-2:]] == [("planned", 0)] * 2
    said = [record.getMessage() for record in caplog.records]
    return wrapped, [message for message in said if told in message]


@pytest.mark.parametrize("what", ["a penalty", "an average"])
def test_a_step_is_traced_again_after_copies_were_made(
    what: str, before_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    budget_bytes = 400 << 10
    wrapped, said = late(tmp_path, f"{budget_bytes + before_bytes}B", Late(what), caplog)
    assert wrapped.steps[-1].peak_bytes <= budget_bytes + ON_DEVICE_BYTES
    assert len(said) == 1
    assert said[0].startswith(f"the program has {format_bytes(COPIES_BYTES)} more")


@pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning")
def test_a_share_holds_with_copies_that_a_loss_uses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wrapped, said = late(tmp_path, "50%", Late("a penalty"), caplog)
    last = wrapped.steps[-1]
    assert last.limit_bytes is not None
    assert last.peak_bytes <= last.limit_bytes + ON_DEVICE_BYTES
    assert len(said) == 1


def test_memory_that_grows_all_the_time_has_steps_traced_again_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wrapped, said = late(tmp_path, "50%", Late("a buffer"), caplog)
    assert [step.phase for step in wrapped.steps].count("traced") == 3
    assert len(said) == 1


def test_an_update_that_begins_to_make_more_is_told_and_traced_again(
    before_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    budget_bytes = 192 << 10
    wrapped, said = late(tmp_path, f"{budget_bytes + before_bytes}B", More("rectified"), caplog, MORE)
    over = [step.peak_bytes - budget_bytes for step in wrapped.steps]
    assert [index for index, bytes_over in enumerate(over) if bytes_over > ON_DEVICE_BYTES] == [5]
    assert over[5] >= WEIGHT_BYTES
    assert len(said) == 1
    assert f"above its budget of {format_bytes(budget_bytes)}" in said[0]
    assert [step.phase for step in wrapped.steps].count("traced") == 2
    assert [(step.phase, step.fallbacks) for step in wrapped.steps[-3:]] == [("planned", 0)] * 3


@pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning")
def test_a_step_that_takes_more_now_and_then_is_traced_again_twice_at_most(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped, said = late(tmp_path, "min", More("each fourth"), caplog, MORE)
    assert 2 <= [step.phase for step in wrapped.steps].count("traced") <= 3
    assert len(said) == 1
    assert [(step.phase, step.fallbacks) for step in wrapped.steps[-3:]] == [("planned", 0)] * 3


def test_what_the_program_keeps_between_steps_is_no_larger_step_of_a_share(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped, said = late(tmp_path, "50%", Late("a look"), caplog, MORE)
    assert said == []
    assert [step.phase for step in wrapped.steps].count("traced") == 1


def in_larger_blocks(stats: Callable[[int], dict[str, Any]], index: int) -> dict[str, Any]:
    """Returns an allocator's figures as if each tensor were a large one, in a block of a tenth more than was asked for."""
    found = stats(index)
    found["requested_bytes"]["large_pool"] = found["requested_bytes"]["all"]
    lent = {name: int(1.1 * count) for name, count in found["allocated_bytes"]["all"].items()}
    found["allocated_bytes"] |= {"all": lent, "large_pool": lent}
    return found


def test_what_blocks_have_more_than_was_asked_for_is_no_memory_of_the_programs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's allocator gives a large block whole where less than a MiB would be left of it."""
    stats = torch._C._accelerator_getDeviceStats
    monkeypatch.setattr(torch._C, "_accelerator_getDeviceStats", partial(in_larger_blocks, stats))
    wrapped, said = late(tmp_path, "75%", More("nothing"), caplog)
    assert said == []
    assert [step.phase for step in wrapped.steps].count("traced") == 1
