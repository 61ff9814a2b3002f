"""Copies out begin when the engine has their tensor, not when its memory has to be free."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import tieroff
from tests.support.delayed import DelayedBackend
from tests.support.parity import machine_file
from tieroff.core.plan import Plan, Transfer
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.runtime.backend.base import Backend
from tieroff.runtime.backend.cpu import CpuBackend
from tieroff.runtime.execution.clock import StepTimes
from tieroff.runtime.execution.runner import PlanRunner
from tieroff.runtime.execution.state import StepState
from tieroff.runtime.items.activation import ActivationItem
from tieroff.runtime.items.item import Item
from tieroff.runtime.step.kinds import Measuring, StepKind
from tieroff.runtime.step.mode import Mode
from tieroff.runtime.step.recorded import Recorded

KIB = 1 << 10


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())]
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def config(folder: Path, share: str) -> dict[str, object]:
    return {
        "device": "cpu",
        "budget": {"device": share, "host": "1MiB", "nvme": "64MiB"},
        "nvme": {"dirs": [str(folder)], "staging": "64KiB"},
        "plan": {"min_bytes": "4KiB", "machine": str(machine_file(folder))},  # measured links decide how early copies begin
    }


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[str]:
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(256, 256, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


@pytest.mark.parametrize(("kind", "tick", "ticks"), [(TensorClass.ACTIVATION, "pack", 0), (TensorClass.GRADIENT, "grad", 1)])
def test_copies_out_begin_when_the_tensor_is_there(
    kind: TensorClass, tick: str, ticks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make()
    # The plan of a busy machine has other copies.
    monkeypatch.setattr(StepTimes, "durations_ns", lambda times: [100_000] * len(times.starts_ns))
    tieroff.wrap(model, optimizer, config(tmp_path, "28%"))
    engine = tieroff.engine(model)
    train(model, optimizer, 3)
    executor = engine.executor
    begun: dict[int, int] = {}
    start_out = executor.traffic._start_out

    def note(item: Item) -> None:
        begun.setdefault(item.index, executor.runner.cursor - 1)
        start_out(item)

    monkeypatch.setattr(executor.traffic, "_start_out", note)
    train(model, optimizer, 1)
    plan, trace, names = engine.plan, engine.trace, [op.name for op in engine.trace.ops]
    checked = 0
    assert executor.runner.planned is not None
    executable = executor.runner.planned.executable
    for transfer in plan.transfers:
        tensor = trace.tensors[transfer.tensor]
        if transfer.source is not Tier.DEVICE or tensor.kind is not kind:
            continue
        owner = tensor.name.removeprefix("activation:").removeprefix("gradient of ")
        there = names.index(f"{tick}:{owner}") + ticks
        if transfer.issue_at > there or transfer.ready_by <= there:
            continue
        if transfer.tensor in executable.stays_after_backward and transfer.ready_by > executable.update_at:
            there = executable.update_at  # user code may write it until then
            assert begun[transfer.tensor] >= there, f"the copy of {tensor.name} began before user code ran"
        assert begun[transfer.tensor] <= there, f"expected the copy of {tensor.name} to begin at op {there}"
        checked += 1
    assert checked >= 3
    tieroff.unwrap(model)


@pytest.mark.parametrize("backend", [CpuBackend, lambda: DelayedBackend(3)], ids=["cpu", "delayed"])
def test_a_gradient_is_copied_as_hooks_of_users_leave_it(backend: type[Backend], tmp_path: Path) -> None:
    """They run after the engine's own, and may write it in ways that no version shows."""
    runs = []
    for is_wrapped in (False, True):
        model, optimizer = make()
        if is_wrapped:
            tieroff.wrap(model, optimizer, config(tmp_path, "35%"), backend=backend())
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(halve)
        runs.append((train(model, optimizer, 6), [p.detach().clone() for p in model.parameters()]))
        if is_wrapped:
            assert engine_moved(model) > 0
            tieroff.unwrap(model)
    (losses, values), (wrapped_losses, wrapped_values) = runs
    assert wrapped_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(values, wrapped_values, strict=True))


@pytest.mark.parametrize("budget", ["30%", "40%"])
def test_a_gradient_is_copied_as_hooks_of_other_parameters_leave_it(budget: str, tmp_path: Path) -> None:
    """They write it some ticks after it arrived, when a copy of it could be under way."""
    results = []
    for is_wrapped in (False, True):
        torch.manual_seed(0)
        linears = [nn.Linear(256, 256) for _ in range(6)]
        model = nn.Sequential(*(layer for linear in linears for layer in (linear, nn.LayerNorm(256), nn.GELU())))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if is_wrapped:
            tieroff.wrap(model, optimizer, config(tmp_path, budget))
        for linear, earlier in zip(linears[1:], linears, strict=False):
            earlier.weight.register_post_accumulate_grad_hook(partial(halve_other, linear.weight))
        results.append(train(model, optimizer, 8))
        if is_wrapped:
            assert tieroff.engine(model).stats().phase == "planned" and engine_moved(model) > 0
            tieroff.unwrap(model)
    assert results[0] == results[1]


def halve_other(other: torch.Tensor, _: torch.Tensor) -> None:
    halve(other)


def halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.data.mul_(0.5)


def engine_moved(model: nn.Module) -> int:
    return tieroff.engine(model).stats().moved_bytes_by_class["gradient"]


class Stored:
    """Stands for what moves bytes."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def store(self, item: Item) -> None:
        self.items.append(item)


SAVED = tuple(Tensor(f"{i}", KIB, TensorClass.ACTIVATION) for i in range(3))


def runner_at(
    cursor: int, plan: Plan, traffic: Stored, tensors: tuple[Tensor, ...] = SAVED, written_in: Sequence[int] = ()
) -> PlanRunner:
    """Returns a runner of a plan of ten ops, of which some write all tensors, so many ticks into its step."""
    keys = tuple(range(10))
    written = tuple(range(len(tensors)))
    trace = Trace(tuple(Op(f"op {key}", 1, writes=written if key in written_in else ()) for key in keys), tensors)
    recorded = Recorded(keys, tuple(map(str, keys)), trace, {}, frozenset(), frozenset(), {}, False, 0)
    kind, state = StepKind(), StepState()
    kind.advance(Measuring(recorded))
    kind.adopt(recorded, trace, plan)
    runner = PlanRunner(state, traffic)  # type: ignore[arg-type]
    runner.begin(kind.planned)
    state.mode, runner.cursor = Mode.PLANNED, cursor
    return runner


def test_what_may_still_be_written_waits() -> None:
    """Such as what `rrelu` saves: it fills it after it saved it, and its version does not move."""
    outs = [Transfer(tensor, Tier.DEVICE, Tier.NVME, issue_at=4, ready_by=9, rank=0) for tensor in range(3)]
    items = [ActivationItem(i, KIB, Tier.NVME) for i in range(4)]
    for index, item in enumerate(items):
        item.index, item.device = index, torch.zeros(KIB, dtype=torch.uint8)
    traffic = Stored()
    runner = runner_at(4, Plan("test", "", 10, {}, {}, (), tuple(outs)), traffic)
    runner.copy_if_due(items[3])
    runner.copy_if_due(items[0])
    assert traffic.items == [], "one has no copy out in the plan, and the tick of the other's comes next"
    assert runner.advance(4)
    runner.copy_if_due(items[0])
    runner.copy_if_due(items[1], 3)
    runner.copy_if_due(items[2], 1)
    assert traffic.items == [items[0]]
    other = threading.Thread(target=runner.advance, args=(5,))
    other.start()
    other.join()
    assert runner.cursor == 6
    assert traffic.items == [items[0]], "hooks of users may still run in the thread that took it"
    assert runner.advance(6)
    assert traffic.items == [items[0], items[2]]
    items[1].device = None
    assert runner.advance(7)
    assert traffic.items == [items[0], items[2]], "what has left meanwhile is not copied again"
    runner.copy_if_due(items[2], 1)
    runner.stop()
    assert runner.advance(8)
    assert len(traffic.items) == 2, "a step that broke off leaves nothing to do"


@pytest.mark.parametrize(
    ("issued_at", "is_copied"), [((2,), False), ((4,), False), ((2, 9), False), ((5,), True), ((2, 5), True), ((6,), False)]
)
def test_a_gradient_of_an_earlier_backward_is_another_one(issued_at: tuple[int, ...], is_copied: bool) -> None:
    """Where it is cleared before the next one, a plan may copy it out, and keep the one that comes."""
    gradient = Tensor("gradient", KIB, TensorClass.GRADIENT, is_persistent=True)
    outs = tuple(Transfer(0, Tier.DEVICE, Tier.NVME, issue_at=at, ready_by=at + 1, rank=0) for at in issued_at)
    traffic, item = Stored(), ActivationItem(0, KIB, Tier.NVME)
    runner = runner_at(6, Plan("test", "", 10, {}, {}, (), outs), traffic, (gradient,), written_in=(1, 4))
    item.index, item.device = 0, torch.zeros(KIB, dtype=torch.uint8)
    runner.copy_if_due(item)
    assert traffic.items == [item] * is_copied


def test_another_event_than_planned_does_nothing() -> None:
    runner = runner_at(4, Plan("test", "", 10, {}, {}, (), ()), Stored())
    assert not runner.advance(7)
    assert (runner.cursor, runner.expected) == (4, "4")
