"""What a step finds as it begins makes its kind: other parameters in the optimizer, other state, gradients from before.

None of it shows in the inputs of a forward, and all of it takes memory: planned steps stay within their budget by a count that
is not the engine's, and the numbers are the plain run's.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tieroff
from tests.support.oracles.bytes.device import DeviceBytes, aside
from tests.support.parity import NVME, adamw, config_for, warnings_of_tieroff
from tieroff.core.tensor import Tier

WIDTH, LAYERS, ROWS, STEPS = 128, 6, 64, 22
WORDS_BYTES = 64  # losses, and what autograd makes of them
CPU = torch.device("cpu")
GROWN_BYTES = 3 * WIDTH * WIDTH * 4  # of `Growing`, for one weight

Moment = Callable[["Run", int], None]


def nothing(run: Run, step: int) -> None:
    """The program does nothing at this moment."""


def clears(run: Run, step: int) -> None:
    run.optimizer.zero_grad()


@dataclass(frozen=True)
class Program:
    """What a loop does at each moment of a step.

    Attributes:
        before, between, after_backward, at_end: of the forward, the backward and the update.
        trained: the parameters that the optimizer is made with.
        late: numbers of steps that are in no plan, since user code changes them in their midst.
    """

    before: Moment = nothing
    between: Moment = nothing
    after_backward: Moment = nothing
    at_end: Moment = clears
    trained: Callable[[nn.Module], Iterable[nn.Parameter]] = nn.Module.parameters
    late: frozenset[int] = frozenset()


class Run:
    """One run of a program."""

    def __init__(self, program: Program, make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
        self.optimizer = make(program.trained(self.model))
        self.program, self.kept = program, list(self.model.parameters())
        self.values: list[Tensor] = []

    @property
    def layers(self) -> list[nn.Linear]:
        return [part for part in self.model if isinstance(part, nn.Linear)]

    def step(self, step: int) -> None:
        self.program.before(self, step)
        torch.manual_seed(step)
        loss = self.model(torch.randn(ROWS, WIDTH)).square().mean()
        self.program.between(self, step)
        loss.backward()
        self.program.after_backward(self, step)
        self.optimizer.step()
        self.program.at_end(self, step)
        with aside():
            self.values.append(loss.detach().clone())


def train(layers: Iterable[nn.Module], *, are_trained: bool) -> None:
    for layer in layers:
        layer.requires_grad_(are_trained)


def halves_in_turn(run: Run, step: int) -> None:
    if step % 4 == 0:
        train(run.layers[:3], are_trained=step % 8 == 0)
        train(run.layers[3:], are_trained=step % 8 == 4)


def one_more(run: Run, step: int) -> None:
    if step == 0:
        train(run.layers, are_trained=False)
    if step % 5 == 0:
        train(run.layers[-1 - step // 5 :], are_trained=True)


def adds_a_group(run: Run, step: int) -> None:
    run.model.zero_grad()
    if step == 7:
        run.optimizer.add_param_group({"params": [p for layer in run.layers[:3] for p in layer.parameters()]})


def regroups(run: Run, step: int) -> None:
    groups = run.optimizer.param_groups
    if step == 7:
        groups[0]["params"] = [p for p in run.kept if p.ndim == 1]
        groups.append({**groups[0], "params": [p for p in run.kept if p.ndim == 2][::-1], "weight_decay": 0.1})
    if step == 14:
        groups.pop()
        groups[0]["params"] = run.kept


def regroups_before_the_update(run: Run, step: int) -> None:
    if step % 7 == 6:
        run.optimizer.param_groups[0]["params"] = run.optimizer.param_groups[0]["params"][::-1]


def samples_layers(run: Run, step: int) -> None:
    if step % 5 == 0:
        chosen = random.Random(step).sample(run.layers, 2)
        train(run.layers, are_trained=False)
        train(chosen, are_trained=True)
        run.optimizer.param_groups[0]["params"] = [p for layer in chosen for p in layer.parameters()]
        run.optimizer.state.clear()


def drops_state(run: Run, step: int) -> None:
    if step in (7, 15):
        for parameter in list(run.optimizer.state)[: 12 if step == 7 else 6]:
            del run.optimizer.state[parameter]


def clears_seldom(run: Run, step: int) -> None:
    if step % 3 != 2:
        run.optimizer.zero_grad()


def clears_by_turns(run: Run, step: int) -> None:
    run.optimizer.zero_grad(set_to_none=step % 2 == 1)


def freezes_before_backward(run: Run, step: int) -> None:
    if step % 5 == 4:
        train(run.layers[3:], are_trained=False)


def trains_all(run: Run, step: int) -> None:
    run.optimizer.zero_grad()
    train(run.layers, are_trained=True)


PROGRAMS = {
    "halves in turn": Program(before=halves_in_turn),
    "halves in turn, cleared by turns": Program(before=halves_in_turn, at_end=clears_by_turns),
    "one layer more": Program(before=one_more),
    "another group": Program(at_end=adds_a_group, trained=lambda model: list(model.parameters())[6:]),
    "other groups": Program(before=regroups),
    "other groups before the update": Program(after_backward=regroups_before_the_update, late=frozenset({6, 13, 20})),
    "sampled layers": Program(before=samples_layers),
    "state dropped": Program(before=drops_state),
    "cleared before backward": Program(between=clears, at_end=nothing),
    "cleared seldom": Program(at_end=clears_seldom),
    "cleared by turns": Program(at_end=clears_by_turns),
    "frozen before backward": Program(between=freezes_before_backward, at_end=trains_all),
}


def wrapped(run: Run, folder: Path, budget: str) -> Any:
    config = config_for(NVME, folder, policy="auto", device=budget)
    config["plan"]["background"] = False
    return tieroff.engine(tieroff.wrap(run.model, run.optimizer, {"device": "cpu", **config}))


@pytest.mark.parametrize("budget", ["min", pytest.param("50%", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:.*was raised:tieroff.errors.BudgetWarning")
def test_planned_steps_have_room_for_what_they_find(name: str, budget: str, tmp_path: Path) -> None:
    program, phases = PROGRAMS[name], Counter[str]()
    plain = Run(program)
    for step in range(STEPS):
        plain.step(step)
    taken = DeviceBytes(CPU)
    run = Run(program)
    engine = wrapped(run, tmp_path, budget)
    with warnings_of_tieroff() as messages:
        for step in range(STEPS):
            taken.begin()
            run.step(step)
            phases[engine.stats().phase] += 1
            if engine.stats().phase == "planned":
                assert taken.peak_bytes <= engine.plan.budget_bytes[Tier.DEVICE] + WORDS_BYTES, f"in step {step}"
            assert (engine.stats().phase == "on demand") == (step in program.late)
    tieroff.unwrap(run.model)
    assert all(map(torch.equal, plain.values, run.values))
    assert all(map(torch.equal, plain.model.parameters(), run.model.parameters()))
    assert phases["planned"] >= 6
    assert bool(messages) == bool(program.late) and len(messages) <= len(program.late)  # a place of one kind is told once


@pytest.mark.filterwarnings("ignore:.*was raised:tieroff.errors.BudgetWarning")
def test_what_another_kinds_plan_kept_leaves_as_a_step_begins(tmp_path: Path) -> None:
    taken = DeviceBytes(CPU)
    run = Run(PROGRAMS["halves in turn"])
    engine = wrapped(run, tmp_path, "50%")
    beside: list[int] = []

    def look(*_: Any) -> None:
        beside.append(taken.live_bytes - engine.device_bytes - input_bytes)

    input_bytes = ROWS * WIDTH * 4
    run.model[0].register_forward_pre_hook(look)
    for step in range(STEPS):
        run.step(step)
    assert max(beside) <= WORDS_BYTES, f"beside what the engine counts there were, in each step, {beside} bytes"
    tieroff.unwrap(run.model)


class Growing(torch.optim.Optimizer):
    """SGD with momentum, of which each buffer is three times as large from the ninth update on."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["updates"] = updates = state.get("updates", 0) + 1
            if updates in (1, 9):
                state["momentum"] = torch.zeros((3 if updates == 9 else 1, *p.shape))
            momentum = state["momentum"][0].lerp_(p.grad, 0.1)
            p.add_(momentum, alpha=-0.1)


@pytest.mark.parametrize("budget", ["min", "60%"])
def test_a_step_over_its_budget_is_told_once_and_leaves_its_plan(budget: str, tmp_path: Path) -> None:
    optimizer = tieroff.per_parameter(Growing)
    plain = Run(Program(), optimizer)
    for step in range(STEPS):
        plain.step(step)
    taken = DeviceBytes(CPU)
    run = Run(Program(), optimizer)
    engine = wrapped(run, tmp_path, budget)
    over = []
    with warnings_of_tieroff() as messages:
        for step in range(STEPS):
            taken.begin()
            run.step(step)
            stats = engine.stats()
            if stats.phase in ("planned", "on demand") and stats.peak_device_bytes > engine.plan.budget_bytes[Tier.DEVICE]:
                over.append(step)
                before_bytes = GROWN_BYTES // 3  # the old one is there until the new one is
                assert taken.peak_bytes <= stats.peak_device_bytes + before_bytes + WORDS_BYTES, "it says less than it took"
                # What the first bucket makes the plan cannot know; it goes at once, as does what came ahead for the next.
                budget_bytes = engine.plan.budget_bytes[Tier.DEVICE]
                assert taken.peak_bytes <= budget_bytes + before_bytes + GROWN_BYTES + WORDS_BYTES
    tieroff.unwrap(run.model)
    assert all(map(torch.equal, plain.values, run.values))
    assert over == [8]
    (message,) = messages
    assert "a planned step took" in message and "momentum of" in message


@pytest.mark.filterwarnings("ignore:.*was raised:tieroff.errors.BudgetWarning")
def test_a_history_that_outgrows_the_budget_while_nothing_moves_is_told_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=20)
    rows = torch.randn(ROWS, WIDTH)

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(rows).square().mean()
        loss.backward()
        return loss

    config = config_for(NVME, tmp_path, policy="auto", device="100%")
    config["plan"]["background"] = False
    taken = DeviceBytes(CPU)
    engine = tieroff.engine(tieroff.wrap(model, optimizer, {"device": "cpu", **config}))
    over = []
    with warnings_of_tieroff() as messages:
        for _ in range(10):
            taken.begin()
            optimizer.step(evaluate)
            is_bypassed = engine.stats().phase == "nothing moved"
            over.append(is_bypassed and taken.peak_bytes > engine.plan.budget_bytes[Tier.DEVICE])
    explained = engine.explain()
    tieroff.unwrap(model)
    assert sum(over) > 1
    (message,) = messages
    assert "the state of LBFGS has grown by" in message
    assert "Not managed, and why: " in explained
    assert "(state of the optimizer that has come since its step was traced)" in explained
