"""Programs of several models under one budget: bit for bit the plain run, and never more than the budget in all."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.support.parity import HOST, NVME, PEAK_TOLERANCE, config_for
from tieroff.errors import ConfigError, StateError
from tieroff.runtime.engine import Engine

STEPS = 14

Models = Sequence[nn.Module]
Optimizers = Sequence[torch.optim.Optimizer | None]
Prepare = Callable[[Models, Optimizers], object]


def net(inputs: int, outputs: int, width: int = 32, depth: int = 6) -> nn.Sequential:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(nn.Linear(inputs, width), *layers, nn.Linear(width, outputs))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3)


def gan(prepare: Prepare, after_step: Callable[[], None], *, freezes: bool = False, cuts: bool = True) -> list[torch.Tensor]:
    """The discriminator steps twice as often; `freezes` it in the generator's step; `cuts` the graph of what is fake."""
    torch.manual_seed(0)
    generator, judge = net(8, 16), net(16, 1)
    of_generator, of_judge = adam(generator), adam(judge)
    prepare([generator, judge], [of_generator, of_judge])
    losses, criterion = [], nn.BCEWithLogitsLoss()
    for step in range(STEPS):
        torch.manual_seed(step)
        real, noise = torch.randn(16, 16), torch.randn(16, 8)
        judge.requires_grad_(True)
        judge.zero_grad()
        fake = generator(noise)
        seen = fake.detach() if cuts else generator(noise).detach()
        loss = criterion(judge(real), torch.ones(16, 1)) + criterion(judge(seen), torch.zeros(16, 1))
        loss.backward()
        of_judge.step()
        losses.append(loss.detach())
        if step % 2 == 0:
            judge.requires_grad_(not freezes)
            loss = criterion(judge(fake), torch.ones(16, 1))
            loss.backward()
            of_generator.step()
            generator.zero_grad()
            losses.append(loss.detach())
        after_step()
    return [*losses, *(p.detach().clone() for model in (generator, judge) for p in model.parameters())]


def teacher_and_student(prepare: Prepare, after_step: Callable[[], None], *, under_no_grad: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    student, teacher = net(8, 4), net(8, 4, width=48).requires_grad_(False)
    optimizer = adam(student)
    prepare([student, teacher], [optimizer, None])
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(16, 8)
        with torch.set_grad_enabled(not under_no_grad):
            wanted = teacher(x)
        loss = (student(x) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        after_step()
    return [*losses, *(p.detach().clone() for p in student.parameters())]


class ActorCritic(nn.Module):
    """An encoder that two heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.actor, self.critic = net(8, 32), net(32, 4), net(32, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        code = self.encoder(x)
        return self.actor(code), self.critic(code)


def actor_critic_as_one(prepare: Prepare, after_step: Callable[[], None]) -> list[torch.Tensor]:
    """One module; the optimizer of encoder and actor is the attached one, the critic's is stepped beside it."""
    torch.manual_seed(0)
    model = ActorCritic()
    main = torch.optim.Adam([*model.encoder.parameters(), *model.actor.parameters()], 1e-3)
    beside = torch.optim.Adam(model.critic.parameters(), 1e-2)
    prepare([model], [main])
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        chances, value = model(torch.randn(16, 8))
        loss = (chances.log_softmax(-1)[:, 0] * (1 - value.detach())).mean() + (1 - value).square().mean()
        loss.backward()
        main.step()
        beside.step()
        main.zero_grad()
        beside.zero_grad()
        losses.append(loss.detach())
        after_step()
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def actor_critic_as_two(prepare: Prepare, after_step: Callable[[], None]) -> list[torch.Tensor]:
    """Two modules that have the encoder in common; the critic's loss trains it too."""
    torch.manual_seed(0)
    encoder = net(8, 32)
    actor, critic = nn.Sequential(encoder, net(32, 4)), nn.Sequential(encoder, net(32, 1))
    of_actor, of_critic = adam(actor), adam(critic)
    prepare([actor, critic], [of_actor, of_critic])
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(16, 8)
        loss = (1 - critic(x)).square().mean()
        loss.backward()
        of_critic.step()
        of_critic.zero_grad()
        gain = (actor(x).log_softmax(-1)[:, 0] * (1 - critic(x).detach()[:, 0])).mean()
        gain.backward()
        of_actor.step()
        of_actor.zero_grad()
        of_critic.zero_grad()
        losses += [loss.detach(), gain.detach()]
        after_step()
    return [*losses, *(p.detach().clone() for model in (actor, critic) for p in model.parameters())]


PROGRAMS: dict[str, Callable[..., list[torch.Tensor]]] = {
    "gan": gan,
    "gan that freezes": lambda *with_: gan(*with_, freezes=True),
    "gan that generates twice": lambda *with_: gan(*with_, cuts=False),
    "teacher": teacher_and_student,
    "teacher without no_grad": lambda *with_: teacher_and_student(*with_, under_no_grad=False),
    "actor and critic as one": actor_critic_as_one,
    "actor and critic as two": actor_critic_as_two,
}


def nothing(*_: object) -> None:
    """A plain run."""


@pytest.mark.parametrize("tiers", (HOST, NVME), ids=lambda tiers: tiers.name)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_computes_what_it_computes_plain(program: str, tiers: Any, tmp_path: Path) -> None:
    budget, wrapped, peaks = tieroff.Budget("70%"), list[Engine](), list[int]()

    def prepare(models: Models, optimizers: Optimizers) -> None:
        config = config_for(tiers, tmp_path, policy="auto")
        assert tieroff.wrap(list(models), list(optimizers), config, budget=budget) == list(models)
        wrapped.extend(tieroff.engine(model) for model in models)
        assert all(engine.stores is wrapped[0].stores for engine in wrapped)

    def after_step() -> None:
        stepped = [engine for engine in wrapped if engine.history.steps]
        peaks.append(sum(engine.stats().peak_device_bytes for engine in stepped))
        assert sum(engine.device_bytes for engine in wrapped) <= budget.total_bytes()

    plain = PROGRAMS[program](nothing, nothing)
    seen = PROGRAMS[program](prepare, after_step)
    assert [i for i, (a, b) in enumerate(zip(plain, seen, strict=True)) if not torch.equal(a, b)] == []
    assert {engine.stats().phase for engine in wrapped if engine.history.steps} <= {"planned", "nothing moved"}
    assert 0 < max(peaks[-2:]) <= budget.total_bytes() * (1 + PEAK_TOLERANCE)
    for engine in wrapped:
        engine.close()
    assert budget.parts == []


def test_a_sleeping_model_holds_nothing_and_is_right_by_itself(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = net(8, 4), net(8, 4)
    optimizer, budget = adam(model), tieroff.Budget("80%")
    twin = copy.deepcopy(model)
    of_twin = adam(twin)
    config = config_for(HOST, tmp_path, policy="auto")
    tieroff.wrap(model, optimizer, config, budget=budget)
    tieroff.wrap(other, None, config, budget=budget)
    engine, part = tieroff.engine(model), budget.parts[0]
    for step in range(9):
        x = torch.randn(16, 8)
        for each, its in ((model, optimizer), (twin, of_twin)):
            each(x).square().mean().backward()
            its.step()
            its.zero_grad()
        if step == 5:
            held_bytes = engine.device_bytes
            tieroff.sleep(model)
            assert held_bytes > engine.device_bytes == 0 == part.held_bytes
            with torch.no_grad():
                assert torch.equal(model(x), twin(x))
            assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))
            assert engine.device_bytes == 0 and engine.is_asleep
            tieroff.wake(model)
            assert 0 < engine.device_bytes <= budget.total_bytes() and not engine.is_asleep
            tieroff.wake(model)
        elif step == 7:
            tieroff.sleep(model)  # the next step wakes it
    assert not engine.is_asleep and engine.stats().phase == "planned"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    loss = model(torch.randn(16, 8)).sum()
    with pytest.raises(StateError, match="in the middle"):
        loss.register_hook(lambda _: tieroff.sleep(model))
        loss.backward()
    for each in (model, other):
        tieroff.unwrap(each)


def test_lists_that_do_not_fit_are_refused_and_leave_plain_models(tmp_path: Path) -> None:
    first, second = net(8, 4), net(8, 4)
    config = config_for(HOST, tmp_path)
    for optimizers in ([adam(first)], adam(first)):
        with pytest.raises(StateError, match="expected a list of 2 optimizers"):
            tieroff.wrap([first, second], optimizers, config, budget="50%")  # type: ignore[arg-type]
    with pytest.raises(StateError, match=r"expected a torch\.optim\.Optimizer"):
        tieroff.wrap([first, second], [adam(first), "50%"], config)  # type: ignore[list-item]
    budget = tieroff.Budget("50%")
    tieroff.wrap(first, adam(first), config, budget=budget)
    with pytest.raises(ConfigError, match="share"):
        tieroff.wrap(second, adam(second), {**config, "budget": {"host": "1MiB"}}, budget=budget)
    tieroff.wrap(second, adam(second), config, budget=budget)
    for model in (first, second):
        tieroff.unwrap(model)
    assert budget.parts == []
    with pytest.raises(ConfigError, match="expected"):
        tieroff.Budget("much")


@pytest.mark.parametrize("name", ("gan", "grpo"))
def test_an_example_computes_what_it_computes_plain(name: str, project: Path, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, project / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plain, wrapped = module.train(None), module.train(str(tmp_path))
    assert [i for i, (a, b) in enumerate(zip(plain, wrapped, strict=True)) if not torch.equal(a, b)] == []
