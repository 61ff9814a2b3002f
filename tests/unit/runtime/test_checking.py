"""The checking mode finds what it is there for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from torch import nn

import tieroff
from tests.support.checking import programs_checked, states_checked
from tests.support.delayed import DelayedBackend
from tieroff.core.tensor import TensorClass, Tier
from tieroff.runtime.backend.base import Backend
from tieroff.runtime.backend.cpu import CpuBackend
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.residency import State
from tieroff.runtime.items.spill import Spill
from tieroff.runtime.items.traffic import Traffic
from tieroff.runtime.step import executable
from tieroff.runtime.step.executable import Executable
from tieroff.runtime.step.feedback import Feedback
from tieroff.runtime.step.kinds import Measuring, Planned, StepKind
from tieroff.runtime.step.program import Actions, Program
from tieroff.storage.engines.native import NativeEngine
from tieroff.storage.host.pool import HostStore

MUTANTS = {"device": "cpu", "budget": {"host": "1MiB"}, "plan": {"min_bytes": 0, "background": False, "policy": "auto"}}
ACTIONS = ("outs_first", "waits", "leaves", "issues", "arrivals")
SEEDS = range(100)


def turns() -> list[str]:
    """Sends tensors down and up; returns what the checking mode found."""
    engine = NativeEngine()
    store = HostStore(1 << 20, engine)
    traffic = Traffic(CpuBackend(), Spill({Tier.HOST: store}, (Tier.HOST,)))
    traffic.begin_step(is_planned=True)
    tensors = [torch.full((64,), float(number)) for number in range(3)]
    items = [HomeItem(("state", n, "x"), f"item {n}", TensorClass.OPTIMIZER, t, Tier.HOST) for n, t in enumerate(tensors)]
    with states_checked() as found:
        for item in items:
            item.adopt(traffic)
            item.leave(traffic)
            item.lift(traffic)
            item.touch(traffic)
            item.leave(traffic)
        for _ in range(2):
            for tensor in tensors:
                tensor.mul_(2)  # below, so that what was up before is old
            for item in items:
                traffic.fetch(item)
            for item, tensor in zip(items, tensors, strict=True):
                item.lift(traffic)
                item.touch(traffic)
                tensor.add_(1)
                item.leave(traffic)
    for item in items:
        item.detach(traffic)
    items.clear()
    tensors.clear()
    store.close()
    engine.close()
    return found


def test_right_moves_pass() -> None:
    assert turns() == []


def test_a_copy_in_that_was_not_made_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_in = CpuBackend.copy_in
    monkeypatch.setattr(CpuBackend, "copy_in", lambda self, place, target: copy_in(self, place, torch.empty_like(target)))
    assert any("with two values" in text for text in turns())


def test_a_copy_out_that_was_not_made_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_out = CpuBackend.copy_out
    monkeypatch.setattr(CpuBackend, "copy_out", lambda self, source, place: copy_out(self, torch.zeros_like(source), place))
    assert any("with two values" in text for text in turns())


def test_a_tensor_that_leaves_without_a_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = Traffic.leave

    def leaves(traffic: Traffic, item: HomeItem) -> None:
        if item.place is None:  # there is nothing below yet
            return leave(traffic, item)
        traffic.free_device(item)
        item.state = State.LOWER

    monkeypatch.setattr(Traffic, "leave", leaves)
    assert "item 0 went from DEVICE to LOWER" in turns()


@dataclass(frozen=True)
class Lesion:
    """One action of a program, and what was done to it.

    Attributes:
        how: "dropped", "doubled" or "moved".
        action: its name in `Actions`.
    """

    how: str
    action: str
    tick: int
    entry: object


def without_one(entries: tuple[object, ...], entry: object) -> tuple[object, ...]:
    at = entries.index(entry)
    return entries[:at] + entries[at + 1 :]


def mutated(program: Program, seed: int) -> tuple[Program, Lesion]:
    """Returns the program with one action dropped, doubled, or moved to the tick before or after."""
    random = Random(seed)
    ticks = [{name: getattr(actions, name, ()) for name in ACTIONS} for actions in program]
    action = random.choice([name for name in ACTIONS if any(tick[name] for tick in ticks)])  # rare ones as often as others
    at, entry = random.choice([(at, entry) for at, tick in enumerate(ticks) for entry in tick[action]])
    how = random.choice(("dropped", "doubled", "moved"))
    if how == "doubled":
        ticks[at][action] += (entry,)
    else:
        ticks[at][action] = without_one(ticks[at][action], entry)
    if how == "moved":
        to = random.choice([tick for tick in (at - 1, at + 1) if 0 <= tick < len(ticks)])
        ticks[to][action] += (entry,)
    return tuple(Actions(**tick) if any(tick.values()) else None for tick in ticks), Lesion(how, action, at, entry)


class Twins:
    """A wrapped model that follows a plan, and a plain one; both take the same steps."""

    def __init__(self, backend: Backend | None = None) -> None:
        self.count = 0
        self.pairs: list[tuple[nn.Module, torch.optim.Optimizer]] = []
        for is_wrapped in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(24, 24), nn.Tanh())))
            optimizer = torch.optim.Adam(model.parameters(), 1e-3)
            if is_wrapped:
                tieroff.wrap(model, optimizer, MUTANTS, budget="50%", backend=backend)
            self.pairs.append((model, optimizer))
        while not self.is_planned:
            assert self.step()
            assert self.count < 10

    @property
    def model(self) -> nn.Module:
        return self.pairs[0][0]

    @property
    def kind(self) -> StepKind:
        kind = tieroff.engine(self.model).executor.state.kind
        assert kind is not None
        return kind

    @property
    def is_planned(self) -> bool:
        return self.count > 2 and tieroff.engine(self.model).stats().phase == "planned"

    def step(self) -> bool:
        """Takes one step; returns whether both had the same loss."""
        batch = torch.randn(32, 24, generator=torch.Generator().manual_seed(self.count))
        losses = []
        for model, optimizer in self.pairs:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        self.count += 1
        return torch.equal(*losses)

    def are_equal(self) -> bool:
        """Returns whether their parameters and optimizer state are the same."""
        (model, optimizer), (plain, of_plain) = self.pairs
        pairs = [*zip(model.parameters(), plain.parameters(), strict=True)]
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            pairs += zip(optimizer.state[one].values(), of_plain.state[other].values(), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)


def adopted(planned: Planned) -> Executable:
    """Returns what a kind of step that adopts this plan runs."""
    kind = StepKind()
    kind.advance(Measuring(planned.recorded))
    kind.adopt(planned.recorded, planned.trace, planned.plan)
    assert isinstance(kind.stage, Planned)
    return kind.stage.executable


def test_every_mutant_of_a_program_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins()
    planned = twins.kind.planned
    assert planned is not None
    made = planned.executable.program
    with programs_checked() as found:
        assert adopted(planned).program == made
        assert found == []
        lesions = []
        for seed in SEEDS:
            mutant, lesion = mutated(made, seed)
            monkeypatch.setattr(executable, "make_program", lambda *_, mutant=mutant: mutant)
            adopted(planned)
            assert found, f"seed {seed}: {lesion} was not caught"
            expected = 2 if lesion.how == "moved" else 1
            assert len(found) == expected, f"seed {seed}: {lesion} was caught as {found}"
            found.clear()
            lesions.append(lesion)
    tieroff.unwrap(twins.model)
    assert {lesion.how for lesion in lesions} == {"dropped", "doubled", "moved"}
    assert {lesion.action for lesion in lesions} >= {"waits", "leaves", "issues", "arrivals"}


@pytest.mark.parametrize("make_backend", [CpuBackend, lambda: DelayedBackend(3)], ids=["cpu", "delayed"])
def test_no_mutant_of_a_program_gives_a_wrong_number(
    make_backend: Callable[[], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong program is slow at worst: an item's state, and not the program, says what may be done with it."""
    monkeypatch.setattr(
        Feedback, "passes", lambda feedback, **_: True
    )  # no other plan comes in between, however slow the machine
    twins = Twins(make_backend())
    right = twins.kind.stage
    assert isinstance(right, Planned)
    runner = tieroff.engine(twins.model).executor.runner
    with states_checked() as found:
        for seed in SEEDS:
            mutant, lesion = mutated(right.executable.program, seed)
            twins.kind.stage = stage = replace(right, executable=replace(right.executable, program=mutant))
            assert twins.step(), f"seed {seed}: {lesion}"
            assert runner.follows(stage)
            twins.kind.stage = right
            assert twins.step(), f"after seed {seed}: {lesion}"
        assert found == []
    assert twins.are_equal()
    assert twins.is_planned
    tieroff.unwrap(twins.model)
