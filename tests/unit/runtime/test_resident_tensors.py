"""What a plan never moves has no item, and is taken over where that is needed after all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tieroff.core.tensor import TensorClass, Tier

CONFIG: dict[str, Any] = {
    "device": "cpu",
    "budget": {"device": "75%", "host": "1MiB"},
    "plan": {"policy": "auto", "min_bytes": 0, "background": False},
}


class Net(nn.Module):
    """Saves activations once, as views, and twice; another op joins the step where `is_longer`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(8))
        self.is_longer = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            y = torch.tanh(layer(x))
            x = y * y.view(2, -1, 24).view(-1, 24)
            if self.is_longer and number == 3:
                x = torch.sigmoid(x) * x
        return x


def make(budget: str | None) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    if budget is not None:
        tieroff.wrap(model, optimizer, CONFIG, budget=budget)
    return model, optimizer


def batch(step: int) -> torch.Tensor:
    return torch.randn(32, 24, generator=torch.Generator().manual_seed(step))


def train(model: Net, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    losses = []
    for step in steps:
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def planned(budget: str = "75%") -> tuple[Net, torch.optim.Optimizer]:
    model, optimizer = make(budget)
    train(model, optimizer, range(6))
    assert tieroff.engine(model).stats().phase == "planned"
    return model, optimizer


def equal(model: Net, plain: Net) -> bool:
    pairs = zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def moved(model: Net, kind: TensorClass) -> tuple[int, int]:
    """Returns how many tensors of a class the plan moves, and how many there are."""
    plan, trace = tieroff.engine(model).plan, tieroff.engine(model).trace
    of_kind = {index for index, tensor in enumerate(trace.tensors) if tensor.kind is kind}
    return len(of_kind & {transfer.tensor for transfer in plan.transfers}), len(of_kind)


def saved_in_all(*, is_longer: bool) -> int:
    """Returns how many activations a step without a plan has items for when its forward ends."""
    model, _ = make("75%")
    model.is_longer = is_longer
    model(batch(0)).square().mean()
    count = len(list(tieroff.engine(model).executor.activations))
    tieroff.unwrap(model)
    return count


def test_only_what_moves_has_items() -> None:
    model, _ = planned()
    engine = tieroff.engine(model)
    loss = model(batch(9)).square().mean()
    moves, count = moved(model, TensorClass.ACTIVATION)
    assert moves < count, "a budget under which some stay was expected"
    assert len(list(engine.executor.activations)) <= moves
    loss.backward()
    moves, count = moved(model, TensorClass.GRADIENT)
    assert moves < count
    assert len(engine.executor.homes.gradients) <= moves
    tieroff.unwrap(model)


def test_a_step_that_leaves_its_plan_moves_what_was_left_alone() -> None:
    model, optimizer = planned()
    plain, of_plain = make(None)
    train(plain, of_plain, range(6))
    model.is_longer = plain.is_longer = True
    loss, expected = model(batch(9)).square().mean(), plain(batch(9)).square().mean()
    assert len(list(tieroff.engine(model).executor.activations)) == saved_in_all(is_longer=True)
    for value, step in ((loss, optimizer), (expected, of_plain)):
        value.backward()
        step.step()
        step.zero_grad()
    assert torch.equal(loss, expected)
    assert tieroff.engine(model).stats().fallbacks == 1
    assert all(
        torch.equal(a, b)
        for a, b in zip(train(model, optimizer, range(10, 14)), train(plain, of_plain, range(10, 14)), strict=True)
    )
    assert equal(model, plain)
    tieroff.unwrap(model)


def test_a_backward_that_leaves_its_plan_moves_gradients_that_were_left_alone() -> None:
    model, optimizer = planned()
    plain, of_plain = make(None)
    train(plain, of_plain, range(6))
    engine = tieroff.engine(model)
    seen: list[int] = []
    for one, step in ((model, optimizer), (plain, of_plain)):
        loss = one(batch(9)).square().mean()
        loss.backward(retain_graph=True)
        if one is model:
            alone = len(engine.executor.homes.gradients)
        loss.backward()  # every gradient comes twice: no planned step had that
        if one is model:
            seen += [alone, len(engine.executor.homes.gradients)]
        step.step()
        step.zero_grad()
    assert seen[0] < seen[1] == len(model.layers) * 2
    assert equal(model, plain)
    tieroff.unwrap(model)


def test_a_graph_that_outlives_its_step_is_taken_over() -> None:
    model, optimizer = planned()
    plain, of_plain = make(None)
    train(plain, of_plain, range(6))
    grads = []
    for one, step in ((model, optimizer), (plain, of_plain)):
        x = batch(9).requires_grad_()
        kept = one(batch(8)).square().mean()
        kept.backward(retain_graph=True)
        step.step()
        step.zero_grad()
        loss = one(batch(9)).square().mean()
        if one is model:
            held = sum(item.size_bytes for item in tieroff.engine(model).executor.activations)
            assert held > 0, "the engine counts what the older graph holds"
        loss.backward()
        step.step()
        step.zero_grad()
        grads.append(x.grad)
        del kept
    assert equal(model, plain)
    assert all(
        torch.equal(a, b)
        for a, b in zip(train(model, optimizer, range(10, 13)), train(plain, of_plain, range(10, 13)), strict=True)
    )
    tieroff.unwrap(model)


def test_gradients_that_are_not_cleared_are_taken_over() -> None:
    model, optimizer = planned()
    plain, of_plain = make(None)
    train(plain, of_plain, range(6))
    for one, step in ((model, optimizer), (plain, of_plain)):
        for number in (9, 10):  # the second is added to the first, which its update has used
            one(batch(number)).square().mean().backward()
            step.step()
        step.zero_grad()
    assert equal(model, plain)
    assert all(
        torch.equal(a, b)
        for a, b in zip(train(model, optimizer, range(11, 14)), train(plain, of_plain, range(11, 14)), strict=True)
    )
    tieroff.unwrap(model)


def test_a_write_to_one_that_was_saved_is_an_error() -> None:
    model, _ = planned("95%")
    outputs: list[torch.Tensor] = []

    def exponential(_module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        outputs.append(torch.exp(output))
        return outputs[-1]

    model.layers[2].register_forward_hook(exponential)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tieroff.unwrap(model)
    tieroff.wrap(model, optimizer, CONFIG, budget="95%")
    for step in range(5):
        outputs.clear()
        train(model, optimizer, range(step, step + 1))
    assert tieroff.engine(model).stats().phase == "planned"
    outputs.clear()
    loss = model(batch(9)).square().mean()
    with torch.no_grad():
        outputs[0].add_(1)  # exp saved it
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    tieroff.unwrap(model)


def test_a_model_that_sleeps_has_nothing_left_on_the_device() -> None:
    model, optimizer = planned()
    plain, of_plain = make(None)
    train(plain, of_plain, range(6))
    kept = model(batch(9)).square().mean()
    kept.backward(retain_graph=True)
    expected = plain(batch(9)).square().mean()
    expected.backward()
    assert tieroff.engine(model).device_bytes > 0
    tieroff.sleep(model)
    assert tieroff.engine(model).device_bytes == 0
    for one, step in ((model, optimizer), (plain, of_plain)):
        assert all(p.grad is not None for p in one.parameters())
        step.step()
        step.zero_grad()
    del kept
    assert equal(model, plain)
    pairs = zip(train(model, optimizer, range(10, 13)), train(plain, of_plain, range(10, 13)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    tieroff.unwrap(model)


class Twins(nn.Module):
    """Two branches alike, whose tensors are saved in an order that a flag turns round."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(24, 24, bias=False) for _ in range(6))
        self.right = nn.ModuleList(nn.Linear(24, 24, bias=False) for _ in range(6))
        self.is_turned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for pair in zip(self.left, self.right, strict=True):
            first, second = [torch.sigmoid(layer(x)) for layer in (reversed(pair) if self.is_turned else pair)]
            x = first * second
        return x


@pytest.mark.parametrize("budget", ["90%", "75%", "60%"])
def test_tensors_of_one_size_that_come_in_another_order_have_their_own_values(budget: str) -> None:
    losses: list[list[torch.Tensor]] = []
    models: list[Twins] = []
    for config in (CONFIG, None):
        torch.manual_seed(0)
        model = Twins()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        if config is not None:
            tieroff.wrap(model, optimizer, config, budget=budget)
        seen = []
        for step in range(16):
            model.is_turned = step in (7, 9, 10, 13)
            seen += train(model, optimizer, range(step, step + 1))  # type: ignore[arg-type]
        losses.append(seen)
        models.append(model)
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    assert equal(models[0], models[1])  # type: ignore[arg-type]
    assert tieroff.engine(models[0]).stats().phase == "planned"
    tieroff.unwrap(models[0])


@pytest.mark.parametrize("budget", ["90%", "75%"])
def test_steps_follow_their_plan_again_after_one_that_left_it(budget: str) -> None:
    """Parameters lie elsewhere by then, without a read that says so, and another order of saved tensors is remembered."""
    torch.manual_seed(0)
    model = Twins()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tieroff.wrap(model, optimizer, CONFIG, budget=budget)
    engine = tieroff.engine(model)
    train(model, optimizer, range(7))  # type: ignore[arg-type]
    model.is_turned = True
    train(model, optimizer, range(7, 8))  # type: ignore[arg-type]
    model.is_turned = False
    train(model, optimizer, range(8, 9))  # type: ignore[arg-type]
    assert (engine.stats().phase, engine.stats().fallbacks) == ("planned", 0)
    tieroff.unwrap(model)


def staying(model: Net) -> int:
    """Returns the number of a layer whose weight the plan has on the device all the time."""
    trace = tieroff.engine(model).trace
    moves = {trace.tensors[transfer.tensor].name for transfer in tieroff.engine(model).plan.transfers}
    return next(n for n in range(1, len(model.layers)) if f"layers.{n}.weight" not in moves)


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_a_parameter_that_stays_counts_as_it_was_saved_when_it_is_given_other_memory(is_taken_over: bool) -> None:
    model, optimizer = planned("90%")
    plain, of_plain = make(None)
    train(plain, of_plain, range(6))
    number = staying(model)
    for one, step in ((model, optimizer), (plain, of_plain)):
        loss = one(batch(9)).square().mean()
        weight = one.layers[number].weight
        assert isinstance(weight, nn.Parameter)
        weight.data = weight.data * 2
        if is_taken_over and one is model:
            tieroff.sleep(model)
        loss.backward()  # with the value that forward had
        step.step()
        step.zero_grad()
    assert equal(model, plain)
    pairs = zip(train(model, optimizer, range(10, 14)), train(plain, of_plain, range(10, 14)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    tieroff.unwrap(model)


def test_a_write_to_a_parameter_that_stays_is_an_error_until_backward() -> None:
    model, optimizer = planned("90%")
    loss = model(batch(9)).square().mean()
    weight = model.layers[staying(model)].weight
    with torch.no_grad():
        weight.mul_(2)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    with torch.no_grad():
        weight.div_(2)  # type: ignore[operator]
    plain, of_plain = make(None)
    train(plain, of_plain, range(6))
    pairs = zip(train(model, optimizer, range(10, 14)), train(plain, of_plain, range(10, 14)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    tieroff.unwrap(model)


def test_a_parameter_that_stays_leaves_with_a_step_that_leaves_its_plan() -> None:
    """Views of it that a graph holds are handed over, else it would be held up."""
    model, _ = planned("90%")
    engine = tieroff.engine(model)
    model.is_longer = True
    kept = model(batch(9)).square().mean()
    assert engine.stats().fallbacks == 0
    with torch.no_grad():
        model(batch(10))  # fetches every parameter, and lets it go
    assert kept.requires_grad
    tieroff.sleep(model)
    assert engine.device_bytes == 0
    tieroff.unwrap(model)


@pytest.mark.parametrize("policy", ["floor", "auto"])
def test_a_smaller_step_by_the_same_plan_counts_no_more_memory(policy: str) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tieroff.wrap(model, optimizer, {**CONFIG, "plan": {**CONFIG["plan"], "policy": policy}})
    peaks = {}
    for rows in (32, 32, 32, 16, 8):
        model(torch.randn(rows, 24)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        stats = tieroff.engine(model).stats()
        peaks[rows] = stats.peak_device_bytes
    assert (stats.phase, stats.fallbacks) == ("planned", 0)
    assert peaks[8] <= peaks[16] <= peaks[32] == tieroff.engine(model).plan.peak_bytes[Tier.DEVICE]
    tieroff.unwrap(model)


def test_a_graph_that_outlives_its_step_leaves_the_device_as_the_next_one_begins() -> None:
    losses = []
    for budget in (None, "75%"):
        model, optimizer = make(budget)
        values = []
        for step in range(7):  # names hold the graph of the step before until this one's forward is over
            out, factor = model(batch(step)), batch(step + 20).requires_grad_()
            loss = out.square().mean()
            loss.backward(retain_graph=True)
            (gradient,) = torch.autograd.grad((out * factor).sum(), factor)
            optimizer.step()
            optimizer.zero_grad()
            values += [loss.detach(), gradient.clone()]
        losses.append(values)
    stats, plan = tieroff.engine(model).stats(), tieroff.engine(model).plan
    assert (stats.phase, stats.fallbacks) == ("planned", 0)
    assert stats.peak_device_bytes <= plan.peak_bytes[Tier.DEVICE]
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    tieroff.unwrap(model)
