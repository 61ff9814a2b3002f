"""Between any two steps everything that people can reach is a valid tensor with the right values, wherever it lies."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tieroff
from tests.support.twins import Setting, adam, assert_same, check_twins, equal, follow, look, mlp_and_adam
from tests.support.twins import usual_step as usual
from tieroff.core.machine import Machine
from tieroff.core.plan import Plan
from tieroff.core.tensor import TensorClass
from tieroff.core.trace import Trace
from tieroff.planner.make_plan import make_plan

pytestmark = pytest.mark.timeout(60)


def test_everything_reachable_reads_right_between_steps(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        loss = usual(model, optimizer)
        states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *states]
        return (
            loss,
            [t.detach().norm() for t in tensors],
            [repr(t.detach()) for t in tensors],
            [t.detach().cpu().numpy().tolist() for t in tensors],
            [t.detach().double().sum().item() for t in tensors],
            nn.utils.get_total_norm([p.grad for p in model.parameters()]),
            nn.utils.parameters_to_vector(model.parameters()),
            [hash(tuple(t.shape)) for t in tensors],
        )

    check_twins(mlp_and_adam, step, each_setting, moves=("parameter", "gradient", "optimizer"))


def test_everything_that_lies_below_is_really_below(setting: Setting) -> None:
    model, optimizer = mlp_and_adam()
    setting.wrap(model, optimizer)
    for _ in range(4):
        usual(model, optimizer)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(setting.dir) in line]
    ranges = [tuple(int(edge, 16) for edge in line[0].split("-")) for line in maps]
    states = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    for tensor in [*model.parameters(), *(p.grad for p in model.parameters()), *states]:
        assert any(low <= tensor.data_ptr() < high for low, high in ranges)
    tieroff.unwrap(model)
    for tensor in [*model.parameters(), *(p.grad for p in model.parameters()), *states]:
        assert not any(low <= tensor.data_ptr() < high for low, high in ranges)


def test_clipping_and_writing_gradients_between_backward_and_step(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.grad += 0.001 * torch.randn_like(parameter)
                parameter.grad.data.add_(0.001)
                parameter.grad.numpy()[...] *= np.float32(0.5)
        model.first.bias.grad = model.first.bias.grad * 2
        optimizer.step()
        return loss, norm

    check_twins(mlp_and_adam, step, each_setting)


def test_optimizer_state_written_between_steps(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        loss = usual(model, optimizer)
        for number, state in enumerate(optimizer.state.values()):
            state["exp_avg"].mul_(0.5)
            state["exp_avg_sq"].data.add_(1e-3)
            state["exp_avg"].numpy()[...] += np.float32(1e-4)
            if number == index % 4:
                state["exp_avg"] = state["exp_avg"].clone() * 2
        return loss

    check_twins(mlp_and_adam, step, each_setting, moves=("parameter", "gradient", "optimizer"))


def test_checkpoints_out_of_and_into_wrapped_and_plain(each_setting: Setting) -> None:
    whole = follow(mlp_and_adam, usual, 8)

    def resumed(first: Setting | None, second: Setting | None) -> list[dict[str, Any]]:
        seen: list[dict[str, Any]] = []
        file = io.BytesIO()
        for setting, steps in ((first, range(4)), (second, range(4, 8))):
            torch.manual_seed(0)
            model, optimizer = mlp_and_adam()
            if setting is not None:
                setting.wrap(model, optimizer)
            if seen:
                file.seek(0)
                saved = torch.load(file, weights_only=True)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            for index in steps:
                torch.manual_seed(1000 + index)
                seen.append(look(model, optimizer, usual(model, optimizer)))
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            if setting is not None:
                tieroff.unwrap(model)
        return seen

    for first, second in ((each_setting, None), (None, each_setting), (each_setting, each_setting)):
        assert_same(whole.seen, resumed(first, second))


def test_loading_into_a_model_that_is_in_mid_training(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        loss = usual(model, optimizer)
        if index == 3:
            model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
            state = copy.deepcopy(optimizer.state_dict())
            for values in state["state"].values():
                values["exp_avg"] += 1
            optimizer.load_state_dict(state)
        return loss

    check_twins(mlp_and_adam, step, each_setting, steps=8)


def test_a_deepcopy_of_the_state_is_independent(each_setting: Setting) -> None:
    torch.manual_seed(0)
    model, optimizer = mlp_and_adam()
    each_setting.wrap(model, optimizer)
    for _ in range(4):
        usual(model, optimizer)
    kept = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()["state"]))
    assert equal(kept, (dict(model.state_dict()), optimizer.state_dict()["state"]))
    frozen = copy.deepcopy(kept)
    usual(model, optimizer)
    assert equal(kept, frozen)
    assert not equal(kept[0], dict(model.state_dict()))
    tieroff.unwrap(model)
    assert equal(kept, frozen)


def test_references_taken_before_a_step_follow_it(each_setting: Setting) -> None:
    held: list[torch.Tensor] = []

    def step(model: Any, optimizer: Any, index: int) -> Any:
        fresh = [p.detach() for p in model.parameters()]
        if index == 0:
            held[:] = [p.data for p in model.parameters()]
        return usual(model, optimizer), fresh, list(held)

    check_twins(mlp_and_adam, step, each_setting, moves=("optimizer",))  # what is held stays where it is


def test_what_people_hold_stays_valid_after_unwrap_and_after_the_model_died(each_setting: Setting) -> None:
    torch.manual_seed(0)
    model, optimizer = mlp_and_adam()
    each_setting.wrap(model, optimizer)
    for _ in range(4):
        usual(model, optimizer)
    weight = model.get_parameter("first.weight")
    held: list[Any] = [weight, weight.detach(), weight.grad, next(iter(optimizer.state.values()))]
    del weight
    state = held.pop()["exp_avg"].view(-1)
    values = [t.detach().clone() for t in [*held, state]]
    tieroff.unwrap(model)
    del model, optimizer
    for tensor, value in zip([*held, state], values, strict=True):
        assert torch.equal(tensor.detach(), value)


def test_data_pointers_and_versions_of_what_stays_are_stable(each_setting: Setting) -> None:
    model, optimizer = mlp_and_adam()
    each_setting.wrap(model, optimizer, min_bytes="1KiB")
    pointers = [p.data_ptr() for p in model.parameters()]
    for _ in range(4):
        usual(model, optimizer)
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert "smaller than min_bytes: first.weight" in tieroff.engine(model).explain()
    tieroff.unwrap(model)


def test_a_model_trained_without_an_optimizer(each_setting: Setting) -> None:
    def make() -> Any:
        model, _ = mlp_and_adam()
        return model, [torch.zeros_like(p) for p in model.parameters()]

    def step(model: Any, momenta: Any, index: int) -> Any:
        model.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter, momentum in zip(model.parameters(), momenta, strict=True):
                momentum.mul_(0.9).add_(parameter.grad)
                parameter -= 0.1 * momentum
        return loss

    check_twins(make, step, each_setting, steps=7)


def test_auto_on_a_tight_budget_is_as_right_as_floor(setting: Setting) -> None:
    setting.policy = "auto"
    config = setting.config()

    def run(wrapped: bool) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))
        optimizer = adam(model)
        if wrapped:
            tieroff.wrap(model, optimizer, {**config, "budget": {**config["budget"], "device": "60%"}})
        seen = []
        for index in range(6):
            torch.manual_seed(index)
            optimizer.zero_grad()
            loss = model(torch.randn(64, 32)).square().mean()
            loss.backward()
            optimizer.step()
            seen.append(look(model, optimizer, loss))
        if wrapped:
            stats = tieroff.engine(model).stats()
            assert stats.phase == "planned"
            assert sum(stats.moved_bytes.values()) > 0
            tieroff.unwrap(model)
        return seen

    assert_same(run(False), run(True))


@pytest.mark.parametrize("is_cleared", [True, False], ids=["cleared gradients", "kept gradients"])
def test_raw_writes_between_backward_and_update_into_what_the_plan_keeps_for_the_update(
    each_setting: Setting, monkeypatch: pytest.MonkeyPatch, is_cleared: bool
) -> None:
    """Under a tight plan some gradients and weights stay on the device from backward to the update, the others do not."""

    def plan_for_steady_speed(trace: Trace, machine: Machine, *others: Any) -> Plan:
        machines.append(machine)  # later ones hold what links were seen to move
        return make_plan(trace.with_durations([1_000_000] * len(trace.ops)), machines[0], *others)

    machines: list[Machine] = []
    monkeypatch.setattr("tieroff.planner.beside.work.make_plan", plan_for_steady_speed)
    # The fastest of the first plans, whatever it moves: it keeps both classes for the update.
    monkeypatch.setattr("tieroff.planner.auto.greedy.TOLERANCE", 0.0)
    monkeypatch.setattr("tieroff.planner.auto.greedy.candidate_count", lambda problem: 13)

    def run(wrap: bool) -> tuple[list[float], dict[str, Any], set[TensorClass]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        if wrap:
            config = each_setting.config(policy="greedy", background=False)
            config["budget"]["device"] = "60%"
            tieroff.wrap(model, optimizer, config, backend=each_setting.backend())
        losses = []
        for _ in range(8):
            if is_cleared:
                optimizer.zero_grad()
            loss = model(torch.randn(256, 128)).square().mean()
            loss.backward()
            for p in model.parameters():
                assert p.grad is not None
                p.grad.data.mul_(0.5)
                p.grad.numpy()[...] += 0.001
                p.data.add_(0.001)
            optimizer.step()
            losses.append(loss.item())
        kinds = set()
        if wrap:
            engine = tieroff.engine(model)
            assert engine.stats().phase == "planned" and engine.stats().fallbacks == 0
            assert engine._steps.last is not None and engine._steps.last.planned is not None
            stays = engine._steps.last.planned.executable.stays_after_backward
            kinds = {engine.trace.tensors[index].kind for index in stays}
            tieroff.unwrap(model)
        return losses, look(model, optimizer), kinds

    plain_losses, plain, _ = run(wrap=False)
    losses, wrapped, kept = run(wrap=True)
    assert kept == {TensorClass.PARAMETER, TensorClass.GRADIENT}
    assert losses == plain_losses
    assert_same([plain], [wrapped])
